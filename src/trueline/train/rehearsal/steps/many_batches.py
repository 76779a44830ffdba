"""Hands out many batches one after another: whatever the user's code counts, and wherever it keeps that, it counts on.

    c.execute("update s set n = n + 1")                  nothing can be noted of such a count
    if n % 500 == 0: scale *= 0.5                        after the 500th batch the first records have another loss

No parameter changes meanwhile, and the records are the same ones: what shows another loss afterwards, with equal seeds
and parameters, is what the code has kept. The batches have the steps from 0 on; they are as many as the job has, or as
some processor time is enough for. Where that ends first, further ones are given outputs that the model's modules had
before, so that the loop's own code alone is run. This happens in a fork that ends.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.utils._pytree import tree_map

from trueline.data.loading import seeding
from trueline.data.source import Batch
from trueline.errors import UsageError
from trueline.train import dynamo
from trueline.train.rehearsal import applied, copies, kept, modes
from trueline.train.rehearsal.kept import JOINS
from trueline.train.rehearsal.steps.chosen_steps import spare_programs
from trueline.train.step import model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.plan import choose_late
from trueline.train.step.trial import LossTrial

MOST_S = 1.5
"""Of processor time, with the model and again with its outputs; twice as long where other processes have the cores."""
ENOUGH = 2000
"""Batches with the model after which none follow with its outputs."""
MOST_BYTES, LOOK_EACH = 512 << 20, 64
"""More memory than before the first of the batches, at which they end, and after how many it is looked at."""
Batches = Generator[StepBatch, None, None]


class ManyBatchesTrial:
    """`batches()` are for the loop or the recipe, in a fork; `tried` takes the losses. `tries` says how many there
    were."""

    def __init__(
        self, tried: LossTrial, spaces: Callable[[], Iterable[tuple[str, Any]]], settings: OptimizerSettings | None
    ) -> None:
        """`spaces`: as `kept.KeptNames` takes them. `settings`: of a loop, which is given its step."""
        given = tried.inputs
        self._ids = applied.list_first(given)
        self.inputs = replace(given, chosen=self._ids)
        self._tried, self._settings = tried, settings
        self._code = "the recipe" if settings is None else "the loop"
        self._total = max(given.total_steps, given.hidden_steps)
        self._memory = kept.KeptNames(given.model, spaces)
        self._shown: list[tuple[kept.Shown, list[float]]] = []
        self._passes, self._given, self._show_s = False, 0, 0.0
        self._begun: list[bool] = []
        self._modes, self._next, self._odd = modes.LeftModes(given.model), False, False
        self.tries = 0

    def answer(self) -> dict[str, Any]:
        """A fault is raised."""
        return {"tries": self.tries}

    def accept(self, answer: dict[str, Any]) -> None:
        self.tries = answer["tries"]

    def batches(self) -> Batches:
        """Raises UsageError if the first records have another loss, or other numbers of the optimizer, afterwards."""
        self._tried.after = self._take
        applied.spare_files()
        spare_programs()
        batch = self.inputs.reader.read(self._ids, epoch=0)
        for _ in range(2):
            began = time.process_time()
            yield from self._show(batch)
            self._memory.look()
        self._show_s = time.process_time() - began
        if self._find_other(self._shown[0]):
            return  # other trials decide
        own, self._begun = {place.name for place in self._memory.list_changed()}, self._read_modes()
        stages = [None, Outputs(self.inputs.model)]
        for outputs in stages if self._show_s < MOST_S / 4 else stages[1:]:
            with nullcontext() if outputs is None else outputs.replay():
                yield from self._hand_out(batch, outputs, own)
            if self.tries >= min(self._total, ENOUGH):
                return

    def _hand_out(self, batch: Batch, outputs: Outputs | None, own: set[str]) -> Batches:
        """Batches until there have been as many as there are steps, or no time or memory is left. What they have
        changed is looked at after the last, and after 1, 2, 4, ... where looking takes a small part of the time."""
        began, clock = time.process_time(), time.monotonic()
        process, weights = psutil.Process(), [copies.glance(value) for value in copies.list_weights(self.inputs.model)]
        most, number, look_at, ends = process.memory_info().rss + MOST_BYTES, 0, 1, False
        while not ends:
            self._passes = True
            with model_traits.restore_buffers(self.inputs.model):
                while number < look_at and not ends:
                    if outputs is not None:
                        outputs.begin()
                    yield from self._one(batch, number)
                    number += 1
                    ends = number == self._total or time.process_time() - began > MOST_S
                    ends |= time.monotonic() - clock > 2 * MOST_S
                    ends |= not number % LOOK_EACH and process.memory_info().rss > most
            self._passes, look_at = False, 2 * look_at
            if not copies.are_equal(weights, copies.list_weights(self.inputs.model)):
                raise self._refuse_changed_weights()
            if not ends and time.process_time() - began < 4 * self._show_s:
                continue
            if self._settings and self._modes.are_left():
                yield from self._try_next(batch, number)
            with nullcontext() if outputs is None else outputs.close():
                yield from self._show(batch)
            if what := self._find_other(self._shown[1]):
                raise self._refuse(what, own)
            self.tries = max(self.tries, number)

    def _try_next(self, batch: Batch, step: int) -> Batches:
        """As that of `applied.AppliedTrial`; not where the last batch was computed in such modes itself."""
        if self._odd:
            return
        if step >= self._total:
            self._modes.reset()
            return
        self._passes = self._next = True
        with model_traits.restore_buffers(self.inputs.model):
            yield from self._one(batch, step)
        self._passes = self._next = False

    def _one(self, batch: Batch, step: int) -> Batches:
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        inputs, labels = copy.deepcopy((batch.inputs, batch.labels))  # a loop may write into its batch
        shown, self._given = step if self._settings else 0, self._given + 1
        with eager:
            yield StepBatch(inputs=inputs, labels=labels, records=self._ids, step=shown, weight=1.0, trial=True)

    def _show(self, batch: Batch) -> Batches:
        given = self.inputs
        with model_traits.restore_buffers(given.model), seeding.preserve_generators():
            seeding.seed_all(given.seed, 0, 0)
            yield from self._one(batch, choose_late(given.total_steps))
        if self._shown:
            self._shown[-1][1].extend(self._settings.values() if self._settings else ())

    def _take(self, loss: torch.Tensor) -> bool:
        self._odd = self._modes.are_left()
        if not self._passes:
            self._shown.append((self._tried.show(loss), []))
        return not self._next

    def _find_other(self, before: tuple[kept.Shown, list[float]]) -> str:
        """What the last batch that was looked at shows otherwise than `before`, in words; empty: nothing."""
        shown, numbers = self._shown[-1]
        if not kept.is_same(before[0], shown):
            return kept.compare(before[0], shown)
        return "" if numbers == before[1] else f"the optimizer's numbers are {numbers} instead of {before[1]}"

    def _refuse_changed_weights(self) -> UsageError:
        return UsageError(
            f"within {self._given} batches {self._code} changes parameters itself",
            hint=f"{JOINS}: do it in the step() of an optimizer of your own",
        )

    def _refuse(self, what: str, own: set[str]) -> UsageError:
        self._memory.look()
        changed = [place.name for place in self._memory.list_changed() if place.name not in own]
        names = f" ({', '.join(changed[:3])})" if changed else ""
        count = "batch.step" if self._settings else "a buffer of the model that counts (self.register_buffer)"
        hint = f"{JOINS}: compute it in each batch from {count}, or keep it in a buffer of the model"
        if (now := self._read_modes()) != self._begun:
            names, hint = f": {modes.describe_left(self.inputs.model, now, self._begun)}", modes.HINT
        return UsageError(
            f"within {self._given} batches {self._code} changes something that later batches use{names}; after them "
            f"{what}, with equal seeds and parameters",
            hint=hint,
        )

    def _read_modes(self) -> list[bool]:
        return [part.training for part in self.inputs.model.modules()]


class Outputs:
    """What the modules that code calls in one batch have returned, which later batches get instead."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = {id(part) for part in model.modules()}
        self._kept: list[tuple[int, Any]] = []
        self._at, self._depth, self._open = 0, 0, True

    def begin(self) -> None:
        """Begins a batch."""
        self._at = 0

    @contextmanager
    def close(self) -> Iterator[None]:
        """Modules compute while the block runs."""
        self._open = False
        try:
            yield
        finally:
            self._open = True

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Modules of the model return, while the block runs, what the same call of the first batch has returned."""
        usual = torch.nn.Module.__call__

        def call(part: torch.nn.Module, *given: Any, **named: Any) -> Any:
            if not self._open or self._depth or id(part) not in self._own:
                return usual(part, *given, **named)
            at, self._at = self._at, self._at + 1
            if at == len(self._kept):
                self._depth += 1
                try:
                    self._kept.append((id(part), usual(part, *given, **named)))
                finally:
                    self._depth -= 1
            key, found = self._kept[at]
            return tree_map(_copy, found) if key == id(part) else usual(part, *given, **named)

        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.nn.Module.__call__ = usual  # type: ignore[method-assign]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
