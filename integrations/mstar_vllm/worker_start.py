"""When a worker gets its KV cache: the declaration is checked and the report is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mstar_vllm import compat, session
from mstar_vllm.cache_specs import RetentionSpec
from mstar_vllm.crosscheck import (
    built_layers,
    check_declaration,
    check_layer_count,
    check_rotary,
)
from mstar_vllm.metrics import leave_bytes_per_page
from mstar_vllm.plugin import BACKEND_NAME, is_selected
from mstar_vllm.positions import ROLLING, positions_of
from mstar_vllm.report import report_lines, warnings
from mstar_vllm.ring_specs import ring_specs
from mstar_vllm.rolling_start import give_layers_their_turn
from mstar_vllm.serving import drafts_with_a_model


def hook_worker_start(runner_class: type) -> None:
    """Give layers their rings, and run `check_and_report` before `runner_class` allocates its KV
    cache.
    """
    compat.wrap_method(runner_class, "get_kv_cache_spec", _get_kv_cache_spec)
    compat.wrap_method(runner_class, "initialize_kv_cache", _initialize_kv_cache)


def _get_kv_cache_spec(original: Callable[..., Any], runner: Any) -> Any:
    """`customize_spec` is not told which layer it is asked about, but geometry is per layer."""
    specs = original(runner)
    if not is_selected(runner.vllm_config):
        return specs
    ring = session.activate(runner.vllm_config).plan.ring
    if ring is None:
        return specs
    _check_backends(runner.vllm_config, specs)
    return ring_specs(ring, specs)


def _check_backends(vllm_config: Any, layer_names: Iterable[str]) -> None:
    """Another backend would read a ring as if it were the whole sequence."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        backend = layers[name].get_attn_backend().get_name()
        if backend != BACKEND_NAME:
            raise ValueError(
                f"mstar must serve every layer of a server with ring caches, got {backend} for "
                f"{name}; choose mstar for all kinds of layers"
            )


def _initialize_kv_cache(
    original: Callable[..., Any],
    runner: Any,
    kv_cache_config: Any,
    is_profiling: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if is_selected(runner.vllm_config):
        if not is_profiling:
            check_and_report(runner.vllm_config, kv_cache_config)
        # Profiling captures graphs, which attend.
        _prepare_rolling(runner, kv_cache_config)
    return original(runner, kv_cache_config, is_profiling, *args, **kwargs)


def _prepare_rolling(runner: Any, kv_cache_config: Any) -> None:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    vllm_config = runner.vllm_config
    plan = session.activate(vllm_config).plan
    if plan.model is None or positions_of(plan.retention) != ROLLING:
        return
    modules = dict(runner.model.named_modules(remove_duplicate=False))
    for group in kv_cache_config.kv_cache_groups:
        if any(isinstance(spec, RetentionSpec) for spec in iter_layer_specs(group.kv_cache_spec)):
            check_rotary(plan.model, plan.adapter, modules, group.layer_names)
            give_layers_their_turn(vllm_config, plan.model, group.layer_names)


def check_and_report(vllm_config: Any, kv_cache_config: Any) -> None:
    """Compare adapter and engine on every rank; log the report on the first.

    A draft model's layers stand among the model's own, so a server with one is not compared.
    """
    from vllm.logger import init_logger

    active = session.activate(vllm_config)
    parallel = vllm_config.parallel_config
    if active.plan.model is not None and not drafts_with_a_model(vllm_config):
        built = built_layers(vllm_config)
        adapter = active.plan.adapter
        check_declaration(active.plan.model, built, adapter, parallel.tensor_parallel_size)
        if parallel.pipeline_parallel_size == 1:
            check_layer_count(active.plan.model, built, adapter)
    if parallel.rank == 0 and kv_cache_config.kv_cache_groups:
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
            page_bytes = len(group.layer_names) * group.kv_cache_spec.page_size_bytes
            leave_bytes_per_page(group_id, page_bytes)
        logger = init_logger("vllm.mstar")
        for line in report_lines(active.plan, vllm_config, kv_cache_config):
            logger.info(line)
        for line in warnings(active.plan, vllm_config, active.in_flight_tokens):
            logger.warning(line)
