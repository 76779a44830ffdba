"""Sizes that a module takes in multiples only (`if height % 2 == 0` along a stack of strides), as capture takes them.

A module that torch.export can follow for one size only is exported again in units, on a call whose sizes have many
factors of two, and compared on the calls that are such multiples. See `runtime.multiples`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from trueline.capture.export.divisible_dims import MOST, largest
from trueline.doctor.recorded_calls import RecordedCall

Place = tuple[int, int]
"""Number of a tensor, and an axis."""
Steps = Mapping[Place, int]
"""Of what the size at each place is a multiple; the others are free."""
NONE: Steps = MappingProxyType({})

_CONSTANT = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but .* be a constant \((\d+)\)")
LEAST = 2
"""Different sizes of what comes in multiples that a proof has to have seen."""


def export_with_divisors(
    export: Callable[[tuple[dict[int, Any], ...]], torch.export.ExportedProgram],
    free: Sequence[set[int]],
    calls: Sequence[RecordedCall],
    base: RecordedCall,
) -> tuple[torch.export.ExportedProgram, Steps]:
    """The program of `base`, in units where torch fixes a size, and of what these sizes are then multiples.

    `export` is given the free dimensions as torch.export is told them. Raises what it raises, when no units free them.
    """
    steps: dict[Place, int] = {}
    while True:
        try:
            return export(_shapes(free, steps, calls)), steps
        except Exception as error:
            fixed = {(int(i), int(axis)): int(size) for i, axis, size in _CONSTANT.findall(str(error))}
            new = {place: largest(size) for place, size in fixed.items() if place not in steps}
            if not new or any(step < 2 or axis == 0 for (_, axis), step in new.items()):
                raise
            steps |= new


def guesses(base: RecordedCall, free: Sequence[set[int]], steps: Steps) -> Iterator[Steps]:
    """What the program of `base`, which needs `steps`, may need beside them: powers of two, the least first.

    A branch on whether a size is even fixes no size, and the program is wrong for odd ones.
    """
    sizes = {(i, axis): base.tensors[i].shape[axis] for i, axes in enumerate(free) for axis in axes if axis}
    before: Steps | None = None
    power = 1
    while power <= MOST:
        more = {place: min(power, size & -size) for place, size in sizes.items() if size}
        found = {place: step for place, step in {**more, **steps}.items() if step > 1}
        if found != before:
            yield found
        before, power = found, 2 * power


def _shapes(free: Sequence[set[int]], steps: Steps, calls: Sequence[RecordedCall]) -> tuple[dict[int, Any], ...]:
    """Places whose sizes are equal in all calls count in one unit."""
    units: dict[tuple[int, ...], Any] = {}
    found: list[dict[int, Any]] = []
    for number, axes in enumerate(free):
        told: dict[int, Any] = {}
        for axis in sorted(axes):
            step = steps.get((number, axis))
            if step is None:
                told[axis] = torch.export.Dim.DYNAMIC
                continue
            sizes = tuple(call.tensors[number].shape[axis] for call in calls)
            told[axis] = step * units.setdefault(sizes, torch.export.Dim(f"units_{number}_{axis}"))
        found.append(told)
    return tuple(found)


def evenest(calls: Sequence[RecordedCall], free: Sequence[set[int]]) -> RecordedCall:
    """The call whose free sizes, but for the first of a tensor, have the most factors of two."""

    def score(call: RecordedCall) -> int:
        places = [(tensor, axis) for tensor, axes in zip(call.tensors, free, strict=False) for axis in axes if axis]
        sizes = [tensor.shape[axis] for tensor, axis in places]
        return min((largest(size) for size in sizes), default=0)

    return max(calls, key=score)


def within(call: RecordedCall, steps: Steps) -> bool:
    """Whether the sizes of the call are multiples as `steps` says."""
    return all(call.tensors[number].shape[axis] % step == 0 for (number, axis), step in steps.items())


def describe_divisors(steps: Steps) -> str:
    """For the report; empty without units."""
    return f"for sizes that are multiples of {max(steps.values())}" if steps else ""
