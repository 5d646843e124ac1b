"""Which turned copies of pages are already in place.

A copy stays right until something is written to its block or to the block it was made of, so blocks
count the steps that write to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks to copy and turn, all `[C]` int64: from, to, and the tokens to turn the keys by."""

    sources: IntArray
    targets: IntArray
    turns: IntArray

    def only(self, chosen: npt.NDArray[np.bool_]) -> Copies:
        return Copies(self.sources[chosen], self.targets[chosen], self.turns[chosen])


class CopyLedger:
    """The copies that one group of layers holds."""

    def __init__(self) -> None:
        self._writes = np.zeros(0, dtype=np.int64)
        self._held = np.full((0, 3), -1, dtype=np.int64)

    def note_writes(self, blocks: IntArray) -> None:
        """Tokens are written to `blocks` in this step, before any copy of it is made."""
        if len(blocks):
            self._grow(int(blocks.max()) + 1)
            self._writes[blocks] += 1
            self._held[blocks] = -1

    def take_missing(self, copies: Copies) -> Copies:
        """Those of `copies` that are not in place; from now on they count as made."""
        self._grow(int(max(copies.sources.max(), copies.targets.max())) + 1)
        made_of = np.stack([copies.sources, self._writes[copies.sources], copies.turns], axis=1)
        missing = (self._held[copies.targets] != made_of).any(axis=1)
        self._held[copies.targets[missing]] = made_of[missing]
        return copies.only(missing)

    def _grow(self, num_blocks: int) -> None:
        more = num_blocks - len(self._writes)
        if more > 0:
            more = max(more, len(self._writes))
            self._writes = np.concatenate([self._writes, np.zeros(more, dtype=np.int64)])
            fresh = np.full((more, 3), -1, dtype=np.int64)
            self._held = np.concatenate([self._held, fresh])
