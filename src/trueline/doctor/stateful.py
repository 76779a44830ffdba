"""A module whose answers depend on earlier calls, examined as a function of its state: it goes in and comes out.

The calls are asked in the order in which the original was asked them, and what one leaves goes into the next; so a
state that is dropped, frozen or mixed up shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trueline.capture.model import explicit_state
from trueline.capture.model.arguments import Arguments
from trueline.capture.model.explicit_state import GIVEN, NEXT, Explicit
from trueline.doctor.recorded_calls import RecordedCall, flat_answer
from trueline.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The state that a module begins with, by the names of its buffers."""

    names: tuple[str, ...]
    initial: tuple[torch.Tensor, ...]

    def thread_state(self, run: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """`run`, which takes a state after its inputs and gives one after its answers, as what remembers."""
        held = list(self.initial)

        def run_once(*tensors: Any) -> tuple[Any, ...]:
            found = tuple(run(*tensors, *held))
            held[:] = found[len(found) - len(held) :]
            return found[: len(found) - len(held)]

        return run_once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Remembered:
    """A module as a function of its state, with what it is exported on."""

    module: torch.nn.Module
    state: tuple[torch.Tensor, ...]
    free: tuple[set[int], ...]
    """For each part of the state the dimensions that vary: with the batch, or because it grows."""
    memory: Memory


def make_state_explicit(module: torch.nn.Module, base: RecordedCall) -> Remembered | str | None:
    """`module` (a copy that may be changed) with the buffers explicit that the call `base` writes; None where it writes
    none, and why where they keep no form."""
    asked = Arguments(*base.arguments(base.tensors))
    try:
        found = explicit_state.lift_state(module, [asked])
    except CaptureError as error:
        return error.message
    if found is None:
        return None
    given = explicit_state.with_state(found, asked).kwargs
    axes = [(found.records.get(name), found.grows.get(name)) for name in found.names]
    return Remembered(
        module=FlatStateModule(found, base),
        state=tuple(given[GIVEN + name].clone() for name in found.names),
        free=tuple({axis for axis in pair if axis is not None} for pair in axes),
        memory=Memory(names=found.names, initial=tuple(value.clone() for value in found.initial.values())),
    )


class FlatStateModule(torch.nn.Module):
    """An Explicit with a call's tensors and then the state in, and the tensors of its answer and then the state out."""

    def __init__(self, module: Explicit, like: RecordedCall) -> None:
        super().__init__()
        self.module = module
        self.like = like

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.like.tensors)
        args, kwargs = self.like.arguments(tensors[:count])
        state = {GIVEN + name: given for name, given in zip(self.module.names, tensors[count:], strict=True)}
        found, left = self.module(*args, **kwargs, **state)
        return (*flat_answer(found), *(left[NEXT + name] for name in self.module.names))


def shapes(free: Sequence[set[int]]) -> tuple[dict[int, Any], ...]:
    """The free dimensions as torch.export is told them."""
    return tuple(dict.fromkeys(sorted(axes), torch.export.Dim.DYNAMIC) for axes in free)
