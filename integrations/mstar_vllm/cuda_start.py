"""What the first attention layer of a model sets up on CUDA."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config

from mstar_vllm import graphs, rows, rows_v2, session
from mstar_vllm.crosscheck import check_slopes
from mstar_vllm.worker_start import hook_worker_start


def start_layer(layer: Any) -> None:
    """Make the server's plan current and hook its model runner; ValueError for what no policy can
    hold for.
    """
    vllm_config = get_current_vllm_config()
    plan = session.activate(vllm_config).plan
    check_slopes(plan, layer.alibi_slopes)
    if vllm_config.use_v2_model_runner:
        _hook_second_runner()
    else:
        rows.hook_model_runner()
        graphs.hook_first_runner()


def _hook_second_runner() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    hook_worker_start(GPUModelRunner)
    rows_v2.hook_model_states()
    graphs.hook_second_runner()
