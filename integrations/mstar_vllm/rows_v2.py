"""Which policy holds for each request of a batch on the second-generation model runner.

The runner keeps a slot for each live request; its model state is told when one comes and goes. The
policies are kept by slot there, and published while the metadata of a batch is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from mstar_plugin.kv.config import RetentionPolicy
from mstar_vllm import compat
from mstar_vllm.policy import bound_policy, has_policy


class SlotPolicies:
    """Own policies of the live requests; `version` changes with them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.by_slot: list[RetentionPolicy | None] = [None] * num_slots
        self.version = 0
        self._slot_of: dict[str, int] = {}

    def add(self, request_id: str, slot: int, request: Any) -> None:
        params = request.sampling_params
        if params is None or not has_policy(params.extra_args):
            return
        self.by_slot[slot] = bound_policy(params.extra_args)
        self._slot_of[request_id] = slot
        self.version += 1

    def remove(self, request_id: str) -> None:
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self.by_slot[slot] = None
            self.version += 1

    def __bool__(self) -> bool:
        return bool(self._slot_of)


@dataclass(frozen=True, slots=True)
class BatchPolicies:
    """The policies and where the batch's requests are in them: `[requests]` int64, twice."""

    policies: SlotPolicies
    slots: torch.Tensor
    slots_on_host: npt.NDArray[Any]


_published: BatchPolicies | None = None
_latest: SlotPolicies | None = None


def published() -> BatchPolicies | None:
    """Own policies of the current batch; None where no live request has one."""
    return _published


def any_live() -> bool:
    """Whether any live request of this process's runner has a policy of its own."""
    return bool(_latest)


def hook_model_states() -> None:
    """Let every model state keep policies.

    Remove when builders are given the sampling parameters of their rows.
    """
    from vllm.v1.worker.gpu import model_states

    module: Any = model_states
    compat.wrap_method(module, "resolve_model_state_cls", _resolve_model_state_cls)


def _resolve_model_state_cls(
    original: Callable[..., type], vllm_config: Any, *args: Any, **kwargs: Any
) -> type:
    chosen = original(vllm_config, *args, **kwargs)
    return type(f"MStar{chosen.__name__}", (_KeepsPolicies, chosen), {})


class _KeepsPolicies:
    """Mixed in before the model state that vLLM chose."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.mstar_policies = SlotPolicies(vllm_config.scheduler_config.max_num_seqs)
        global _latest
        _latest = self.mstar_policies

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.mstar_policies.add(new_req_data.req_id, req_index, new_req_data)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)  # type: ignore[misc]
        self.mstar_policies.remove(req_id)

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        prepare = super().prepare_attn  # type: ignore[misc]
        if not self.mstar_policies or kwargs.get("for_capture"):
            return prepare(input_batch, *args, **kwargs)
        global _published
        _published = BatchPolicies(
            policies=self.mstar_policies,
            slots=input_batch.idx_mapping,
            slots_on_host=input_batch.idx_mapping_np,
        )
        try:
            return prepare(input_batch, *args, **kwargs)
        finally:
            _published = None
