"""What `register()` does: the backend's name, its pickling, and the platform hooks.

Everything heavier is imported by the hooks when the backend is selected, so that a fault in it can
only stop a server that asked for it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mstar_vllm import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND_NAME = "MSTAR"
_BACKEND_PATH = "mstar_vllm.backend.MStarBackend"
_HOOKED = "_mstar_hooks"
FRAME_DECODER = "FrameDecoderForCausalLM"


def install() -> None:
    """Register the name and the hooks; a second call changes nothing.

    The hooks come right behind the name: they raise what fails later, where the name is selected.
    """
    _register_name()
    _hook_platform()
    _register_reducer()
    _register_models()


def backend_member() -> Any:
    """The member of vLLM's backend enumeration that stands for this plugin."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[BACKEND_NAME]


def is_selected(vllm_config: VllmConfig) -> bool:
    """Whether any attention kind of this server is to run through the plugin."""
    attention = vllm_config.attention_config
    member = backend_member()
    chosen = [attention.backend, *(attention.backend_per_kind or {}).values()]
    return any(backend is member for backend in chosen)


def _register_name() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    member = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    if member is None:
        register_backend(BACKEND_NAME, _BACKEND_PATH)
    elif member.get_path() != _BACKEND_PATH:
        raise RuntimeError(
            f"the attention backend name {BACKEND_NAME} is taken by {member.get_path()}; "
            "uninstall one of the two plugins"
        )


def _register_models() -> None:
    """Make the models of this plugin known to vLLM, which imports them when they are served."""
    from vllm.model_executor.models.registry import ModelRegistry

    if FRAME_DECODER not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(FRAME_DECODER, f"mstar_vllm.frame_decoder:{FRAME_DECODER}")


def _register_reducer() -> None:
    """Let configurations that name the backend be unpickled before plugins are loaded.

    A spawned process unpickles its configuration first, when the added enumeration member does not
    exist yet; the reducer sends a function that adds it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    copyreg.pickle(AttentionBackendEnum, _reduce_backend)


def _reduce_backend(member: Any) -> tuple[Callable[..., Any], tuple[str]]:
    if member.name == BACKEND_NAME:
        return _resolve_backend, (member.name,)
    return type(member).__getitem__, (member.name,)


def _resolve_backend(name: str) -> Any:
    import mstar_vllm

    mstar_vllm.register()
    mstar_vllm.raise_if_unusable()
    from mstar_vllm.front_end import hook_front_end

    hook_front_end()
    return backend_member()


def _hook_platform() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if _HOOKED in vars(platform):
        return
    compat.wrap_classmethod(platform, "check_and_update_config", _check_and_update_config)
    compat.wrap_classmethod(platform, "get_attn_backend_cls", _get_attn_backend_cls)
    compat.wrap_classmethod(
        platform, "register_custom_kv_cache_specs", _register_custom_kv_cache_specs
    )
    setattr(platform, _HOOKED, True)


def _check_and_update_config(original: Callable[..., None], vllm_config: VllmConfig) -> None:
    original(vllm_config)
    from mstar_vllm import raise_if_unusable

    if is_selected(vllm_config):
        raise_if_unusable()
        from mstar_vllm.startup import check_configuration

        check_configuration(vllm_config)
        return
    if vllm_config.model_config is not None:
        _refuse_rings(vllm_config.model_config)
    if _has_settings(vllm_config):
        from vllm.logger import init_logger

        init_logger("vllm.mstar").warning(
            "additional_config['mstar'] has no effect without --attention-backend mstar"
        )


def _refuse_rings(model_config: Any) -> None:
    """Without its rings a model that was made for them would answer as if nothing were amiss."""
    if getattr(model_config.hf_config, "mstar", None) is not None:
        raise ValueError(
            "config.json's 'mstar' asks for ring caches, which only --attention-backend mstar "
            f"keeps, got {model_config.model}; select it, or serve without rings by "
            "--hf-overrides '{\"mstar\": null}'"
        )


def _has_settings(vllm_config: VllmConfig) -> bool:
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and "mstar" in additional


def _get_attn_backend_cls(
    original: Callable[..., str],
    selected_backend: Any,
    attn_selector_config: Any,
    num_heads: int | None = None,
) -> str:
    if selected_backend is not backend_member():
        return original(selected_backend, attn_selector_config, num_heads=num_heads)
    from mstar_vllm.selection import select_backend

    return select_backend(original, attn_selector_config, num_heads)


def _register_custom_kv_cache_specs(
    original: Callable[..., None], vllm_config: VllmConfig | None
) -> None:
    original(vllm_config)
    if vllm_config is not None and not is_selected(vllm_config):
        return
    from mstar_vllm.cache_managers import register_specs

    register_specs()
