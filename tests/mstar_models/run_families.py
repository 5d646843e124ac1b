"""Serves families one after the other in this process: `run_families.py JOBS FOLDER`.

JOBS: a JSON file, family -> kind -> job of tests/mstar_vllm/run_engines.py. Each family's results
stand in FOLDER/<family>.json, kind -> result, as soon as it is done, so that a crash costs the
others nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mstar_vllm"))

from run_engines import run


def main(jobs_file: Path, folder: Path) -> None:
    for family, jobs in json.loads(jobs_file.read_text()).items():
        results = {kind: run(job) for kind, job in jobs.items()}
        unfinished = folder / f"{family}.part"
        unfinished.write_text(json.dumps(results))
        unfinished.rename(folder / f"{family}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
