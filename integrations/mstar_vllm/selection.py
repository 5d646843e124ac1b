"""Which class serves an attention layer, per platform; what it cannot serve is refused, not
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def select_backend(
    original: Callable[..., str], selector_config: Any, num_heads: int | None
) -> str:
    """Qualified name of the backend class for a layer.

    MLA layers go to the platform's own MLA backend, which serves them unbounded. Raises ValueError
    with every reason where the layer is not supported.
    """
    if selector_config.use_mla:
        return original(None, selector_config, num_heads=num_heads)
    from vllm.config import get_current_vllm_config

    from mstar_vllm.backend import backend_class
    from mstar_vllm.settings import settings_of

    backend = backend_class(settings_of(get_current_vllm_config()).kernels)
    reasons = backend.validate_configuration(
        device_capability=_device_capability(), **selector_config._asdict()
    )
    if reasons:
        raise ValueError(
            f"mstar cannot serve this model's attention layers: {', '.join(reasons)} "
            f"({selector_config}); choose another --attention-backend"
        )
    return f"{backend.__module__}.{backend.__qualname__}"


def _device_capability() -> Any:
    from vllm.platforms import current_platform

    return current_platform.get_device_capability()
