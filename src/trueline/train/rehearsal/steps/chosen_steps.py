"""Tries a loop at the steps that its code names: at each hundredth one it may change what later batches use.

A worker that joins later has not seen such a step. So the loop gets a batch whose step notes what it is compared with
(`traced_step.py`), then one of each of these steps, and after each of them the first records again at the usual step,
which have to have the loss and to leave the optimizer's numbers that they had before. A count that the loop keeps
itself is noted in the same way; that of `enumerate`, which shows nothing, has numbers with many divisors. Where the
code looks at a number of its batch (`if loss.item() < 0.5`), a batch has other numbers there; and after the answer,
since code may raise then, one that is not finite, or tensors of which it asks that (`torch.isnan`).

This happens in a fork of its own, since other trials may have met such a step; files that the loop's code opens for
writing are /dev/null there, and a program that it starts ends the fork, and so the trial.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trueline.errors import UsageError
from trueline.train import dynamo
from trueline.train.rehearsal import applied, kept, modes, places
from trueline.train.rehearsal.steps.constants import list_constants
from trueline.train.rehearsal.steps.counts import CountedNumber, describe, list_counts
from trueline.train.rehearsal.steps.traced_step import StepNotes
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.parts.still import LOOKS
from trueline.train.step.plan import choose_late
from trueline.train.step.trial import LossTrial

MOST_STEPS, MOST_S = 32, 4.0
"""Steps that are tried, and the processor time after which none begins."""
FACTORS = 0.0, 1e3
"""Of the numbers that code looks at."""
Batches = Generator[StepBatch, None, None]


class OtherNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes single numbers of tensors that code looks at `factor` times as large; `seen` counts them, and `asked` those
    and tensors of any size of which code asks whether they are finite, which follow a factor that is not. `compared`
    are the numbers with which single ones are compared, or by which they are divided for a remainder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.factor, self.seen, self.asked, self._open = 1.0, 0, 0, True
        self.compared: dict[int, None] = {}

    @contextmanager
    def close(self) -> Iterator[None]:
        """In this block nothing is seen."""
        self._open = False
        try:
            yield
        finally:
            self._open = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._open and func.overloadpacket in _COMPARE and _is_count(args):
            self.compared[math.floor(args[1])] = None
        looked = self._open and func.overloadpacket in LOOKS and _is_single(args[0])
        asked = looked or (self._open and _asks_if_finite(func.overloadpacket, args))
        self.seen, self.asked = self.seen + looked, self.asked + asked
        if self.factor != 1.0 and (looked or (asked and not math.isfinite(self.factor))):
            other = args[0].detach() * self.factor
            args = [other if one is args[0] else one for one in args]
        return func(*args, **(kwargs or {}))


_COMPARE = {getattr(torch.ops.aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder")}


def _is_count(args: Any) -> bool:
    number = args[1] if len(args) > 1 else None
    single = isinstance(args[0], torch.Tensor) and args[0].numel() == 1
    return single and isinstance(number, int | float) and math.isfinite(number)


def _asks_if_finite(operator: Any, args: Any) -> bool:
    """`torch.isfinite(x)` compares `x` with itself and its size with infinity."""
    aten, first = torch.ops.aten, args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return False
    other = args[1] if len(args) > 1 else None
    with_itself = other is first or (isinstance(other, float) and math.isinf(other))
    return operator in (aten.isnan, aten.isinf) or (operator in (aten.eq, aten.ne) and with_itself)


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


class ChosenStepsTrial:
    """`batches()` are for the loop, in a fork; `tried` has accepted its own."""

    _trial: applied.AppliedTrial
    _until: float
    _usual: kept.Shown
    _ended: list[float]
    _begun: list[bool]
    _own: set[str]
    """Names of what each batch changes."""
    _counts: Sequence[CountedNumber] = ()
    """Those of them that have one number each, and what `enumerate` counts."""

    def __init__(self, tried: LossTrial, settings: OptimizerSettings) -> None:
        self.inputs = replace(tried.inputs, chosen=applied.list_first(tried.inputs))
        self._tried, self._settings = tried, settings
        self._late = choose_late(tried.inputs.total_steps)
        self._memory = kept.KeptNames(tried.inputs.model, places.list_caller_spaces)
        self._enumerates = places.list_enumerates()  # a fork hides what the collector knows
        self._numbers = OtherNumbers()
        self.untried = "it gave no answer"
        """Why something of it was not tried, if anything."""
        self._untried = ""

    def answer(self) -> dict[str, Any]:
        """A fault is raised."""
        return {"untried": self._untried}

    def accept(self, answer: dict[str, Any]) -> None:
        self.untried = answer["untried"]

    def batches(self) -> Batches:
        """Raises UsageError for the first step that changes what others use."""
        self._until, notes = time.process_time() + MOST_S, StepNotes(self.inputs.total_steps)
        self._trial = trial = applied.AppliedTrial(self._tried, self._settings)
        self._tried.after = self._take_loss
        applied.spare_files()
        spare_programs()
        for step in (notes.trace(self._late), self._late, self._late):  # the trial compares the third with the first
            yield from self._take(step)
            self._memory.look()
        if len(trial.taken) < 3 or trial.fault is not None:  # other trials decide, of the loop as it begins
            self._untried = "its steps were not applied" if trial.fault is None else trial.fault.message
            return
        self._usual, self._ended, self._begun = trial.taken[2][0], trial.ended[2], self._read_modes()
        changed = self._memory.list_changed()
        self._own = {place.name for place in changed}
        self._counts = [*(CountedNumber(place, place.value) for place in self._enumerates), *list_counts(self._memory)]
        for step in notes.choose(MOST_STEPS, self._list_keys(notes)):
            yield from self._try(f"in step {step}", notes.trace(step))
        plain = [count for count in self._counts if not count.traced or count.place.name not in self._own]
        for count in self._counts:
            yield from () if count in plain else self._try_traced(count)
        yield from self._try_plain(plain)
        trial.look_again()
        for factor in FACTORS if self._numbers.seen else ():
            self._numbers.factor = factor
            yield from self._try(f"where a number that it looks at is {factor:g} times as large", self._late)

    def further(self) -> Batches:
        """Raises UsageError if a number that is not finite changes what later batches use. The loop may end there."""
        if self._numbers.asked and not self._untried:
            self._numbers.factor = math.nan
            yield from self._try("where a number that it looks at is not finite", self._late)

    def _take(self, step: int, counts: Sequence[CountedNumber] = (), number: Any = None) -> Batches:
        """A batch of the first records, with `number` in `counts`, and in each other count what it had at first."""
        for other in self._counts:
            other.reset()
        for count in counts:
            count.write(number)
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        with eager, self._numbers:
            yield from self._trial.take_one(self.inputs.chosen, step)

    def _take_loss(self, loss: torch.Tensor) -> bool:
        """What is looked at here is not the loop's."""
        with self._numbers.close():
            return self._trial.take(loss)

    def _try_traced(self, count: CountedNumber) -> Batches:
        """A number that the loop changes itself, where it is another by what the code compares it with."""
        notes = StepNotes(self.inputs.total_steps * self.inputs.global_batch)  # it may count records
        self._trial.place = count.place
        yield from self._take(self._late, [count], notes.trace(count.first))
        for number in notes.choose_like(count.first, MOST_STEPS, self._list_keys(notes)):
            yield from self._try(describe([count], number), self._late, [count], notes.trace(number))

    def _try_plain(self, counts: Sequence[CountedNumber]) -> Batches:
        """Numbers that the loop changes itself, and which do not show what they are compared with: all at once."""
        total = self.inputs.total_steps
        near = [number + by for number in self._numbers.compared for by in (-1, 0, 1)][:MOST_STEPS]
        numbers = [*near, *list_constants(places.list_caller_code(), total), *list_round(total)]
        for number in dict.fromkeys(numbers) if counts else ():
            yield from self._try(describe(counts, number), self._late, counts, number)

    def _list_keys(self, notes: StepNotes) -> list[int]:
        """Numbers at which a table of the loop's may have something, if one was looked up in any."""
        code = places.list_caller_code() if notes.looked_up else []
        return list_constants(code, self.inputs.total_steps, keys=True)

    def _try(self, when: str, step: int, counts: Sequence[CountedNumber] = (), number: Any = None) -> Batches:
        """A batch of `step`, with `number` in `counts`, then the usual one. Raises UsageError if that differs."""
        if time.process_time() > self._until:
            self._untried = self._untried or f"no time was left {when}"
            return
        self._trial.place = counts[0].place if counts else None
        yield from self._take(step, counts, number)
        self._numbers.factor = 1.0
        yield from self._take(self._late)
        trial = self._trial
        trial.note(trial.compare_rules(self._ended, trial.ended[-1], f"a batch {when}"))
        if not kept.is_same(self._usual, trial.taken[-1][0]):
            self._memory.look()
            trial.note(self._refuse(when, kept.compare(self._usual, trial.taken[-1][0])))
        if trial.fault is not None:
            raise trial.fault

    def _refuse(self, when: str, what: str) -> UsageError:
        changed = [place.name for place in self._memory.list_changed() if place.name not in self._own]
        names = f" ({', '.join(changed[:3])})" if changed else ""
        hint = f"{applied.JOINS}: compute it from batch.step in each batch, or keep it in a buffer of the model"
        if (now := self._read_modes()) != self._begun:
            names, hint = f": {modes.describe_left(self.inputs.model, now, self._begun)}", modes.HINT
        return UsageError(
            f"{when} the loop changes something that later batches use{names}; after such a batch {what}, with equal "
            "seeds and parameters",
            hint=hint,
        )

    def _read_modes(self) -> list[bool]:
        return [part.training for part in self.inputs.model.modules()]


def list_round(total: int) -> list[int]:
    """Numbers below `total` of which many a count is a multiple, and those before them.

    >>> list_round(1001)
    [1000, 999, 840, 839, 600, 599, 720, 719, 960, 959, 984, 983, 994, 993]
    """
    if total <= MOST_STEPS:
        return list(range(total))
    largest = [(total - 1) // by * by for by in (63_000, 5_040, 1_000, 840, 600, 360, 240, 120, 100, 60, 24, 7)]
    return list(dict.fromkeys(at for number in largest if number for at in (number, number - 1)))


def spare_programs() -> None:
    """Makes this process, a fork, end where it would start a program, which may upload or remove something."""

    def end(*_: Any, **__: Any) -> Any:
        os._exit(0)

    subprocess.Popen.__init__ = os.system = os.posix_spawn = end  # type: ignore[method-assign]
