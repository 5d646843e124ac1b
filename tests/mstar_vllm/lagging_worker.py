"""A worker whose card lags behind its host, as one does that others use too."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

# About 20 ms: many times what the host needs for a step.
CYCLES = 40_000_000


class LaggingWorker(Worker):
    def execute_model(self, scheduler_output: Any) -> Any:
        torch.cuda._sleep(CYCLES)
        return super().execute_model(scheduler_output)
