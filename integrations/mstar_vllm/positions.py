"""How a query sees the protected keys: at their own positions, or at a distance that stays.

With "absolute" positions the distance to the protected prefix grows without end. With "rolling"
ones a query at position `n` sees a protected key `j` as if the released tokens had never been: at
the rotary distance `n - j - released_pages(n) * S`. Every other key keeps its true distance.
"""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.kv.config import RetentionPolicy

ABSOLUTE, ROLLING = "absolute", "rolling"
POSITIONS = (ABSOLUTE, ROLLING)


@dataclass(frozen=True)
class RollingPolicy(RetentionPolicy):
    """A policy whose protected keys are seen at a distance that stays."""


def policy_with(budget: int, prefix: int, positions: str) -> RetentionPolicy:
    """The policy with these positions; with nothing protected both are the same."""
    kind = RollingPolicy if positions == ROLLING and prefix else RetentionPolicy
    return kind(context_budget=budget, protected_prefix=prefix)


def positions_of(policy: RetentionPolicy | None) -> str:
    """Example: a plain policy -> "absolute"."""
    return ROLLING if isinstance(policy, RollingPolicy) else ABSOLUTE
