"""Triton kernels that are launched every step, outside graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


class OneForm:
    """A Triton kernel of which no argument's value or alignment makes a form of its own.

    So it is compiled once for a device and its constants, not at a request's first such argument,
    and launched without Triton's look at every argument, which takes longer than the launch and
    delays the step. Its arguments must keep their dtypes; constants are the parameters annotated
    as such, they come last and in their order.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._constants = [p.name for p in parameters if "constexpr" in str(p.annotation)]
        count = len(parameters) - len(self._constants)
        self.kernel: Any = triton.jit(do_not_specialize=list(range(count)))(function)
        self._forms: dict[tuple[Any, ...], Any] = {}

    def launch(self, num_programs: int, *arguments: Any, **constants: Any) -> None:
        """`num_programs` programs on the current device, that of the first argument."""
        form = (arguments[0].device, *constants.values())
        compiled = self._forms.get(form)
        if compiled is None:
            self._forms[form] = self._compile(num_programs, arguments, constants)
            return
        compiled[num_programs, 1, 1](*arguments, *constants.values())

    def _compile(
        self, num_programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> Any:
        """Launch as Triton does; what it compiled, None from its interpreter."""
        if list(constants) != self._constants:
            raise TypeError(f"constants must be {self._constants} in order, got {list(constants)}")
        return self.kernel[num_programs,](*arguments, **constants)
