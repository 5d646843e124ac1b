"""What a process that takes requests needs: their check, and the metrics."""

from __future__ import annotations


def hook_front_end() -> None:
    """Check requests where they enter and show the metrics; a second call changes nothing."""
    from mstar_vllm.metrics import export_metrics
    from mstar_vllm.requests import hook_input_processor

    hook_input_processor()
    export_metrics()
