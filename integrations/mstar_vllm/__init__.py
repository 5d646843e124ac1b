"""The vLLM plugin. Inside this package a page is called a block, as vLLM does."""

from __future__ import annotations

import logging

_failure: Exception | None = None


def register() -> None:
    """Entry point of the `vllm.general_plugins` group: cheap, idempotent, never raises.

    vLLM calls it in every process, also in those that never use this backend. A failure is kept and
    raised by `raise_if_unusable` only where the backend is selected. It is also logged, because
    after some failures vLLM does not know the name.
    """
    global _failure
    try:
        from mstar_vllm.plugin import install

        install()
        _failure = None
    except Exception as error:
        _failure = error
        logging.getLogger("mstar_vllm").warning("mstar could not be registered: %r", error)


def raise_if_unusable() -> None:
    """Raise the error that `register` met, if any; called only where the backend is selected."""
    if _failure is not None:
        raise RuntimeError(
            f"mstar could not be registered with this vLLM: {_failure!r}; install a supported vLLM "
            "or leave out --attention-backend mstar"
        ) from _failure
