"""What a model declares about a KV cache: its shape, its spec, its requests and its steps.

Importing this loads neither a manager nor a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mstar_plugin.kv.layout import PrefixSpan, RetentionPolicy, StreamLayout
from mstar_plugin.kv.request import KVReqConfig, refuse_undeclared_labels, without_layouts
from mstar_plugin.kv.storage import (
    KVConfig,
    KVLayout,
    KVSpec,
    PagedKVConfig,
    RingKVConfig,
    RingKVLayerConfig,
)
from mstar_plugin.step import ResourceStep


@dataclass(frozen=True)
class KVStep(ResourceStep):
    """One forward's work on one paged KV resource.

    `commit=False`: what is written is not kept, the next step overwrites it. `combined_labels`:
    source labels -> plan label, several labels of the requests in one batch. `pre_forks` and
    `post_forks`: `(source, target)` label copies before the forward and after the commit, for every
    request of the step or those in `fork_rids`. `sink`: `(request_id, label)` streams whose writes
    are thrown away; forks, retention and publishing skip them too. `retention`: `(request_id,
    label)` -> what this commit releases.
    """

    commit: bool = True
    combined_labels: dict[tuple[str, ...], str] = field(default_factory=dict)
    pre_forks: tuple[tuple[str, str], ...] = ()
    post_forks: tuple[tuple[str, str], ...] = ()
    fork_rids: frozenset[str] | None = None
    sink: frozenset[tuple[str, str]] = frozenset()
    retention: Mapping[tuple[str, str], RetentionPolicy] = field(default_factory=dict)


@dataclass(frozen=True)
class RingKVStep(ResourceStep):
    """One frame of a ring KV resource: `frames` gives each request of the batch its clock, in any
    order.
    """

    frames: tuple[tuple[str, int], ...] = field(kw_only=True)


__all__ = [
    "KVConfig",
    "KVLayout",
    "KVReqConfig",
    "KVSpec",
    "KVStep",
    "PagedKVConfig",
    "PrefixSpan",
    "RetentionPolicy",
    "RingKVConfig",
    "RingKVLayerConfig",
    "RingKVStep",
    "StreamLayout",
    "refuse_undeclared_labels",
    "without_layouts",
]
