"""What one request declares about a KV resource, and the checks made before it is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from mstar_plugin.kv.layout import StreamLayout
from mstar_plugin.kv.storage import KVSpec, PagedKVConfig
from mstar_plugin.spec import ResourceReqConfig

DEFAULT_LABEL = "main"
_Walk = tuple[str, str]


@dataclass
class KVReqConfig(ResourceReqConfig):
    """One request's labels, prefix keys and stream layouts for one KV resource.

    Labels: the first of `needed_labels_per_node_walk`, `needed_labels_per_node`, `needed_labels`
    that answers, else `["main"]`. Publishing after a step: `publish_labels_per_node_walk`, None for
    all; after the stop: `final_publish_labels_per_node_walk`, None for nothing. Prefix cache, by
    label: `prefix_keys` one key per page, a last partial page included; `prefix_tail` the token ids
    behind the last whole page; `prefix_decode` the step output that carries sampled ids;
    `prefix_cache=False` opts the request out. `kv_layout` tells what each label will hold,
    `loop_caps` how often each loop may run.
    """

    needed_labels: list[str] | None = None
    needed_labels_per_node: dict[str, list[str]] = field(default_factory=dict)
    needed_labels_per_node_walk: dict[_Walk, list[str]] = field(default_factory=dict)
    publish_labels_per_node_walk: dict[_Walk, list[str]] | None = None
    final_publish_labels_per_node_walk: dict[_Walk, list[str]] | None = None
    prefix_keys: dict[str, list[bytes]] | None = None
    prefix_tail: dict[str, list[int]] | None = None
    prefix_decode: dict[str, str] | None = None
    prefix_cache: bool = True
    kv_layout: dict[str, StreamLayout] | None = None
    loop_caps: dict[str, int] | None = None

    def get_labels(self, node: str, walk: str) -> list[str]:
        """Labels the walk needs in the node."""
        if (node, walk) in self.needed_labels_per_node_walk:
            return self.needed_labels_per_node_walk[node, walk]
        if node in self.needed_labels_per_node:
            return self.needed_labels_per_node[node]
        return self.needed_labels or [DEFAULT_LABEL]

    def get_publish_labels(
        self, node: str | None, walk: str | None, available: list[str], *, final: bool = False
    ) -> list[str]:
        """Labels to hand on after a step of (`node`, `walk`), or after the stop when `final`."""
        if final:
            labels = self.final_publish_labels_per_node_walk
        else:
            labels = self.publish_labels_per_node_walk
        if labels is None:
            return [] if final else available
        if node is None or walk is None:
            return []
        return labels.get((node, walk), [])

    def opened_labels(self) -> set[str]:
        """Every label some walk of the request may open; `{"main"}` is what naming none opens."""
        per_walk = self.needed_labels_per_node_walk.values()
        named = chain(*self.needed_labels_per_node.values(), *per_walk)
        return {*(self.needed_labels or [DEFAULT_LABEL]), *named}

    def apply_conductor_config(
        self,
        prefix_keys: dict[str, list[bytes]] | None = None,
        prefix_tail: dict[str, list[int]] | None = None,
        prefix_decode: dict[str, str] | None = None,
        prefix_cache: bool | None = None,
        kv_layout: Mapping[str, StreamLayout | Sequence[Any]] | None = None,
        loop_caps: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Overwrite the fields that are given; layouts arrive as the rows `StreamLayout.from_row`
        reads.

        Prefix keys decide whose pages a request reads: never pass through what a client sent.
        """
        plain = {
            "prefix_keys": prefix_keys,
            "prefix_tail": prefix_tail,
            "prefix_decode": prefix_decode,
            "prefix_cache": prefix_cache,
        }
        if kv_layout is not None:
            self.kv_layout = {label: _layout(label, row) for label, row in kv_layout.items()}
        if loop_caps is not None:
            self.loop_caps = dict(loop_caps)
        for name, value in plain.items():
            if value is not None:
                setattr(self, name, value)

    def validate(self, spec: KVSpec | None = None) -> None:
        """`ValueError` when a label would hold more positions at the loop caps than `max_seq_len`.

        A label under retention is left out: its positions are chosen in each forward.
        """
        config = _paged_config(spec)
        if config is None:
            return
        for label, layout in self._unretained():
            positions = layout.positions(self.loop_caps or {})
            if positions > config.max_seq_len:
                raise ValueError(
                    f"label {label!r} must stay within max_seq_len={config.max_seq_len} positions, "
                    f"it would hold {positions} at the request's loop caps: "
                    "shorten the prompt or lower the caps"
                )

    def loop_room(self, spec: KVSpec | None = None) -> dict[str, int]:
        """Loop name -> most iterations before a label outgrows `max_seq_len` or the whole pool.

        Other loops count at their caps. Labels under retention bound nothing, and a loop that
        nothing bounds is left out. A request whose spans alone are too long has room 0; `validate`
        names the error.
        Example: base 321, `max_seq_len` 1024, growth 1 per "decode" -> {"decode": 703}.
        """
        config = _paged_config(spec)
        room: dict[str, int] = {}
        if config is None:
            return room
        for _, layout in self._unretained():
            for loop in {name for name, tokens in layout.growth if tokens > 0}:
                most = _iterations(layout, loop, self.loop_caps or {}, config)
                room[loop] = min(room.get(loop, most), most)
        return room

    def _unretained(self) -> Iterator[tuple[str, StreamLayout]]:
        layouts = (self.kv_layout or {}).items()
        return ((label, layout) for label, layout in layouts if layout.retention is None)


def refuse_undeclared_labels(
    model: str,
    declared: Mapping[str, tuple[str, ...]],
    kv_layout: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, ResourceReqConfig],
) -> None:
    """`RuntimeError` (the model's fault, a 500) for a label that is laid out or opened but not
    declared.

    All arguments but `model` go by resource key: the labels the model declares, the layouts of one
    request, and the request's configs. Layouts are optional: a model that declares and lays out
    nothing opens what it likes.
    """
    for key, layouts in kv_layout.items():
        _refuse(model, key, "lays out", layouts, declared)
    if not declared:
        return
    for key, config in configs.items():
        if isinstance(config, KVReqConfig):
            _refuse(model, key, "opens", config.opened_labels(), declared)


def without_layouts(configs: Mapping[str, ResourceReqConfig]) -> dict[str, ResourceReqConfig]:
    """The configs as they go from worker to worker: copies without `kv_layout` and `loop_caps`,
    inputs untouched.

    Only the KV manager's ingest reads those two. A config that has neither is passed on as it is.
    """
    return {key: _without_layout(config) for key, config in configs.items()}


def _without_layout(config: ResourceReqConfig) -> ResourceReqConfig:
    if not isinstance(config, KVReqConfig):
        return config
    if config.kv_layout is None and config.loop_caps is None:
        return config
    return replace(config, kv_layout=None, loop_caps=None)


def _refuse(
    model: str,
    key: str,
    verb: str,
    labels: Iterable[str],
    declared: Mapping[str, tuple[str, ...]],
) -> None:
    known = declared.get(key, ())
    undeclared = sorted(set(labels) - set(known))
    if undeclared or (verb == "lays out" and key not in declared):
        raise RuntimeError(
            f"model {model!r} {verb} labels {undeclared} of KV resource {key!r}, "
            f"which declares {sorted(known)}: declare every label the model uses"
        )


def _layout(label: str, row: StreamLayout | Sequence[Any]) -> StreamLayout:
    try:
        return StreamLayout.from_row(row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"kv_layout of label {label!r} cannot be read: {error}") from error


def _paged_config(spec: KVSpec | None) -> PagedKVConfig | None:
    config = None if spec is None else spec.config
    return config if isinstance(config, PagedKVConfig) else None


def _iterations(
    layout: StreamLayout, loop: str, caps: Mapping[str, int], config: PagedKVConfig
) -> int:
    others = {name: count for name, count in caps.items() if name != loop}
    pool_slots = (config.max_num_pages - 1) * config.page_size
    free_positions = config.max_seq_len - layout.positions(others)
    free_slots = pool_slots - layout.slots(others)
    return max(0, min(free_positions, free_slots) // layout.growth_of(loop))
