"""The tensors behind the pages: writing, reading and copying K and V rows, all by index arrays.

Letters: `L` layers, `N` pages of the pool, `S` page size, `H` KV heads of this rank, `D` head dim,
`C` latent dim, `T` tokens. A token's row is `page * S + slot`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mstar_plugin.kv.storage import KVLayout, PagedKVConfig


class KVCache:
    """`data` is `[L, N, 2, S, H, D]` under NHD and `[L, N, S, C]` under MLA, zero at first.

    Zero and not empty: a slot nobody has written yet may be read under a mask, and 0 * NaN is NaN.
    """

    def __init__(self, config: PagedKVConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.data = torch.zeros(config.pool_shape, dtype=dtype, device=device)
        self.page_size = config.page_size
        self.is_latent = config.layout is KVLayout.MLA
        row_shape = (config.latent_dim,) if self.is_latent else self.data.shape[-2:]
        self._row_shape = tuple(row_shape)
        self._rows = self.data.view(config.num_layers, -1, *row_shape)

    def layer(self, layer: int) -> Tensor:
        """Pages of one layer: `[N, 2, S, H, D]` or `[N, S, C]`, the storage itself."""
        return self.data[layer]

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Put `k` and `v` `[T, H, D]`, or the latent `k` `[T, C]`, at `rows` int64 `[T]`.

        Values are converted to the cache's dtype. `ValueError` on another shape, on a V for a
        latent cache and on none for the other.
        """
        self._check(k, v, rows)
        storage = self._rows[layer]
        at = self._k_rows(rows)
        storage.index_copy_(0, at, k.to(storage.dtype))
        if v is not None:
            storage.index_copy_(0, at + self.page_size, v.to(storage.dtype))

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """K and V at `rows`: `[T, H, D]` each, or the latent `[T, C]` and None."""
        storage = self._rows[layer]
        at = self._k_rows(rows)
        k = storage.index_select(0, at)
        return k, None if self.is_latent else storage.index_select(0, at + self.page_size)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages inside the pool, all layers."""
        if sources:
            copy_pages(self.data, sources, self.data, targets)

    def _k_rows(self, rows: Tensor) -> Tensor:
        if self.is_latent:
            return rows
        return rows + torch.div(rows, self.page_size, rounding_mode="floor") * self.page_size

    def _check(self, k: Tensor, v: Tensor | None, rows: Tensor) -> None:
        shape = (rows.numel(), *self._row_shape)
        if self.is_latent and v is not None:
            raise ValueError("v must be None for an MLA cache: k carries the whole latent row")
        if not self.is_latent and v is None:
            raise ValueError("v must be given for an NHD cache, got None")
        for name, value in (("k", k), ("v", v)):
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(
                    f"{name} must have the shape {shape} of the planned tokens, "
                    f"got {tuple(value.shape)}"
                )


def copy_pages(
    source: Tensor, source_pages: Sequence[int], target: Tensor, target_pages: Sequence[int]
) -> None:
    """Copy pages between two pools `[L, N, ...]` of one geometry, on any devices.

    Layer by layer, so that the temporary copy is one layer of the pages.
    """
    take = torch.tensor(source_pages, dtype=torch.int64, device=source.device)
    put = torch.tensor(target_pages, dtype=torch.int64, device=target.device)
    for from_layer, to_layer in zip(source, target, strict=True):
        to_layer.index_copy_(0, put, from_layer.index_select(0, take).to(target.device))
