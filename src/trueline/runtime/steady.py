"""Is the model a function of its inputs? Asked twice the same, it has to answer the same; else the line is named.

Random numbers are found where torch draws them (operators that are tagged as seeded), a memory where user code
stores into an attribute while it is called.
"""

from __future__ import annotations

import dis
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.runtime import compare, paths
from trueline.runtime.paths import Event, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trueline.runtime.eager import EagerSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """Why a model cannot be captured, and the user's line if it was found."""

    why: str
    place: Place | None


class _Draws(TorchDispatchMode):
    """Notes the operators that draw random numbers, with the user's line that called each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Place | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found.append((str(func), _calling_line()))
        return func(*args, **(kwargs or {}))


def _calling_line() -> Place | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if paths.is_users(frame.f_code.co_filename):
            return Place(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return None


def unsteady(eager: EagerSession) -> Unsteady | None:
    """Asks the example twice. None when the answers agree and are numbers."""
    first = eager.run(eager.example)
    found = compare.compare(first, eager.run(eager.example))
    if not found.agrees:
        return _searched(eager, found.reason)
    for name, array in first.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            count = int(np.isnan(array).sum())
            return Unsteady(
                why=f"the model answers NaN to its own example, in {count} of {array.size} elements of '{name}'",
                place=None,
            )
    return None


def _searched(eager: EagerSession, reason: str) -> Unsteady:
    """Asks once more, to see whether random numbers are drawn, and where."""
    draws = _Draws()
    with paths.watching() as way, draws:
        eager.run(eager.example)
    if draws.found:
        operator, place = draws.found[0]
        return Unsteady(
            why=f"the model is not deterministic in evaluation mode: {operator} draws random numbers, and it answers "
            f"differently when it is asked the same again ({reason})",
            place=place,
        )
    return Unsteady(
        why=f"the model keeps a state: it answers differently when it is asked the same again ({reason})",
        place=_storing(way),
    )


def _storing(way: Sequence[Event]) -> Place | None:
    """The first line that stores into an attribute."""
    stores: dict[CodeType, dict[int, int]] = {}
    for _, code, offset in way:
        if code not in stores:
            stores[code] = _stores(code)
        if offset in stores[code]:
            return Place(file=code.co_filename, line=stores[code][offset])
    return None


def _stores(code: CodeType) -> dict[int, int]:
    found, line = {}, code.co_firstlineno
    lines = {start: number for start, _, number in code.co_lines() if number}
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        if instruction.opname == "STORE_ATTR":
            found[instruction.offset] = line
    return found
