"""Tries a recipe at the numbers with which its code compares what it counts, and with other numbers of its batches.

    self.calls += 1
    if self.calls % 100 == 0: self.strength *= 0.9      notes multiples of 100
    if loss.item() < 0.5: self.hard = True              a batch has other numbers there

A recipe is given no step, so it counts its batches itself: in a name of its own or a counter of the model's. After a
batch with such a number the first records have to show what they showed before. This happens in a fork that ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from trueline.data.loading import seeding
from trueline.errors import UsageError
from trueline.train import dynamo
from trueline.train.rehearsal import applied, kept
from trueline.train.rehearsal.places import KeptPlace
from trueline.train.rehearsal.steps.chosen_steps import (
    FACTORS,
    MOST_S,
    MOST_STEPS,
    OtherNumbers,
    list_round,
    spare_programs,
)
from trueline.train.rehearsal.steps.constants import list_constants
from trueline.train.rehearsal.steps.counts import CountedNumber, describe, list_counts
from trueline.train.rehearsal.steps.traced_step import StepNotes
from trueline.train.step import model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.trial import LossTrial

Batches = Generator[StepBatch, None, None]


class ChosenCountsTrial:
    """`batches()` are for a recipe's loss, in a fork, whose losses `tried` takes."""

    def __init__(self, tried: LossTrial, spaces: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self.inputs = replace(tried.inputs, chosen=applied.list_first(tried.inputs))
        self._tried, self._total = tried, tried.inputs.hidden_steps
        self._memory, self._spaces = kept.KeptNames(tried.inputs.model, spaces), spaces
        self._numbers = OtherNumbers()
        self._shown: list[list[float]] = []
        self._counts: list[CountedNumber] = []
        self._counted: dict[str, float] = {}
        """The single numbers among the model's buffers after a batch."""
        self._until = 0.0
        self.untried = "it gave no answer"
        """Why something of it was not tried, if anything."""
        self._untried = ""

    def answer(self) -> dict[str, Any]:
        """A fault is raised."""
        return {"untried": self._untried}

    def accept(self, answer: dict[str, Any]) -> None:
        self.untried = answer["untried"]

    def batches(self) -> Batches:
        """Raises UsageError for the first number after which other batches have another loss."""
        self._until, self._tried.after = time.process_time() + MOST_S, self._take_loss
        applied.spare_files()
        spare_programs()
        before = self._read_singles()
        for _ in range(2):
            yield from self._take()
            self._memory.look()
        counters = [CountedNumber(place, before[place.name]) for place in list_singles(self.inputs.model)
                    if self._counted[place.name] != before[place.name]]  # fmt: skip
        self._counts = [*list_counts(self._memory), *counters]
        yield from self._take()
        if not kept.is_same(self._shown[1], self._shown[2]):
            self._untried = kept.compare(self._shown[1], self._shown[2])
            return  # other trials decide
        for count in self._counts:
            yield from self._try_traced(count) if count.traced else ()
        yield from self._try_plain([count for count in self._counts if not count.traced])
        for factor in FACTORS if self._numbers.seen else ():
            self._numbers.factor = factor
            yield from self._try(f"where a number that its code looks at is {factor:g} times as large")

    def further(self) -> Batches:
        """Raises UsageError if a number that is not finite changes what later batches use. The code may raise there."""
        if self._numbers.asked and not self._untried:
            self._numbers.factor = math.nan
            yield from self._try("where a number that its code looks at is not finite")

    def _take(self, counts: Sequence[CountedNumber] = (), number: Any = 0) -> Batches:
        """A batch of the first records, with `number` in `counts`, and in each other count what it had at first."""
        given = self.inputs
        assert given.chosen is not None
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        with eager, self._numbers, model_traits.restore_buffers(given.model):
            for other in self._counts:
                other.reset()
            for count in counts:
                count.write(number)
            batch = given.reader.read(given.chosen, epoch=0)
            seeding.seed_all(given.seed, 0, 0)
            yield StepBatch(
                inputs=batch.inputs, labels=batch.labels, records=given.chosen, step=0, weight=1.0, trial=True
            )
            self._counted = self._read_singles()

    def _read_singles(self) -> dict[str, float]:
        return {place.name: place.value.item() for place in list_singles(self.inputs.model)}

    def _take_loss(self, loss: torch.Tensor) -> bool:
        """What is looked at here is not the recipe's."""
        with self._numbers.close():
            self._shown.append(self._tried.show(loss))
        return False

    def _list_constants(self, *, keys: bool = False) -> list[int]:
        kinds = [("", type(part)) for part in self.inputs.model.modules()]
        return list_constants([*self._spaces(), *kinds], self._total, keys=keys)

    def _try_traced(self, count: CountedNumber) -> Batches:
        notes = StepNotes(self._total * self.inputs.global_batch)  # it may count records
        yield from self._take([count], notes.trace(count.first))
        keys = self._list_constants(keys=True) if notes.looked_up else ()
        for number in notes.choose_like(count.first, MOST_STEPS, keys):
            yield from self._try(describe([count], number), [count], notes.trace(number))

    def _try_plain(self, counts: Sequence[CountedNumber]) -> Batches:
        """Of numbers that do not show what they are compared with, all at once."""
        near = [number + by for number in self._numbers.compared for by in (-1, 0, 1)][:MOST_STEPS]
        for number in dict.fromkeys((*near, *self._list_constants(), *list_round(self._total))) if counts else ():
            yield from self._try(describe(counts, number), counts, number)

    def _try(self, when: str, counts: Sequence[CountedNumber] = (), number: Any = 0) -> Batches:
        if time.process_time() > self._until:
            self._untried = self._untried or f"no time was left {when}"
            return
        yield from self._take(counts, number)
        self._numbers.factor = 1.0
        yield from self._take()
        usual, found = self._shown[2], self._shown[-1]
        if not kept.is_same(usual, found):
            raise UsageError(
                f"in a batch {when} the recipe changes something that later batches use: after it "
                f"{kept.compare(usual, found)}, with equal seeds and parameters",
                hint="a worker that joins receives model and optimizer, and nothing that Python code has counted or "
                "kept: compute it in each batch from a buffer of the model that counts (self.register_buffer), or "
                "keep it in one",
            )


def _leave(_: Any) -> None:
    """Its number is changed in place."""


def list_singles(model: torch.nn.Module) -> list[KeptPlace]:
    """The buffers of one number, without those of normalization layers."""
    slots = [slot for kind in (True, False) for slot in model_traits.buffer_slots(model, persistent=kind)]
    return [
        KeptPlace(f"the model's buffer '{slot.name}'", slot.value, _leave)
        for slot in slots
        if slot.value.numel() == 1 and not slot.value.is_complex()
    ]
