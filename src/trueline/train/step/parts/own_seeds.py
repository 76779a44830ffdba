"""Finds noise that a loop seeds by the step alone: all shards of a step would have the same.

    torch.manual_seed(batch.step)                 the first record of each shard gets the same noise, and so the second
    noise = torch.randn_like(batch.inputs)

So two batches of other records, under other seeds of Trueline's, must not draw the same numbers. What is drawn once
for a step, whatever its records (a size, a rotation), may be the same, and so may what is the same in all steps. Of
torch the draws are compared; of numpy and `random` the states of generators that were seeded alike
(`seeded_generators.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.errors import UsageError
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts.seeded_generators import NotedSeeds, SeededGenerator, find_line, note_seeds
from trueline.train.step.plan import Ints, choose_late

MOST_RECORDS, SAMPLE, MOST_DRAWS = 5, 4096, 64
MOST_LOOKED_AT = 1 << 16
"""Records of a batch, elements of a draw that are compared, draws of a batch, and
records of which further ones are chosen."""
LEAST_KINDS, LEAST_ELEMENTS = 3, 64
"""Different values, or else elements, from which on draws are not the same by chance: a mask has two values."""


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
                self.draws.append(DrawnNumbers(drawn.numel(), first, find_line()))
        return result


class SeededTrial(Protocol):
    """The trial that takes the losses."""

    inputs: Any
    noted: NotedSeeds

    def one_as_it_is(self, ids: Ints, *, step: int | None = None, seed: int = 0
                     ) -> Generator[StepBatch, None, None]: ...  # fmt: skip


def expect_other_noise(trial: SeededTrial, ids: Ints) -> Generator[StepBatch, None, None]:
    """Raises UsageError if batches of other records of one step draw the same for them."""
    given = trial.inputs
    ids = _add_others(ids, given)
    count = min(MOST_RECORDS, given.most, len(ids) // 2)
    draws = list[list[DrawnNumbers]]()
    seeds, own = list[list[SeededGenerator]](), list[list[SeededGenerator]]()
    if count < 2:
        return
    late = choose_late(given.total_steps)
    for part, seed, step in (
        (ids[:count], 0, 0), (ids[count : 2 * count], 1, 0),
        (ids[:count], 2, 0), (ids[: count - 1], 0, 0), (ids[:count], 0, late),
    ):  # fmt: skip
        if len(draws) == 2 and not (
            any(map(_is_same, *draws)) or any(map(_is_seeded_alike, *seeds)) or any(map(_is_seeded_alike, *own))
        ):
            return
        with NotedDraws() as noted, note_seeds(trial.noted):
            yield from trial.one_as_it_is(part, seed=seed, step=step)
        draws.append(noted.draws)
        for kept, ended in zip((seeds, own), trial.noted.end(), strict=True):
            kept.append(ended)
    _expect_no_same_draws(draws)
    _expect_no_same_seeds(seeds)
    _expect_no_same_seeds(own)


def _add_others(ids: Ints, given: Any) -> Ints:
    """`ids`, or where these are few (`micro_batch`) those of other records too, as far as there are any."""
    if len(ids) >= 2 * MOST_RECORDS:
        return ids
    others = np.random.default_rng(0).permutation(min(given.num_records, MOST_LOOKED_AT))
    more: Ints = np.setdiff1d(others[: 4 * MOST_RECORDS], ids)
    return np.concatenate([ids, more])


def _expect_no_same_draws(found: Sequence[Sequence[DrawnNumbers]]) -> None:
    for one, other, again, fewer, later in _align(found):
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


def _align(found: Sequence[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The first of a line in all batches, its second one, and so on: code may run it once for each record."""
    for line in dict.fromkeys(one.line for one in found[0]):
        yield from zip(*([one for one in batch if one.line == line] for batch in found), strict=False)


def _is_same(one: DrawnNumbers, other: DrawnNumbers) -> bool:
    least = min(len(one.first), len(other.first))  # a batch may be padded to other lengths
    tells = least >= LEAST_ELEMENTS or len(set(one.first[:least])) >= LEAST_KINDS
    return tells and one.line == other.line and one.first[:least] == other.first[:least]


def _expect_no_same_seeds(found: Sequence[Sequence[SeededGenerator]]) -> None:
    """Each position has a generator of the same line in all batches; what is drawn for each record by a generator of
    its own is the same with fewer records."""
    for one, other, again, fewer, later in _align(found):
        if (
            _is_seeded_alike(one, other)
            and _is_seeded_alike(one, again)
            and not _is_seeded_alike(one, later)
            and one.ended == again.ended != fewer.ended
        ):
            raise UsageError(
                "in a step, batches of other records get the same numbers from numpy or random, whose generator is "
                f"seeded {f'in {one.line} ' if one.line else ''}by the step alone: the noise of each shard is that of "
                "the others",
                hint="leave the seed out: np.random and random are seeded for each shard by seed, step and shard; or "
                "seed one generator for each record: np.random.default_rng([batch.step, int(record)])",
            )


def _is_seeded_alike(one: SeededGenerator, other: SeededGenerator) -> bool:
    if one.line != other.line or bool(one.seeded) != bool(other.seeded):
        return False
    return one.seeded == other.seeded if one.seeded else one.ended == other.ended
