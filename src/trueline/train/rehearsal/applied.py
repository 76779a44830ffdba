"""Tries what a loop does after a step that was applied: three batches for which `job.step` returns True.

A worker that joins receives model, optimizer and scheduler, and nothing else that a loop keeps: averages of weights, a
second model, counters. So after a batch parameters have to be as they were, as have other models and lists of weights.
The third batch is the first one again, and has to have the same loss and the same settings; so have more batches, in
which counters and lists that the loop changes have other values (`kept.py`). Between a loss and the end
of the loop's body parameters have odd values (`WILD`), so that a clamp, a norm or an average shows.

This happens in a fork that ends afterwards: files that the loop's code opens for writing are /dev/null there.
"""

from __future__ import annotations

import builtins
import gc
import io
import math
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from trueline import events
from trueline.data.loading import seeding
from trueline.errors import UsageError
from trueline.train.rehearsal import copies, kept, modes, places
from trueline.train.step import model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.plan import choose_late
from trueline.train.step.trial import FEW, LossTrial, TrialInputs

WILD, SEEN = 1e3, copies.SEEN
"""The parameters' values meanwhile, with either sign, and how many elements of a tensor have them or are compared."""
JOINS = "a worker that joins receives model, optimizer and scheduler, and repeats no line of the loop"
_AVERAGE = "Options(ema=0.999) averages the weights, in all workers and in checkpoints"
_SCHEDULE = f"{JOINS}: give the scheduler to Elastic(scheduler=...), or compute them from batch.step"


def list_first(inputs: TrialInputs) -> Any:
    """The first records of the data, a few: not as many as the model has parameters, or labels look like a copy."""
    count = min(FEW, inputs.num_records, inputs.global_batch)
    total = sum(value.numel() for value in inputs.model.parameters() if value.requires_grad)
    return np.arange(count - (count == total > 1), dtype=np.int64)


@contextmanager
def _vary_weights(model: torch.nn.Module) -> Iterator[None]:
    """Other values, and signs, of the weights that are trained, while the block runs."""
    trained = [value for value in copies.list_weights(model) if value.requires_grad]
    before = [copies.glance(value) for value in trained]
    with torch.no_grad():
        for value, part in zip(trained, before, strict=True):
            value.view(-1)[:SEEN].copy_(0.5 - 2 * part)
    try:
        yield
    finally:
        with torch.no_grad():
            for value, part in zip(trained, before, strict=True):
                value.view(-1)[:SEEN].copy_(part)


class AppliedTrial:
    """`batches()` are for the loop, each followed by a call of `take`; `fault` is then what was found, if anything."""

    def __init__(self, tried: LossTrial, settings: OptimizerSettings) -> None:
        self._tried, self._inputs, self._tolerance, self._settings = tried, tried.inputs, tried.tolerance, settings
        self.fault: UsageError | None = None
        self._model = tried.inputs.model
        self.taken: list[tuple[kept.Shown, list[float]]] = []
        self.ended: list[list[float]] = []
        """The optimizer's numbers at the ends of these batches."""
        self._before: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._wild: list[torch.Tensor] = []
        self._memory = kept.KeptNames(self._model, places.list_caller_spaces)
        self._memory.begin()
        self._copies = copies.Copies(self._model, self._memory)
        self._strange: list[torch.Tensor] = []
        """Tensors that the loss trains and the model does not have."""
        self.place: places.KeptPlace | None = None
        """What has another value in this batch; copies of the weights are not looked for then."""
        self._counts = places.list_enumerates()
        self._modes, self._next, self._odd = modes.LeftModes(self._model), False, False

    def expect_one_rule(self, batches: Generator[StepBatch, None, None]) -> Generator[StepBatch, None, None]:
        """Batches before these, in which no step is applied. Raises UsageError if the optimizer's numbers are others in
        the first of the same step: a warmup by a count of the loop's own may be over by the late ones."""
        first: tuple[int, list[float]] | None = None
        begins = True
        for batch in batches:
            yield batch
            found = batch.step, self._settings.values()
            first = first or found
            begins = begins and found[0] == first[0]
            if begins and (fault := self.compare_rules(first[1], found[1], "another batch")):
                raise fault

    def compare_rules(self, before: list[float], now: list[float], when: str) -> UsageError | None:
        if before == now:
            return None
        return UsageError(
            f"the loop sets the optimizer's numbers (a learning rate) by what it counts or keeps itself: after {when} "
            f"they are {now} instead of {before} for the same step",
            hint=_SCHEDULE,
        )

    def batches(self) -> Generator[StepBatch, None, None]:
        trial, self._tried.after = self._inputs, self.take
        first = list_first(trial)
        other = np.arange(trial.num_records - len(first), trial.num_records)
        step = choose_late(trial.total_steps)
        self.note(self._find_use_in_reading(first))
        for ids, times in ((first, 0), (other, 1), (first, 0)):
            with copies.nudge(self._model, times):
                yield from self.take_one(ids, step)
            if ids is first:
                self._memory.look()
        self.note(self._find_rule_of_losses())
        for place, changed in self._memory.list_changes() if self.fault is None else ():
            with changed:
                self.place = place
                yield from self.take_one(first, step)
                self._find_use(place)
        for place in self._counts if self.fault is None else ():
            for number in (0, trial.total_steps - 1):  # not beyond: a list of the loop's may have an end
                place.put(number)
                self.place = place
                yield from self.take_one(first, step)
                self._find_use(place)

    def _find_use_in_reading(self, ids: Any) -> UsageError | None:
        """Whether the data read what training changes. Not where they read otherwise each time."""
        known = [copies.glance(value) for value in self._read(ids)]
        if not copies.are_equal(known, self._read(ids)):
            return None
        with self._settings.vary(), _vary_weights(self._inputs.model):
            other = self._read(ids)
        if copies.are_equal(known, other):
            return None
        return UsageError(
            "the dataset, or what puts its records together, reads the model's weights or the optimizer's numbers: "
            "with others the same records are different",
            hint="a worker reads the next batch before a step is applied, and again after a join: compute in the loop, "
            "from batch.inputs, what depends on them",
        )

    def _read(self, ids: Any) -> list[torch.Tensor]:
        batch = self._inputs.reader.read(ids, epoch=0)
        leaves = pytree.tree_leaves((batch.inputs, batch.labels))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def take_one(self, ids: Any, step: int) -> Generator[StepBatch, None, None]:
        trial = self._inputs
        batch = trial.reader.read(ids, epoch=0)
        with model_traits.restore_buffers(self._model):
            seeding.seed_all(trial.seed, 0, 0)
            self._wild = []
            yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=step, weight=1.0, trial=True)
            self._compare()
            if self._modes.are_left() and not self._odd:
                yield from self._try_next(ids, step + 1)

    def _try_next(self, ids: Any, step: int) -> Generator[StepBatch, None, None]:
        """The batch of `step`, which may set the modes that were left behind; none comes after the last."""
        if step >= self._inputs.total_steps:
            self._modes.reset()
            return
        batch, self._next = self._inputs.reader.read(ids, epoch=0), True
        yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=step, weight=1.0, trial=True)
        self._next = False

    def take(self, loss: torch.Tensor) -> bool:
        """Takes the loss of the last batch, and gives the parameters other values."""
        if self._next:
            return False  # what the loop does after a step is none of this batch
        self._odd = self._modes.are_left()
        if self.ended and self.place is None:
            self.note(self._find_copies("before job.step(loss)"))
        self.taken.append((self._tried.show(loss), self._settings.values()))
        if len(self.taken) == 3:
            self.note(self._find_memory(*self.taken[0], *self.taken[2]))
        self._before = [copies.glance(value) for value in self._parameters()]
        wild = WILD * (1 + 0.1 * len(self.taken))  # others each time: the average of one value is that value
        for value in self._parameters():
            flat = value.detach().view(-1)[:SEEN]
            signs = torch.arange(len(flat), device=flat.device) % 3 - 1
            flat.copy_(signs * wild + torch.linspace(0.5, 1.0, len(flat), device=flat.device))
        self._run_hooks()
        self._wild = [copies.glance(value) for value in self._parameters()]
        self._buffers = [copies.glance(value) for value in self._model.buffers()]
        self._strange = [value for value in copies.list_strange(loss, self._model) if value.grad is None]
        for value in self._strange:
            value.grad = torch.ones_like(value)  # as the backward of a step leaves it
        if self.place is None:
            self._copies.look(self._strange)
        return True

    def _run_hooks(self) -> None:
        """Calls the optimizer's hooks, which may change parameters and buffers, and what they keep in no state."""
        if self.place is not None:
            return
        self._copies.look(self._strange)
        try:
            self._settings.run_hooks()
        except Exception as error:  # noqa: BLE001  a user's code may raise anything; the first step shows it
            events.emit("loop.untried", why=f"a hook of the optimizer: {type(error).__name__}: {error}")
            return
        if len(self.taken) > 1:  # what the first step has made is known then
            self.note(self._find_copies("in a hook of the optimizer"))

    def _parameters(self) -> Iterator[torch.Tensor]:
        return copies.list_weights(self._model)

    def look_again(self) -> None:
        """What batches with another value in `place` have changed is what the loop keeps from here on."""
        self.place = None
        self._copies.look(self._strange)

    def note(self, fault: UsageError | None) -> None:
        self.fault = self.fault or fault

    def _compare(self) -> None:
        if not self._wild:
            return
        if not copies.are_equal(self._wild, self._parameters()):
            self.note(UsageError(
                "the loop changes parameters itself after a step that was applied",
                hint=f"{JOINS}: do it in the step() of an optimizer of your own",
            ))  # fmt: skip
        elif not copies.are_equal(self._buffers, self._model.buffers()):
            self.note(UsageError(
                "the loop changes buffers of the model itself after a step that was applied",
                hint=f"{JOINS}, and the step's checkpoint is written before: change them before the batch, by "
                "batch.step, or in a hook of the optimizer (register_step_post_hook)",
            ))  # fmt: skip
        elif self.place is None:
            self.note(self._find_copies("after a step that was applied"))
        self.ended.append(self._settings.values())
        with torch.no_grad():
            for value, before in zip(self._parameters(), self._before, strict=True):
                value.view(-1)[:SEEN].copy_(before)
        for value in self._strange:
            value.grad = None
        if self.place is None:
            self._copies.look(self._strange)

    def _find_copies(self, when: str) -> UsageError | None:
        """What has changed since the last look, beside the model, and is no copy of its weights."""
        what = self._copies.find_changed(in_body=when.startswith("before"))
        if what is None:
            return None
        return UsageError(
            f"{when} the loop changes {what}, which only this worker has",
            hint=f"{JOINS}. {_AVERAGE}; make a second model that is trained a part of the model, with its "
            "optimizer in trueline.JointOptimizer",
        )

    def _find_memory(
        self, loss: kept.Shown, settings: list[float], again: kept.Shown, settings_again: list[float]
    ) -> UsageError | None:
        if settings != settings_again:
            return self.compare_rules(settings, settings_again, "a step that was applied")
        apart = abs(loss[0] - again[0]) > max(self._tolerance / 10, 1e-9) * max(abs(loss[0]), abs(again[0]))
        if math.isfinite(loss[0]) and (apart or not kept.is_same(loss, again)):
            if self._modes.are_left():
                left = modes.describe_left(self._model, *self._modes.compare())
                return UsageError(f"after a step that was applied {left}: {JOINS}", hint=modes.HINT)
            return UsageError(
                f"after a step that was applied {kept.compare(loss, again)}, with equal seeds and parameters: it uses "
                "something that the loop keeps from batch to batch",
                hint=f"{JOINS}: count with batch.step or job.steps, and keep nothing else that the loss uses, or keep "
                "it in a buffer of the model",
            )
        return None

    def _find_rule_of_losses(self) -> UsageError | None:
        """Whether the optimizer's numbers follow from more than the step, which these batches have in common."""
        other = next((one for one in self.ended if one != self.ended[0]), None)
        if other is None:
            return None
        return UsageError(
            "the loop sets the optimizer's numbers (a learning rate) by its losses, or by what it keeps: after a step "
            f"that was applied they are {self.ended[0]}, and {other} after the same step with other records or later",
            hint=_SCHEDULE,
        )

    def _find_use(self, place: places.KeptPlace) -> None:
        """Whether the last batch, with another value in `place`, had another loss or left other numbers behind."""
        usual, found = self.taken[2][0], self.taken[-1][0]
        if not kept.is_same(usual, found):
            self.note(kept.refuse(place, usual, found))
        elif self.ended[2] != self.ended[-1]:
            self.note(UsageError(
                f"the loop sets the optimizer's numbers (a learning rate) by {place.name}, which each batch changes: "
                f"with another value there they are {self.ended[-1]} instead of {self.ended[2]} after the same step",
                hint=_SCHEDULE,
            ))  # fmt: skip


def spare_files() -> None:
    """Makes this process, a fork, write nothing more: files are /dev/null, and what would be sent ends it."""
    plain = builtins.open

    def open_nothing(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        return plain(os.devnull if writes else file, mode.replace("x", "w"), *given, **named)

    def ignore(*_: Any, **__: Any) -> None:
        """Nothing is saved, moved or removed."""

    builtins.open = io.open = open_nothing
    for name in ("replace", "rename", "remove", "unlink", "rmdir"):
        setattr(os, name, ignore)
    torch.save = ignore
    for name in ("safetensors.torch", "safetensors.numpy"):
        if name in sys.modules:
            sys.modules[name].save_file = ignore  # type: ignore[attr-defined]
    sys.modules["socket"].socket.send = sys.modules["socket"].socket.sendall = _end


def _end(*_: Any, **__: Any) -> None:
    os._exit(0)


def check_schedulers(optimizer: torch.optim.Optimizer, given: Any) -> None:
    """Raises UsageError for a scheduler of `optimizer` that is not `given` to the job, or a part of it."""
    known, left = set[int](), [given]
    while left:
        one = left.pop()
        if one is not None:
            known |= {id(one), id(vars(one))}
            left += getattr(one, "_schedulers", [])
    for part in (optimizer, *getattr(optimizer, "parts", ())):
        for holder in gc.get_referrers(part):
            held = holder if type(holder) is dict else getattr(holder, "__dict__", {})
            schedules = issubclass(type(holder), torch.optim.lr_scheduler.LRScheduler) or "last_epoch" in held
            if schedules and held.get("optimizer") is part and not {id(holder), id(held)} & known:
                raise UsageError(
                    "the optimizer has a scheduler that was not given to the job",
                    hint=f"{JOINS}: write Elastic(scheduler=...), which advances it after each step, or drop it and "
                    "set the rate from batch.step",
                )
