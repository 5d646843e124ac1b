"""What a model's KV costs: bytes per token of every group, and pages with and without retention.

Letters: `N` tokens of one stream, `S` page size, `W` window. Costs are those of one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_plugin.adapters.groups import kv_groups
from mstar_plugin.kv.retention import max_resident_pages
from mstar_plugin.model_kv import WINDOWED_KINDS, LayerKind

if TYPE_CHECKING:
    from mstar_plugin.adapters.groups import KVGroup
    from mstar_plugin.kv.config import RetentionPolicy
    from mstar_plugin.model_kv import ModelKV

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizing:
    """What to size for.

    stream_tokens: `N`. step_tokens: most tokens of the stream computed in one step, which are held
    beside what the policy keeps. retention: the policy asked about, None for none.
    """

    stream_tokens: int
    page_size: int
    step_tokens: int
    dtype: str
    retention: RetentionPolicy | None = None

    def __post_init__(self) -> None:
        for name in ("stream_tokens", "page_size", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype}")

    @property
    def stream_pages(self) -> int:
        """Pages of a stream that keeps every token: `ceil(N / S)`."""
        return -(-self.stream_tokens // self.page_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCost:
    """One KV group: `pages` without a policy, `retained_pages` with the one asked about (None: no
    policy).
    """

    key: str
    kind: str
    num_layers: int
    num_kv_heads: int
    num_qo_heads: int
    head_dim: int
    bytes_per_token: int
    pages: int
    stream_bytes: int
    retained_pages: int | None
    retained_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """A model's groups and their sums, for one stream of `stream_tokens`."""

    architecture: str
    adapter: str
    max_positions: int | None
    stream_tokens: int
    page_size: int
    dtype: str
    groups: tuple[GroupCost, ...]
    retention: RetentionPolicy | None
    retention_refusal: str | None

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def stream_bytes(self) -> int:
        return sum(group.stream_bytes for group in self.groups)

    @property
    def retained_bytes(self) -> int | None:
        """Bytes of the stream under the policy, None where none is asked about or it is refused."""
        retained = [group.retained_bytes for group in self.groups]
        return None if None in retained else sum(size for size in retained if size is not None)


def model_cost(model: ModelKV, *, adapter: str, sizing: Sizing) -> ModelCost:
    """Cost of one stream. A refused policy leaves the retained numbers out."""
    is_retained = sizing.retention is not None and model.retention_refusal is None
    return ModelCost(
        architecture=model.architecture,
        adapter=adapter,
        max_positions=model.max_positions,
        stream_tokens=sizing.stream_tokens,
        page_size=sizing.page_size,
        dtype=sizing.dtype,
        groups=tuple(
            _group_cost(group, sizing, is_retained=is_retained) for group in kv_groups(model)
        ),
        retention=sizing.retention,
        retention_refusal=model.retention_refusal,
    )


def _group_cost(group: KVGroup, sizing: Sizing, *, is_retained: bool) -> GroupCost:
    first = group.layers[0]
    bytes_per_token = group.elements_per_token * DTYPE_BYTES[sizing.dtype]
    page_bytes = bytes_per_token * sizing.page_size
    pages = _pages(group, sizing)
    retained = _retained_pages(group, sizing, pages) if is_retained else None
    return GroupCost(
        key=group.key,
        kind=group.kind.value,
        num_layers=len(group.layers),
        num_kv_heads=first.num_kv_heads,
        num_qo_heads=first.num_qo_heads,
        head_dim=first.head_dim,
        bytes_per_token=bytes_per_token,
        pages=pages,
        stream_bytes=pages * page_bytes,
        retained_pages=retained,
        retained_bytes=None if retained is None else retained * page_bytes,
    )


def _pages(group: KVGroup, sizing: Sizing) -> int:
    """Pages a stream of N tokens holds: all, or what `W - 1` keys and one step can straddle."""
    window = group.window_tokens
    if window is None:
        return sizing.stream_pages
    held = window - 1 + sizing.step_tokens
    return min(sizing.stream_pages, -(-held // sizing.page_size) + 1)


def _retained_pages(group: KVGroup, sizing: Sizing, pages: int) -> int:
    if group.kind in WINDOWED_KINDS or group.kind is LayerKind.MLA or sizing.retention is None:
        return pages
    kept = max_resident_pages(
        sizing.retention.context_budget,
        sizing.retention.protected_prefix,
        sizing.page_size,
        sizing.step_tokens,
    )
    return min(pages, kept)
