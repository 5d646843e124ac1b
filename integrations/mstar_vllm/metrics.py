"""Prometheus metrics of bounded requests: counted where blocks are managed, seen at `/metrics`.

vLLM's statistics have no room for a plugin's. With one API server the scheduler's process leaves
its counts in small mapped files, in a folder whose name travels in the environment, and a
collector in the API server reads them. With several, prometheus_client itself shares values
between processes, and the scheduler's process writes there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FOLDER_VARIABLE = "MSTAR_METRICS_FOLDER"
SHARED_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
RELEASED = ("vllm:mstar_released_pages", "KV cache pages released by retention.")
GAUGES = (
    ("vllm:mstar_bounded_requests", "Requests that have released a page."),
    ("vllm:mstar_bounded_pages", "Pages those requests hold."),
    ("vllm:mstar_pages_per_bounded_request", "Pages such a request holds on average."),
    ("vllm:mstar_saved_bytes", "Bytes those requests would hold besides."),
)
_SUFFIX = ".counts"
_BYTES = "bytes-per-page-"
_registered: list[Any] = []


@dataclass(slots=True)
class Counts:
    """What one group of layers counts.

    released_pages: since the start. The others are as of the last step: requests with at least one
    page released, the pages these hold, and the pages they would hold besides.
    """

    released_pages: int = 0
    bounded_requests: int = 0
    bounded_pages: int = 0
    saved_pages: int = 0

    def gauges(self, bytes_per_page: int) -> tuple[float, ...]:
        """Values in the order of `GAUGES`."""
        return (
            self.bounded_requests,
            self.bounded_pages,
            self.bounded_pages / max(1, self.bounded_requests),
            self.saved_pages * bytes_per_page,
        )


class CountsWriter(Protocol):
    """Where a group's counts go."""

    def write(self, counts: Counts) -> None:
        """Leave the counts of this step."""


class MappedCounts:
    """A mapped file in the folder that the API server reads."""

    def __init__(self, folder: Path, group: int) -> None:
        path = folder / f"{os.getpid()}-{group}{_SUFFIX}"
        size = len(astuple(Counts()))
        self._values = np.memmap(path, dtype=np.int64, mode="w+", shape=(size,))

    def write(self, counts: Counts) -> None:
        self._values[:] = astuple(counts)


class SharedCounts:
    """Values that prometheus_client shares between processes."""

    def __init__(self, folder: Path, group: int) -> None:
        released, gauges = _shared_metrics()
        self._released = released.labels(group=group)
        self._gauges = [gauge.labels(group=group) for gauge in gauges]
        self._folder, self._group, self._seen = folder, str(group), 0

    def write(self, counts: Counts) -> None:
        self._released.inc(counts.released_pages - self._seen)
        self._seen = counts.released_pages
        values = counts.gauges(_bytes_per_page(self._folder, self._group))
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(value)


class NoCounts:
    """Without an API server nobody reads."""

    def write(self, counts: Counts) -> None:
        """Leave nothing."""


def counts_writer(group: int) -> CountsWriter:
    """Where this process leaves the counts of KV cache group `group`."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return NoCounts()
    writer = SharedCounts if SHARED_VARIABLE in os.environ else MappedCounts
    return writer(Path(folder), group)


def leave_bytes_per_page(group: int, size: int) -> None:
    """Note the bytes a page of a group takes over all its layers, which only the worker knows."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / f"{_BYTES}{group}").write_text(str(size))


def read_counts(folder: Path) -> dict[str, Counts]:
    """The counts of each group, summed over the schedulers that share the folder."""
    groups: dict[str, Counts] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        values = np.fromfile(path, dtype=np.int64)
        known = astuple(groups.get(group := path.stem.split("-")[1], Counts()))
        if len(values) == len(known):
            groups[group] = Counts(*(int(a + b) for a, b in zip(known, values, strict=True)))
    return groups


def _bytes_per_page(folder: Path, group: str) -> int:
    path = folder / f"{_BYTES}{group}"
    return int(path.read_text()) if path.exists() else 0


class BoundedRequestsCollector:
    """Reads the counts when `/metrics` is scraped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """The metric families of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        released = CounterMetricFamily(*RELEASED, labels=["group"])
        gauges = [GaugeMetricFamily(*gauge, labels=["group"]) for gauge in GAUGES]
        for group, counts in read_counts(self._folder).items():
            released.add_metric([group], counts.released_pages)
            values = counts.gauges(_bytes_per_page(self._folder, group))
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric([group], value)
        yield released
        yield from gauges


@cache
def _shared_metrics() -> tuple[Any, list[Any]]:
    from prometheus_client import Counter, Gauge

    gauges = [Gauge(*gauge, ["group"], multiprocess_mode="livesum") for gauge in GAUGES]
    return Counter(*RELEASED, ["group"]), gauges


def export_metrics() -> None:
    """Make the folder and show its counts at `/metrics`; a second call changes nothing."""
    folder = _shared_folder()
    if _registered or SHARED_VARIABLE in os.environ:
        return
    from prometheus_client import REGISTRY

    _registered.append(BoundedRequestsCollector(folder))
    REGISTRY.register(_registered[0])


def _shared_folder() -> Path:
    inherited = os.environ.get(FOLDER_VARIABLE)
    if inherited and Path(inherited).is_dir():
        return Path(inherited)
    folder = tempfile.mkdtemp(prefix="mstar-metrics-")
    os.environ[FOLDER_VARIABLE] = folder
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, creator: int) -> None:
    if os.getpid() == creator:
        shutil.rmtree(folder, ignore_errors=True)
