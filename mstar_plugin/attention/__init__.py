"""Attention over a KV plan: the fp32 reference and the fast paths compared with it."""

from mstar_plugin.attention.api import AttentionPath, attend, plan_attention
from mstar_plugin.attention.call import AttentionParams, AttentionResult, PlannedAttention

__all__ = [
    "AttentionParams",
    "AttentionPath",
    "AttentionResult",
    "PlannedAttention",
    "attend",
    "plan_attention",
]
