"""Rolling generation: a long clip in windows, each behind a bounded context of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_plugin.kv.layout import RetentionPolicy, require_count


@dataclass(frozen=True, slots=True)
class WindowSchedule:
    """Windows of a clip, all counts in latent units (the frames a model denoises).

    Each window has `window` units and starts `window - overlap` after the one before it; the last
    one may be shorter. `context` units behind the prompt stay in the cache, 0 keeps all of them.
    `overlap` is for models that encode the end of a window anew; where the context lives in the
    cache it is 0.
    """

    total: int
    window: int
    context: int = 0
    overlap: int = 0

    def __post_init__(self) -> None:
        require_count("total", self.total, 1)
        require_count("window", self.window, 1)
        require_count("context", self.context, 0)
        require_count("overlap", self.overlap, 0)
        if self.overlap >= self.window:
            raise ValueError(
                f"overlap must be smaller than window={self.window}, got {self.overlap}"
            )

    @property
    def stride(self) -> int:
        """Units from the start of one window to the start of the next."""
        return self.window - self.overlap

    @property
    def num_windows(self) -> int:
        """`1 + ceil((total - window) / stride)`. Example: 48 units in windows of 8 -> 6."""
        return 1 + max(0, -(-(self.total - self.window) // self.stride))

    def units(self, index: int) -> range:
        """Absolute units of one window. Example: 20 units in windows of 8, index 2 -> 16..19.

        IndexError unless `index` lies in `0..num_windows - 1`.
        """
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window index must lie in 0..{self.num_windows - 1}, got {index}")
        start = index * self.stride
        return range(start, min(start + self.window, self.total))

    def retention(self, tokens_per_unit: int, protected_prefix: int) -> RetentionPolicy | None:
        """The policy a committing step declares; None when the whole context is kept.

        `protected_prefix` is the label's own prompt in tokens.
        Example: context 16, 390 tokens a unit, prompt 180 -> budget 6240, prefix 180.
        """
        require_count("tokens_per_unit", tokens_per_unit, 1)
        if self.context == 0:
            return None
        return RetentionPolicy(self.context * tokens_per_unit, protected_prefix)
