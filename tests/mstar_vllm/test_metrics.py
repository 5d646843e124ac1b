"""The counts reach `/metrics` with one API server and with several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs prometheus_client, which vLLM brings")

from mstar_vllm.metrics import (
    FOLDER_VARIABLE,
    BoundedRequestsCollector,
    Counts,
    MappedCounts,
    counts_writer,
    leave_bytes_per_page,
    read_counts,
)


def samples(collector: BoundedRequestsCollector) -> dict[str, float]:
    found = [sample for family in collector.collect() for sample in family.samples]
    return {f"{s.name}/{s.labels['group']}": s.value for s in found}


def test_mapped_counts_are_read_back_per_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    leave_bytes_per_page(0, 1000)
    counts_writer(0).write(Counts(7, 2, 30, 5))
    counts_writer(1).write(Counts(1, 1, 4, 1))
    found = samples(BoundedRequestsCollector(tmp_path))
    assert found["vllm:mstar_released_pages_total/0"] == 7
    assert found["vllm:mstar_pages_per_bounded_request/0"] == 15
    assert found["vllm:mstar_saved_bytes/0"] == 5000
    assert found["vllm:mstar_bounded_requests/1"] == 1


def test_schedulers_that_share_a_folder_are_summed(tmp_path: Path) -> None:
    MappedCounts(tmp_path, 0).write(Counts(7, 2, 30, 5))
    (tmp_path / "1-0.counts").write_bytes(next(tmp_path.glob("*.counts")).read_bytes())
    assert read_counts(tmp_path) == {"0": Counts(14, 4, 60, 10)}


def test_without_an_api_server_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    counts_writer(0).write(Counts(1, 1, 1, 1))
    assert list(tmp_path.iterdir()) == []


WRITE_SHARED = """
from mstar_vllm.metrics import Counts, counts_writer
writer = counts_writer(0)
writer.write(Counts(3, 1, 9, 2))
writer.write(Counts(7, 2, 30, 5))
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_see_what_prometheus_shares(tmp_path: Path) -> None:
    import os

    folder, shared = tmp_path / "folder", tmp_path / "shared"
    folder.mkdir()
    shared.mkdir()
    environment = {FOLDER_VARIABLE: str(folder), "PROMETHEUS_MULTIPROC_DIR": str(shared)}
    done = subprocess.run(
        [sys.executable, "-c", WRITE_SHARED],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'vllm:mstar_released_pages_total{group="0"} 7.0' in done.stdout
    assert 'vllm:mstar_bounded_pages{group="0"} 30.0' in done.stdout
