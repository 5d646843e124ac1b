"""Prometheus metrics of bounded requests: written where blocks are managed, read where they are
scraped.

The scheduler's process and the front end share a folder of small mapped files, one per KV cache
group, because vLLM's statistics have no room for a plugin's. The folder's name travels in the
environment.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstar_vllm import compat

FOLDER_VARIABLE = "MSTAR_METRICS_FOLDER"
_FIELDS = ("released_pages", "bounded_requests", "bounded_pages", "saved_pages")
_SUFFIX = ".counts"
_BYTES = "bytes-per-page-"
_registered: list[Any] = []


@dataclass(slots=True)
class Counts:
    """What one group counts.

    released_pages: since the start. The others are as of the last step: requests with at least one
    page released, the pages these hold, and the pages they would hold besides.
    """

    released_pages: int = 0
    bounded_requests: int = 0
    bounded_pages: int = 0
    saved_pages: int = 0


class CountsFile:
    """Where one KV cache group's counts are left for the front end; nowhere without a folder."""

    def __init__(self, group: int) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._values: Any = None
        if folder and Path(folder).is_dir():
            path = Path(folder) / f"{os.getpid()}-{group}{_SUFFIX}"
            self._values = np.memmap(path, dtype=np.float64, mode="w+", shape=(len(_FIELDS),))

    def write(self, counts: Counts) -> None:
        """Leave the counts of this step."""
        if self._values is not None:
            self._values[:] = [getattr(counts, field) for field in _FIELDS]


def leave_bytes_per_page(group: int, size: int) -> None:
    """Note the bytes a page of a group takes over all its layers, which only the worker knows."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and Path(folder).is_dir():
        (Path(folder) / f"{_BYTES}{group}").write_text(str(size))


def read_counts(folder: Path) -> tuple[Counts, int]:
    """Sum over the schedulers and groups, and the bytes saved at the last step."""
    total, saved_bytes = Counts(), 0
    for path in folder.glob(f"*{_SUFFIX}"):
        values = np.fromfile(path, dtype=np.float64, count=len(_FIELDS))
        if len(values) < len(_FIELDS):
            continue
        for field, value in zip(_FIELDS, values, strict=True):
            setattr(total, field, getattr(total, field) + int(value))
        group = path.name.removesuffix(_SUFFIX).split("-")[1]
        saved_bytes += int(values[-1]) * _bytes_per_page(folder, group)
    return total, saved_bytes


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

        counts, saved_bytes = read_counts(self._folder)
        released = CounterMetricFamily(
            "vllm:mstar_released_pages", "KV cache pages released by retention."
        )
        released.add_metric([], counts.released_pages)
        yield released
        gauges = {
            "bounded_requests": ("Requests that have released a page.", counts.bounded_requests),
            "bounded_pages": ("Pages those requests hold.", counts.bounded_pages),
            "pages_per_bounded_request": (
                "Pages such a request holds on average.",
                counts.bounded_pages / max(1, counts.bounded_requests),
            ),
            "saved_bytes": ("Bytes those requests would hold besides.", saved_bytes),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:mstar_{name}", text)
            gauge.add_metric([], value)
            yield gauge


def export_metrics() -> None:
    """Make the folder and show the metrics beside vLLM's own; a second call changes nothing."""
    if _registered:
        return
    from prometheus_client import REGISTRY

    collector = BoundedRequestsCollector(_shared_folder())
    _registered.append(collector)
    REGISTRY.register(collector)
    compat.extend_prometheus_registry(collector)


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
