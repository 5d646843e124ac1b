"""FlashInfer's plans on a card that runs behind its host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PlanInFlight:
    """The last plan, as long as the card may still have to copy it.

    A wrapper writes each plan over its last one, in page-locked host memory that the card copies in
    its own time, so that without a wait a step can run with the plan of the next step. A wrapper
    that is dropped gives that memory back at once; it is kept until the copy is done. For the
    current stream of `device`, and one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied: Any = None
        self._owner: object = None

    @contextmanager
    def replaced_by(self, owner: object) -> Iterator[None]:
        """Plan in here; owner: whose memory the plan is in, None if it lasts by itself.

        `RuntimeError` while a graph is captured, since its replays would not plan.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention must be planned before a graph is captured: call plan")
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.synchronize()
        try:
            yield
        finally:
            self._copied.record(torch.cuda.current_stream(self._device))
            self._owner = owner
