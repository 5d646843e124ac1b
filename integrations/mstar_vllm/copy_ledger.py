"""Which turned copies of pages are already in place.

A copy stays right until something is written to its block or to the block it was made of, so blocks
count the steps that write to them. All groups of layers take their blocks from one pool and share
their memory, so that they count together.
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


class BlockWrites:
    """How often each block of the pool was written to."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)

    def note(self, blocks: IntArray) -> None:
        """Something is written to `blocks`, each named once."""
        if len(blocks):
            self._counts = grown(self._counts, int(blocks.max()) + 1)
            self._counts[blocks] += 1

    def of(self, blocks: IntArray) -> IntArray:
        self._counts = grown(self._counts, int(blocks.max()) + 1)
        counts: IntArray = self._counts[blocks]
        return counts


class CopyLedger:
    """The copies that one group of layers holds."""

    def __init__(self, writes: BlockWrites) -> None:
        self._writes = writes
        self._held = np.full((0, 4), -1, dtype=np.int64)

    def take_missing(self, copies: Copies) -> Copies:
        """Those of `copies` that are not in place; from now on they count as made. What is written
        to blocks in this step has been noted.
        """
        targets = copies.targets
        columns = (copies.sources, self._writes.of(copies.sources), copies.turns)
        made = np.stack([*columns, self._writes.of(targets)], axis=1)
        self._held = grown(self._held, int(targets.max()) + 1, fill=-1)
        missing = (self._held[targets] != made).any(axis=1)
        written = targets[missing]
        self._writes.note(np.unique(written))
        made[missing, 3] = self._writes.of(written) if len(written) else 0
        self._held[written] = made[missing]
        return copies.only(missing)


def grown(array: IntArray, length: int, fill: int = 0) -> IntArray:
    """`array` itself where it is long enough, else one at least twice as long."""
    more = length - len(array)
    if more <= 0:
        return array
    shape = (max(more, len(array)), *array.shape[1:])
    return np.concatenate([array, np.full(shape, fill, dtype=np.int64)])
