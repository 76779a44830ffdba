"""Errors that the user's code catches in a trace and not in a call: `try: peak = float(x[0])`, `except Exception`.

A trace raises where a value decides, where a tensor has no memory, or where a library takes no symbolic size. Code that
catches this goes another way than the model does, and no guard tells of it. What a call catches, too, does not count.
"""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import torch

from trueline.capture.model.code_paths import SourceLine, find_package, is_installed, is_users, line_at
from trueline.errors import CaptureError
from trueline.runtime.tensors import one_line

_Traced = TypeVar("_Traced")
_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "YIELD_VALUE", "RETURN_CONST") if name in dis.opmap)


@dataclass(slots=True)
class CaughtErrors:
    """The lines where the user's code, or that of the `packages` of the model, caught an error, with the first error of
    each. What torch calls while it traces (sympy) catches errors of its own."""

    packages: frozenset[str]
    found: dict[SourceLine, Exception] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module) -> CaughtErrors:
        """None yet."""
        kinds = {kind for part in module.modules() for kind in type(part).__mro__}
        return cls(frozenset(kind.__module__.partition(".")[0] for kind in kinds))

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function of a call: follows the user's frames."""
        file = frame.f_code.co_filename
        if not is_users(file) or (is_installed(file) and find_package(file) not in self.packages):
            return None
        raised: list[tuple[SourceLine, Exception]] = []

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "exception" and isinstance(arg[1], Exception) and not isinstance(arg[1], StopIteration):
                raised.append((line_at(frame), arg[1]))  # a loop over a generator ends by such an error
            elif event == "return" and raised:
                # a call that ends by an error has caught those before it: that one is the caller's
                left = frame.f_code.co_code[frame.f_lasti] not in _RETURNS
                for place, error in raised[:-1] if left else raised:
                    self.found.setdefault(place, error)
                raised.clear()
            return step

        frame.f_trace_lines = False
        return step

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notes what this thread catches in the block."""
        before = sys.gettrace()
        sys.settrace(self.enter)
        try:
            yield
        finally:
            sys.settrace(before)


def follow(module: torch.nn.Module, example: tuple[Any, ...], trace: Callable[[], _Traced]) -> _Traced:
    """What `trace` of `module` returns. Raises CaptureError, with the line, where the trace caught an error that a call
    with `example` does not."""
    caught = CaughtErrors.of(module)
    with caught.watch():
        traced = trace()
    if caught.found:
        plain = CaughtErrors(caught.packages)
        with torch.no_grad(), plain.watch():
            module(*copy.deepcopy(example))
        for place in (one for one in caught.found if one not in plain.found):
            raise CaptureError(
                "the model catches an error there that a trace raises and a call does not, so that the trace goes "
                f"another way ({one_line(caught.found[place])})",
                hint=f"{place}",
            )
    return traced
