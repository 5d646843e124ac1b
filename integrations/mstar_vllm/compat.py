"""All contact with vLLM that is not a registration: the version gate and the wraps.

Each wrap names the condition under which it can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

SUPPORTED_MINORS = ((0, 32), (0, 33))


def engine_version() -> str:
    """vLLM's version, e.g. `0.32.0+cpu`."""
    from vllm import __version__

    return str(__version__)


def check_engine_version(version: str) -> None:
    """Raise RuntimeError for a vLLM whose interfaces are not known to match.

    Example: `0.32.1+cu130` passes, `0.31.0` and `1.0.0` do not.
    """
    parts = version.split("+")[0].split(".")
    try:
        minor = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        minor = (-1, -1)
    if minor not in SUPPORTED_MINORS:
        supported = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_MINORS)
        raise RuntimeError(
            f"mstar supports vLLM {supported}, found {version}; install a supported vLLM "
            "or leave out --attention-backend mstar"
        )


def wrap_classmethod(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrapper(original, *args, **kwargs)`.

    The platform class has no registration for these hooks. Remove when vLLM lets a general plugin
    check the configuration and select its backend on every platform.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, classmethod(wrapped))


def wrap_method(owner: type, name: str, wrapper: Callable[..., Any]) -> bool:
    """Replace method `owner.name` by `wrapper(original, self, *args, **kwargs)`, once; False if it
    was.

    Used for the requests' `to_beam_search_params` (remove when beams keep `vllm_xargs`), the
    scheduler's `add_request` (remove when KV cache managers are shown the request they allocate
    for) and `_connector_finished` (remove when a KV cache manager can add to a request's output),
    `InputProcessor.process_inputs` (remove when the platform's `validate_request` is given the
    configuration and the request), for the model runners' `get_kv_cache_spec` (remove when
    `AttentionBackend.customize_spec` is given the layer), for their per-step hooks (remove when
    builders are given the sampling parameters of their rows), and for the CPU runner's
    `sample_tokens` (remove when it no longer asks CPU generators for an offset).
    """
    original = getattr(owner, name)
    if getattr(original, "_mstar_wrapper", None) is wrapper:
        return False

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    wrapped._mstar_wrapper = wrapper  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    return True
