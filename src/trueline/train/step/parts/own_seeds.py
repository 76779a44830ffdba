"""Finds noise that a loop seeds by the step alone: all shards of a step would have the same.

    torch.manual_seed(batch.step)                 the first record of each shard gets the same noise, and so the second
    noise = torch.randn_like(batch.inputs)

So two batches of other records, under other seeds of Trueline's, must not draw the same numbers. What is drawn once
for a step, whatever its records (a size, a rotation), may be the same, and so may what is the same in all steps.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.errors import UsageError
from trueline.train.step.contribution import StepBatch
from trueline.train.step.plan import Ints, choose_late

MOST_RECORDS, SAMPLE, MOST_DRAWS = 5, 4096, 64
"""Records of a batch, elements of a draw that are compared, and draws of a batch."""
_LIBRARIES = tuple({os.path.dirname(path) for path in (torch.__file__, __file__[: __file__.rindex("train")])}) + tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class DrawnNumbers(NamedTuple):
    """What an operator has drawn."""

    elements: int
    first: tuple[float, ...]
    line: str


class NotedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators draw, and for which line of the user's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[DrawnNumbers] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and len(self.draws) < MOST_DRAWS:
            drawn = result[-1] if isinstance(result, tuple | list) else result  # of dropout its mask
            if isinstance(drawn, torch.Tensor) and not drawn.is_complex():
                first = tuple(map(float, drawn.detach().reshape(-1)[:SAMPLE].tolist()))
                self.draws.append(DrawnNumbers(drawn.numel(), first, _find_line()))
        return result


def _find_line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class SeededTrial(Protocol):
    """The trial that takes the losses."""

    inputs: Any

    def one_as_it_is(self, ids: Ints, *, step: int | None = None, seed: int = 0
                     ) -> Generator[StepBatch, None, None]: ...  # fmt: skip


def expect_other_noise(trial: SeededTrial, ids: Ints) -> Generator[StepBatch, None, None]:
    """Raises UsageError if batches of other records of one step draw the same for them."""
    count, given, found = min(MOST_RECORDS, len(ids) // 2), trial.inputs, list[list[DrawnNumbers]]()
    if count < 2:
        return
    late = choose_late(given.total_steps)
    for part, seed, step in (
        (ids[:count], 0, 0), (ids[count : 2 * count], 1, 0),
        (ids[:count], 2, 0), (ids[: count - 1], 0, 0), (ids[:count], 0, late),
    ):  # fmt: skip
        if len(found) == 2 and not any(map(_is_same, *found)):
            return
        with NotedDraws() as noted:
            yield from trial.one_as_it_is(part, seed=seed, step=step)
        found.append(noted.draws)
    for one, other, again, fewer, later in zip(*found, strict=False):
        if (
            _is_same(one, other)
            and _is_same(one, again)
            and one.elements != fewer.elements
            and one.first != later.first
        ):
            raise UsageError(
                f"in a step, batches of other records draw the same numbers{f' in {one.line}' if one.line else ''}: "
                "seeded by the step alone, the noise of each shard is that of the others",
                hint="leave the seed out: the generators of torch, numpy and random are seeded for each shard by seed, "
                "step and shard; or seed a generator by the step and batch.records[0]",
            )


def _is_same(one: DrawnNumbers, other: DrawnNumbers) -> bool:
    return one.elements > 1 and one[:2] == other[:2]
