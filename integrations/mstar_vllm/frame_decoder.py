"""A token world model: Llama blocks over frames of discrete tokens, every layer with its own ring.

The weights are a Llama model's. What makes it a frame decoder are the rings that `config.json`
declares and without which it is not built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models.llama import LlamaForCausalLM

from mstar_vllm.plugin import is_selected
from mstar_vllm.serving import serving_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class FrameDecoderForCausalLM(LlamaForCausalLM):
    """Continues a stream of frames token by token; position `p` belongs to frame `p // T`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if not is_selected(vllm_config) or serving_plan(vllm_config).ring is None:
            raise ValueError(
                "FrameDecoderForCausalLM needs --attention-backend mstar and a ring in config.json "
                f"or in additional_config['mstar'], got {vllm_config.model_config.model}"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
