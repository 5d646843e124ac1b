"""The KV plan: what a planned step tells attention and positions about its streams.

Consumers depend on this and not on the manager. `S` is the page size; a row is one stream of the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar_plugin.kv.host_index import (
    HostLens,
    Int32Array,
    PageIndices,
    PinnedIndexRing,
    concatenated_pages,
    int32_array,
)
from mstar_plugin.step import Segment


class SequenceView(NamedTuple):
    """One stream as a step sees it.

    `page_idxs`: its pages in order, `ceil((start + length) / S)` of them. `length`: resident
    tokens, those the step writes included. `to_compute`: query tokens of the step. `start`: offset
    of the first resident token in the first page. `generation` differs whenever arrays derived from
    an earlier view may be stale.
    """

    request_id: str
    label: str
    page_idxs: list[int]
    length: int
    to_compute: int
    start: int = 0
    generation: int = 0

    def last_page_len(self, page_size: int) -> int:
        """Tokens on the last page, where 0 stands for a full one. Example: length 17, S=8 -> 1."""
        return (self.start + self.length) % page_size


class PagedIndptrs(NamedTuple):
    """The int32 host arrays a paged-attention wrapper plans from.

    `qo_indptr` `[rows + 1]`: offsets of each row's query tokens. `paged_kv_indptr` `[rows + 1]` and
    `paged_kv_indices` `[total pages]`: each row's pages. `paged_kv_last_page_len` `[rows]`: `1..S`,
    0 for a row without pages. `kv_lens` `[rows]`: tokens on each row's pages; stays on the host.
    """

    qo_indptr: Tensor
    paged_kv_indptr: Tensor
    paged_kv_indices: Tensor
    paged_kv_last_page_len: Tensor
    kv_lens: Tensor | None = None

    def to_device(self, device: torch.device | str) -> PagedIndptrs:
        """Copies on `device`, issued without waiting; `kv_lens` is passed on as it is."""
        return PagedIndptrs(
            self.qo_indptr.to(device, non_blocking=True),
            self.paged_kv_indptr.to(device, non_blocking=True),
            self.paged_kv_indices.to(device, non_blocking=True),
            self.paged_kv_last_page_len.to(device, non_blocking=True),
            self.kv_lens,
        )

    def to_kwargs_dict(self) -> dict[str, Tensor | None]:
        """The arrays by field name."""
        return self._asdict()


class KVPlanOutput:
    """The plan of one label.

    `views` are built by `view_builder` on first use when not given: a captured step needs only the
    arrays. `cuda_indptrs` is the copy on the device once there is one. `decode_pages` and
    `decode_offsets` `[rows]`: where each row's new token goes, for a decode step that was advanced
    from the one before it. `rows` names the `(request_id, label)` of each row.
    """

    __slots__ = (
        "_view_builder",
        "_views",
        "cpu_indptrs",
        "cuda_indptrs",
        "decode_offsets",
        "decode_pages",
        "rows",
    )

    def __init__(
        self,
        cpu_indptrs: PagedIndptrs,
        views: list[SequenceView] | None = None,
        cuda_indptrs: PagedIndptrs | None = None,
        decode_pages: npt.NDArray[Any] | None = None,
        decode_offsets: npt.NDArray[Any] | None = None,
        rows: Sequence[tuple[str, str]] | None = None,
        view_builder: Callable[[], list[SequenceView]] | None = None,
    ) -> None:
        self.cpu_indptrs = cpu_indptrs
        self.cuda_indptrs = cuda_indptrs
        self.decode_pages = decode_pages
        self.decode_offsets = decode_offsets
        self.rows = rows
        self._views = views
        self._view_builder = view_builder

    @property
    def views(self) -> list[SequenceView]:
        """The streams in packed order; `RuntimeError` when the plan has neither views nor a
        builder.
        """
        if self._views is None:
            if self._view_builder is None:
                raise RuntimeError(
                    "a KV plan must be made with views or a view_builder for its views to be read, "
                    "this one has neither"
                )
            self._views = self._view_builder()
        return self._views

    @property
    def is_decode(self) -> bool:
        """Whether every row computes exactly one token."""
        return self.decode_pages is not None or all(view.to_compute == 1 for view in self.views)

    def get_total_len(self) -> int:
        """Query tokens of all rows."""
        return int(self.cpu_indptrs.qo_indptr[-1])


class KVPlanOutputs(dict[str, KVPlanOutput]):
    """Plan label -> plan, with the label forks of the step, which positions have to follow."""

    def __init__(
        self,
        mapping: Mapping[str, KVPlanOutput] | None = None,
        pre_forks: tuple[tuple[str, str], ...] = (),
        post_forks: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(mapping or {})
        self.pre_forks = pre_forks
        self.post_forks = post_forks


def build_paged_indptrs(
    segments: Sequence[SequenceView], page_size: int, ring: PinnedIndexRing | None = None
) -> PagedIndptrs:
    """The index arrays of the rows, in buffers of `ring` where one is given (`kv_lens` never is).

    Rows of `PageIndices` cost a copy, other page lists 10 ns an entry.

    Example, S=8: pages [3, 7, 1] with length 20 and 4 queries, then pages [4, 2] with length 16 and
    1 query: `qo_indptr` [0, 4, 5], `paged_kv_indptr` [0, 3, 5], `paged_kv_indices` [3, 7, 1, 4, 2],
    `paged_kv_last_page_len` [4, 8], `kv_lens` [20, 16].
    """
    columns = zip(*segments, strict=False) if segments else ((),) * len(SequenceView._fields)
    _, _, page_lists, lengths, queries, starts, _ = columns
    ends = map(add, lengths, starts) if any(starts) else lengths
    counts = int32_array([*queries, *map(len, page_lists), *ends]).reshape(3, len(segments))
    offsets = np.zeros((2, len(segments) + 1), dtype=np.int32)
    counts[:2].cumsum(axis=1, out=offsets[:, 1:])
    place = torch.from_numpy if ring is None else ring.take
    return PagedIndptrs(
        place(offsets[0]),
        place(offsets[1]),
        place(concatenated_pages(page_lists)),
        place(_last_page_lens(counts[1], counts[2], page_size)),
        torch.from_numpy(counts[2]).as_subclass(HostLens),
    )


def context_only_views(
    views: Sequence[SequenceView], query_spans: Sequence[int], page_size: int
) -> list[SequenceView]:
    """The views without the tokens the step appends, for attention over the stored context alone.

    `length` loses `to_compute`, pages beyond it are dropped, and `to_compute` becomes the row's
    query count. `ValueError` when the two lists differ in length.
    Example, S=4: pages [4, 2], length 6, to_compute 3, query span 2 -> pages [4], length 3,
    to_compute 2.
    """
    return [
        _context_only(view, span, page_size) for view, span in zip(views, query_spans, strict=True)
    ]


def group_by_plan_label(
    segments: Sequence[Segment], combined_labels: Mapping[tuple[str, ...], str]
) -> dict[str, list[Segment]]:
    """Segments per plan label, in the order of the packed tokens.

    Combined labels come first, each with all segments of its first source, then of its second; the
    other labels follow in order of appearance. `KeyError` for a source without a segment,
    `ValueError` for a plan label that is taken already.
    Example: a/main, a/uncond, b/main, b/uncond, c/x with {("main", "uncond"): "cfg"} -> cfg:
    a/main, b/main, a/uncond, b/uncond; x: c/x.
    """
    by_label: dict[str, list[Segment]] = {}
    for segment in segments:
        by_label.setdefault(segment.label, []).append(segment)
    if not combined_labels:
        return by_label
    groups: dict[str, list[Segment]] = {}
    for sources, name in combined_labels.items():
        _add_group(groups, name, _label_major(by_label, sources, name))
    combined = {source for sources in combined_labels for source in sources}
    for label, members in by_label.items():
        if label not in combined:
            _add_group(groups, label, members)
    return groups


def _last_page_lens(num_pages: Int32Array, ends: Int32Array, page_size: int) -> Int32Array:
    full = np.maximum(num_pages, 1)
    full -= 1
    full *= page_size
    np.subtract(ends, full, out=full)
    return full


def _context_only(view: SequenceView, query_span: int, page_size: int) -> SequenceView:
    length = view.length - view.to_compute
    num_pages = -(-(view.start + length) // page_size) if length else 0
    return view._replace(page_idxs=view.page_idxs[:num_pages], length=length, to_compute=query_span)


def _label_major(
    by_label: Mapping[str, list[Segment]], sources: tuple[str, ...], name: str
) -> list[Segment]:
    for source in sources:
        if source not in by_label:
            raise KeyError(
                f"combined label {name!r} needs a segment of label {source!r}, "
                f"the step has {sorted(by_label)}"
            )
    return [segment for source in sources for segment in by_label[source]]


def _add_group(groups: dict[str, list[Segment]], name: str, members: list[Segment]) -> None:
    if name in groups:
        raise ValueError(
            f"plan label {name!r} must be unique in a step, "
            "it names a combination and another label: rename the combination"
        )
    groups[name] = members


__all__ = [
    "HostLens",
    "KVPlanOutput",
    "KVPlanOutputs",
    "PageIndices",
    "PagedIndptrs",
    "PinnedIndexRing",
    "SequenceView",
    "build_paged_indptrs",
    "context_only_views",
    "group_by_plan_label",
]
