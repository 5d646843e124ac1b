"""A ring kept in pages, one page a frame: how many pages a request needs and which holds a frame.

For servers that compute a request in chunks of tokens. A step writes the keys of its whole chunk
before its queries attend, so no frame of the chunk may share a page with another one or with a
frame that a query of the chunk still sees. Letters as in `geometry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


def chunk_frames(num_tokens: int, tokens_per_frame: int) -> int:
    """Most frames that `num_tokens` consecutive tokens can touch.

    Example: 16 tokens a frame -> 1 for 1 token, 2 for 2 to 17 tokens, 3 for 18.
    """
    return (num_tokens + tokens_per_frame - 2) // tokens_per_frame + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FramePages:
    """The pages of one request in layers of one geometry.

    dilation, buckets: `d` and `b`. chunk_frames: most frames one step can touch.
    Frames that are kept (multiples of `d`) take turns in `num_kept` pages; the others, which only
    their own tokens see, in `num_passing` pages behind them.
    """

    dilation: int
    buckets: int
    chunk_frames: int

    @property
    def num_kept(self) -> int:
        """Pages for kept frames: what the chunk's first frame sees and what the chunk writes.

        Example: d=1, b=16 -> 16 for chunks of one frame, 19 for four; d=8, b=16 -> 16, 17 for 3.
        """
        return self.buckets + (self.chunk_frames + self.dilation - 2) // self.dilation

    @property
    def num_passing(self) -> int:
        """Pages for the chunk's other frames. Example: d=8 -> 3 for 3 frames, 15 for 17."""
        return self.chunk_frames - self.chunk_frames // self.dilation

    @property
    def num_pages(self) -> int:
        """Pages a request holds from its first step to its end."""
        return self.num_kept + self.num_passing

    def page_of(self, frame: int) -> int:
        """Which of the request's pages holds `frame`.

        Example: d=2, b=2, one frame a chunk: frames 0 to 5 are in pages 0, 2, 1, 2, 0, 2.
        """
        kept_before = -(-frame // self.dilation)
        if frame % self.dilation == 0:
            return kept_before % self.num_kept
        return self.num_kept + (frame - kept_before) % self.num_passing
