"""The adapter reports as text: fixed-width tables for people, plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar_plugin.adapters.registry import AdapterRegistry
    from mstar_plugin.adapters.report import GroupCost, ModelCost
    from mstar_plugin.model_kv import LayerKV, ModelKV


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns, two spaces apart."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def human_bytes(size: int | None) -> str:
    """Example: 14680064 -> "14.0 MiB"; None -> "-"."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def index_ranges(indices: Sequence[int]) -> str:
    """Example: [0, 1, 2, 5, 7, 8] -> "0-2,5,7-8"."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def adapters_text(registry: AdapterRegistry) -> str:
    """One row per registered adapter."""
    return text_table(
        ("adapter", "from", "architectures"),
        [
            (e.adapter.name, e.distribution, " ".join(e.adapter.architectures))
            for e in registry.entries
        ],
    )


def adapters_json(registry: AdapterRegistry) -> list[dict[str, Any]]:
    return [
        {
            "adapter": entry.adapter.name,
            "entry_point": entry.entry_point,
            "distribution": entry.distribution,
            "architectures": list(entry.adapter.architectures),
        }
        for entry in registry.entries
    ]


def model_text(model: ModelKV, cost: ModelCost) -> str:
    """Layers, groups, bytes per token and what a stream costs."""
    return "\n\n".join(
        (
            f"{cost.architecture}, adapter {cost.adapter}, {len(model.layers)} layers with KV, "
            f"positions up to {cost.max_positions or 'no bound'}",
            _layers_table(model),
            _groups_table(cost),
            _closing_lines(cost),
        )
    )


def model_json(model: ModelKV, cost: ModelCost) -> dict[str, Any]:
    return {
        **asdict(cost),
        "bytes_per_token": cost.bytes_per_token,
        "stream_bytes": cost.stream_bytes,
        "retained_bytes": cost.retained_bytes,
        "layers": [asdict(layer) for layer in model.layers],
    }


def _layers_table(model: ModelKV) -> str:
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer in model.layers:
        alike.setdefault(_layer_row(layer), []).append(layer.index)
    return text_table(
        ("layers", "kind", "kv/q heads", "head_dim", "window", "rotary", "more"),
        [(index_ranges(indices), *row) for row, indices in alike.items()],
    )


def _layer_row(layer: LayerKV) -> tuple[object, ...]:
    rotary = layer.rotary
    turned = "none"
    if rotary is not None:
        turned = f"{rotary.theta:g} x{rotary.rotary_dim} {rotary.scaling or ''}".rstrip()
    more = [
        f"KV of layer {layer.shares_kv_with}" if layer.shares_kv_with is not None else "",
        "sinks" if layer.has_sinks else "",
        f"cap {layer.soft_cap:g}" if layer.soft_cap is not None else "",
    ]
    return (
        layer.kind.value,
        f"{layer.num_kv_heads}/{layer.num_qo_heads}",
        layer.head_dim,
        layer.window_tokens or "-",
        turned,
        ", ".join(word for word in more if word) or "-",
    )


def _groups_table(cost: ModelCost) -> str:
    header = ("group", "layers", "bytes/token", "pages", "bytes", "kept pages", "kept bytes")
    return text_table(header, [_group_row(group) for group in cost.groups])


def _group_row(group: GroupCost) -> tuple[object, ...]:
    return (
        group.key,
        group.num_layers,
        group.bytes_per_token,
        group.pages,
        human_bytes(group.stream_bytes),
        "-" if group.retained_pages is None else group.retained_pages,
        human_bytes(group.retained_bytes),
    )


def _closing_lines(cost: ModelCost) -> str:
    lines = [
        f"{cost.bytes_per_token} bytes per token in {cost.dtype}; a stream of {cost.stream_tokens} "
        f"tokens in pages of {cost.page_size} holds {human_bytes(cost.stream_bytes)}"
    ]
    if cost.retention_refusal is not None:
        lines.append(f"retention is refused: {cost.retention_refusal}")
    elif cost.retention is not None:
        lines.append(
            f"with {cost.retention.context_budget} tokens kept behind the first "
            f"{cost.retention.protected_prefix} it holds {human_bytes(cost.retained_bytes)}"
        )
    return "\n".join(lines)
