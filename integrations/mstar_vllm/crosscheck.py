"""What the adapter declares against what the engine built: a contradiction stops the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mstar_plugin.model_kv import LayerKind, LayerKV, ModelKV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from mstar_vllm.serving import ServingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltLayer:
    """One decoder attention layer as the engine built it on this rank; windows in tokens."""

    index: int
    num_kv_heads: int
    num_qo_heads: int
    head_dim: int
    window_tokens: int | None


def check_slopes(plan: ServingPlan, alibi_slopes: Any) -> None:
    """ValueError where keys can be dropped of a layer whose biases follow a stored key's place."""
    if alibi_slopes is not None and (plan.obstacle is None or plan.ring is not None):
        raise ValueError(
            "the model uses ALiBi, which its adapter must declare in retention_refusal; "
            f"adapter: {plan.adapter}"
        )


def built_layers(vllm_config: VllmConfig) -> tuple[BuiltLayer, ...]:
    """The rank's own decoder layers with plain attention, by index; draft layers left out."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    found: dict[int, BuiltLayer] = {}
    for name, layer in layers.items():
        if isinstance(layer, Attention) and layer.attn_type == AttentionType.DECODER:
            index = layer_index(name)
            if index is not None and index not in found:
                found[index] = _built(index, layer)
    return tuple(found[index] for index in sorted(found))


def check_declaration(
    model: ModelKV, built: Iterable[BuiltLayer], adapter: str, num_ranks: int
) -> None:
    """Raise ValueError with both numbers where `model` and a built layer differ.

    `num_ranks`: tensor-parallel ranks, over which heads are divided; KV heads of which there are
    fewer than ranks are replicated. Latent layers are built as ordinary ones where VLLM_MLA_DISABLE
    is set, and not compared then.
    """
    latent = _latent_indices(model)
    declared = {layer.index: layer for layer in model.layers if layer.index not in latent}
    for layer in built:
        if layer.index in latent and _mla_is_off():
            continue
        if layer.index not in declared:
            raise ValueError(
                f"adapter {adapter} must declare layer {layer.index}, which the engine built with "
                f"ordinary heads; it declares such heads for {sorted(declared)}"
            )
        expected = _expected(declared[layer.index], num_ranks)
        for field, value in expected.items():
            if getattr(layer, field) != value:
                raise ValueError(
                    f"adapter {adapter} must declare {field} of layer {layer.index} as the engine "
                    f"built it: declared {value} per rank, built {getattr(layer, field)}"
                )


def check_rotary(
    model: ModelKV, adapter: str, modules: Mapping[str, Any], layer_names: Iterable[str]
) -> None:
    """Raise ValueError where the rotary module beside a layer of `layer_names` is not the declared
    one. Layers without such a module under its usual name are not compared.

    modules: the model's, by name.
    """
    declared = {layer.index: layer.rotary for layer in model.layers}
    for name in layer_names:
        built: Any = modules.get(f"{name.rpartition('.')[0]}.rotary_emb")
        index = layer_index(name)
        rotary = None if index is None else declared.get(index)
        if rotary is None or getattr(built, "is_neox_style", None) is None:
            continue
        expected = {
            "theta": (rotary.theta, built.base),
            "rotary_dim": (rotary.rotary_dim, built.rotary_dim),
            "interleaved": (rotary.interleaved, not built.is_neox_style),
        }
        for field, (said, found) in expected.items():
            if said != found:
                raise ValueError(
                    f"adapter {adapter} must declare the rotary {field} of layer {index} as the "
                    f"engine built it: declared {said}, built {found}; mend the adapter or keep "
                    "'absolute' positions"
                )


def check_layer_count(model: ModelKV, built: tuple[BuiltLayer, ...], adapter: str) -> None:
    """Raise ValueError where a declared layer was not built; for servers of one pipeline stage."""
    latent = _latent_indices(model)
    num_declared = len(model.layers) - len(latent)
    num_built = sum(1 for layer in built if layer.index not in latent)
    if num_declared != num_built:
        raise ValueError(
            f"adapter {adapter} must declare as many layers as the engine built: "
            f"declared {num_declared}, built {num_built}"
        )


def _latent_indices(model: ModelKV) -> frozenset[int]:
    return frozenset(layer.index for layer in model.layers if layer.kind is LayerKind.MLA)


def _mla_is_off() -> bool:
    from vllm import envs

    return bool(envs.VLLM_MLA_DISABLE)


def _expected(layer: LayerKV, num_ranks: int) -> dict[str, int | None]:
    window = layer.window_tokens if layer.kind is LayerKind.SLIDING else None
    return {
        "num_kv_heads": max(1, layer.num_kv_heads // num_ranks),
        "num_qo_heads": layer.num_qo_heads // num_ranks,
        "head_dim": layer.head_dim,
        "window_tokens": window,
    }


def layer_index(name: str) -> int | None:
    """The decoder layer that a module's name speaks of. Example: "model.layers.3.attn" -> 3."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


def _built(index: int, layer: Any) -> BuiltLayer:
    return BuiltLayer(
        index=index,
        num_kv_heads=layer.num_kv_heads,
        num_qo_heads=layer.num_heads,
        head_dim=layer.head_size,
        window_tokens=layer.sliding_window,
    )
