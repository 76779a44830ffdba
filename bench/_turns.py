"""Runs two jobs in turns, some steps of one, then some of the other, so that other load on the machine affects both.

Only one job computes at a time. In the other, one worker waits in its optimizer for the turn, and its peers wait for
that worker. The steps around a change of turns are not counted.
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

VARIABLE = "BENCH_TURNS"
WARM_UP = 5
"""Steps before the first change of turns."""
UNCOUNTED = 3
"""Steps after a change of turns: the one that waited, and those that a peer had begun or ended meanwhile."""
PATIENCE_S = 120.0


class Turns(NamedTuple):
    mine: str
    other: str
    block: int
    steps: int
    first: bool

    def as_text(self) -> str:
        return f"{self.mine}|{self.other}|{self.block}|{self.steps}|{int(self.first)}"

    @classmethod
    def from_text(cls, text: str) -> Turns:
        mine, other, block, steps, first = text.split("|")
        return cls(mine, other, int(block), int(steps), first == "1")


def both(folder: Path, block: int, steps: int) -> tuple[Turns, Turns]:
    """The turns of the two jobs of a comparison."""
    one, other = str(folder / "one"), str(folder / "other")
    os.mkfifo(one)
    os.mkfifo(other)
    return Turns(one, other, block, steps, True), Turns(other, one, block, steps, False)


class Baton:
    """Called after each step by the one worker of a job that waits for its turn."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.step, self.process = turns, 0, os.getpid()
        self.mine, self.other = os.open(turns.mine, os.O_RDWR), os.open(turns.other, os.O_RDWR)

    def after_step(self) -> None:
        if os.getpid() != self.process:  # a fork that tries the optimizer before the first step
            return
        self.step += 1
        if self.step == self.turns.steps:
            os.write(self.other, b"." * 1000)  # this side is done: the other one need not wait any more
        elif self.step % self.turns.block == WARM_UP:
            if self.turns.first or self.step > WARM_UP:
                os.write(self.other, b".")
            if select.select([self.mine], [], [], PATIENCE_S)[0]:
                os.read(self.mine, 1)


def baton() -> Baton | None:
    """The baton of this process, if it is the one that waits: Trueline's first worker, or rank 0 of torchrun."""
    ref, rank = os.environ.get("TRUELINE_REF"), os.environ.get("RANK")
    told = os.environ.get(VARIABLE)
    return Baton(Turns.from_text(told)) if told and (ref == "worker-0.0" or (ref is None and rank == "0")) else None


def blocks(at_ns: Sequence[int], turns: Turns) -> list[list[float]]:
    """Milliseconds of the counted steps, turn by turn; the first and the last turn are left out."""
    found: dict[int, list[float]] = {}
    for step, (before, after) in enumerate(itertools.pairwise(at_ns), start=2):
        turn, place = divmod(step - WARM_UP, turns.block)
        if place >= UNCOUNTED:
            found.setdefault(turn, []).append((after - before) / 1e6)
    last = (turns.steps - WARM_UP) // turns.block
    return [gaps for turn, gaps in sorted(found.items()) if 0 < turn < last - 1]
