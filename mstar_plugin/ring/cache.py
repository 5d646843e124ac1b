"""Storage of one layer's ring: the K/V of all sessions in one tensor, written in place.

Letters: `B` rows of a step, `H` KV heads, `T` tokens per frame, `D` head_dim, `R` ring frames. A
session owns `R + 1` consecutive frames: its ring slots, then the scratch frame that holds the
frame in progress. A *place* is a frame's index over all sessions: `session * (R + 1) + slot`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mstar_plugin.kv.config import RingKVLayerConfig

SPARSE_BLOCK_TOKENS = 128


class RingLayerState(TypedDict):
    """One session's ring of one layer, the scratch frame left out: it holds nothing between frames.

    kv: `[2, H, R * T, D]`, K then V. written: bool `[R * T]`. Plain tensors, so that `torch.save`
    and `torch.load(weights_only=True)` carry it.
    """

    kv: Tensor
    written: Tensor


class LayerRingCache:
    """The rings of one layer for every session.

    kv: `[2, 1, H, total_sessions * capacity, D]` with `capacity = (R + 1) * T`. written: bool
    `[total_sessions * capacity]`, always True for scratch frames. `block_tokens` is the block of
    the sparse attention kernel, which a frame fills without remainder.
    """

    def __init__(
        self,
        layer: RingKVLayerConfig,
        *,
        tokens_per_frame: int,
        num_kv_heads: int,
        head_dim: int,
        total_sessions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_tokens: int = SPARSE_BLOCK_TOKENS,
    ) -> None:
        _check_geometry(layer, tokens_per_frame, total_sessions, block_tokens)
        self.layer = layer
        self.tokens_per_frame = tokens_per_frame
        self.block_tokens = block_tokens
        self.frames_per_session = layer.ring_frames + 1
        self.capacity = self.frames_per_session * tokens_per_frame
        slots = total_sessions * self.capacity
        self.kv = torch.zeros(2, 1, num_kv_heads, slots, head_dim, dtype=dtype, device=device)
        self.written = torch.zeros(slots, dtype=torch.bool, device=device)
        self._places = self.kv.view(2, num_kv_heads, -1, tokens_per_frame, head_dim)
        self._written_places = self.written.view(-1, tokens_per_frame)
        self._written_places[layer.ring_frames :: self.frames_per_session] = True

    @property
    def keys(self) -> Tensor:
        """`[1, H, total_sessions * capacity, D]`, a view."""
        return self.kv[0]

    @property
    def values(self) -> Tensor:
        """`[1, H, total_sessions * capacity, D]`, a view."""
        return self.kv[1]

    @property
    def frames(self) -> Tensor:
        """`[2, H, num_places, T, D]`, the same storage by place."""
        return self._places

    @property
    def num_places(self) -> int:
        """Frames over all sessions."""
        return self._written_places.shape[0]

    def upsert(
        self, k: Tensor, v: Tensor, session_idx: Tensor, frame_pos: Tensor, *, commit: bool
    ) -> tuple[Tensor, Tensor]:
        """Write one frame per row and return the keys and values of all sessions.

        k, v: `[B, H, T, D]` of the cache's dtype. session_idx, frame_pos: int64 `[B]`. The frame
        goes to its session's scratch frame; with `commit` also to its slot when the layer keeps it.
        No host synchronisation. ValueError for another shape or dtype.
        """
        self._check_rows(k, v, session_idx, frame_pos)
        scratch = session_idx * self.frames_per_session + self.layer.ring_frames
        self._write(k, v, scratch)
        if commit:
            slot, is_write = self._cursor(frame_pos)
            place = torch.where(is_write, session_idx * self.frames_per_session + slot, scratch)
            self._write(k, v, place)
            self._written_places.index_fill_(0, place, True)
        return self.keys, self.values

    def visible(self, session_idx: Tensor, frame_pos: Tensor) -> Tensor:
        """bool `[B, total_sessions * capacity]`: what each row attends to, from the written flags.

        Holds for every pass of the frame, before or after its commit.
        """
        slot, is_write = self._cursor(frame_pos)
        place = torch.arange(self.num_places, device=self.kv.device)
        is_own_session = place // self.frames_per_session == session_idx[:, None]
        is_overwritten = is_write[:, None] & (place % self.frames_per_session == slot[:, None])
        seen = self._written_places[:, 0] & is_own_session & ~is_overwritten
        return seen.repeat_interleave(self.tokens_per_frame, dim=1)

    def reset(self, session: int) -> None:
        """Zero one session's K/V and forget its ring frames."""
        frames = self._frames_of(session)
        self._places[:, :, frames] = 0
        self._written_places[self._ring_of(session)] = False

    def written_slots(self, session: int) -> list[bool]:
        """Whether each of the `ring_buckets` slots of a session holds a frame."""
        flags: list[bool] = self._written_places[self._ring_of(session), 0].tolist()
        return flags[: self.layer.ring_buckets]

    def get_state(self, session: int) -> RingLayerState:
        """A copy of one session's ring."""
        ring = self._ring_of(session)
        kv = self._places[:, :, ring].flatten(2, 3).clone()
        return {"kv": kv, "written": self._written_places[ring].flatten().clone()}

    def check_state(self, state: RingLayerState) -> None:
        """ValueError unless `state` has this cache's shapes and dtypes."""
        num_tokens = self.layer.ring_frames * self.tokens_per_frame
        _, num_heads, _, _, head_dim = self._places.shape
        _check_tensor("kv", state["kv"], (2, num_heads, num_tokens, head_dim), self.kv.dtype)
        _check_tensor("written", state["written"], (num_tokens,), torch.bool)

    def load_state(self, session: int, state: RingLayerState) -> None:
        """Overwrite one session's ring with a copy of `state`, which `check_state` accepts."""
        ring = self._ring_of(session)
        self._places[:, :, ring] = state["kv"].reshape(self._places[:, :, ring].shape)
        self._written_places[ring] = state["written"].view(-1, self.tokens_per_frame)

    def _cursor(self, frame_pos: Tensor) -> tuple[Tensor, Tensor]:
        dilation = self.layer.pinned_dilation
        bucket = -(-frame_pos // dilation)
        return bucket % self.layer.ring_buckets, frame_pos % dilation == 0

    def _write(self, k: Tensor, v: Tensor, place: Tensor) -> None:
        self._places[0].index_copy_(1, place, k.transpose(0, 1))
        self._places[1].index_copy_(1, place, v.transpose(0, 1))

    def _frames_of(self, session: int) -> slice:
        first = session * self.frames_per_session
        return slice(first, first + self.frames_per_session)

    def _ring_of(self, session: int) -> slice:
        first = session * self.frames_per_session
        return slice(first, first + self.layer.ring_frames)

    def _check_rows(self, k: Tensor, v: Tensor, session_idx: Tensor, frame_pos: Tensor) -> None:
        _, num_heads, _, _, head_dim = self._places.shape
        rows = (session_idx.numel(),)
        expected = (*rows, num_heads, self.tokens_per_frame, head_dim)
        _check_tensor("k", k, expected, self.kv.dtype)
        _check_tensor("v", v, expected, self.kv.dtype)
        _check_tensor("session_idx", session_idx, rows, torch.int64)
        _check_tensor("frame_pos", frame_pos, rows, torch.int64)


def _check_geometry(
    layer: RingKVLayerConfig, tokens_per_frame: int, total_sessions: int, block_tokens: int
) -> None:
    if total_sessions < 1:
        raise ValueError(f"total_sessions must be at least 1, got {total_sessions}")
    if layer.pinned_dilation < 1:
        raise ValueError(f"pinned_dilation must be at least 1, got {layer.pinned_dilation}")
    if not 1 <= layer.ring_buckets <= layer.ring_frames:
        raise ValueError(
            f"ring_buckets must lie in 1..ring_frames={layer.ring_frames}, got {layer.ring_buckets}"
        )
    if block_tokens < 1 or tokens_per_frame < 1 or tokens_per_frame % block_tokens:
        raise ValueError(
            f"tokens_per_frame must be a multiple of block_tokens={block_tokens}, "
            f"got {tokens_per_frame}: pad the frame or pass a smaller block_tokens"
        )


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)}, "
            f"got {tensor.dtype} of shape {list(tensor.shape)}"
        )
