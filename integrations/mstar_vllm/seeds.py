"""On CPU, keeps the generators of seeded requests away from samples that are thrown away.

Every step samples a token for every row, also where the prompt is not complete yet. vLLM afterwards
turns such a row's generator back by its offset, which torch's CPU generators do not have, and the
error ends the engine for everybody. A generator that was never offered needs no turning back, so
the answer is the same however the prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mstar_vllm import compat
from mstar_vllm.plugin import is_selected


def hook_sampling() -> None:
    """Hook the CPU model runner; a second call changes nothing."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    compat.wrap_method(CPUModelRunner, "sample_tokens", _sample_tokens)


def _sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    generators = runner.input_batch.generators
    if not generators or not is_selected(runner.vllm_config):
        return original(runner, *args, **kwargs)
    held = {row: generators.pop(row) for row in _discarded_rows(runner) if row in generators}
    try:
        return original(runner, *args, **kwargs)
    finally:
        generators.update(held)


def _discarded_rows(runner: Any) -> list[int]:
    """Rows of the batch whose prompt is not complete after this step."""
    mask = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    rows: list[int] = np.flatnonzero(mask).tolist()
    return rows
