"""A kernel of one form is handed the same arguments by both ways of launching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

tl = pytest.importorskip("triton.language", reason="needs Triton")
pytest.importorskip("vllm", reason="needs vLLM")

from mstar_vllm.kernel_launch import OneForm  # noqa: E402

pytestmark = pytest.mark.vllm


class Launches:
    """Stands for Triton, whose kernels need a card: `kernel[grid](...)` gives a compiled one."""

    def __init__(self, way: str, seen: list[tuple[Any, ...]]) -> None:
        self._way, self._seen = way, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Launches]:
        def launch(*arguments: Any, **constants: Any) -> Launches:
            self._seen.append((self._way, grid[0], *arguments, *constants.values()))
            return Launches("compiled", self._seen)

        return launch


def made() -> tuple[OneForm, list[tuple[Any, ...]]]:
    def kernel(x, count, PAGE: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    seen: list[tuple[Any, ...]] = []
    form = OneForm(kernel)
    form.kernel = Launches("triton", seen)
    return form, seen


def test_a_second_launch_hands_over_what_the_first_did() -> None:
    form, seen = made()
    x = torch.zeros(2)
    for programs in (3, 5):
        form.launch(programs, x, 7, PAGE=16, SPLIT=True)
    assert seen == [("triton", 3, x, 7, 16, True), ("compiled", 5, x, 7, 16, True)]


def test_other_constants_are_another_form() -> None:
    form, seen = made()
    for split in (True, False, True):
        form.launch(1, torch.zeros(2), 7, PAGE=16, SPLIT=split)
    assert [way for way, *_ in seen] == ["triton", "triton", "compiled"]
