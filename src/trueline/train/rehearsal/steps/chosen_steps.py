"""Tries a loop at the steps that its code names: at each hundredth one it may change what later batches use.

A worker that joins later has not seen such a step. So the loop gets a batch whose step notes what it is compared with
(`traced_step.py`), then one of each of these steps, and after each of them the first records again at the usual step,
which have to have the loss and to leave the optimizer's numbers that they had before.

This happens in a fork of its own, since other trials may have met such a step; files that the loop's code opens for
writing are /dev/null there, and a program that it starts ends the fork, and so the trial.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from trueline.errors import UsageError
from trueline.train.rehearsal import applied, kept, modes, places
from trueline.train.rehearsal.steps.traced_step import StepNotes
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.plan import choose_late
from trueline.train.step.trial import LossTrial

MOST_STEPS, MOST_S = 32, 4.0
"""Steps that are tried, and the processor time after which none begins."""


class ChosenStepsTrial:
    """`batches()` are for the loop, in a fork; `done` says whether it gave an answer. `tried` has accepted its own."""

    def __init__(self, tried: LossTrial, settings: OptimizerSettings) -> None:
        self.inputs = replace(tried.inputs, chosen=applied.list_first(tried.inputs))
        self._tried, self._settings = tried, settings
        self.done = False

    def answer(self) -> dict[str, Any]:
        """Nothing: a fault is raised."""
        return {}

    def accept(self, answer: dict[str, Any]) -> None:
        self.done = not answer

    def batches(self) -> Generator[StepBatch, None, None]:
        """Raises UsageError for the first step that changes what others use."""
        ids, total = self.inputs.chosen, self.inputs.total_steps
        until, late, notes = time.process_time() + MOST_S, choose_late(total), StepNotes(total)
        trial = applied.AppliedTrial(self._tried, self._settings)
        memory = kept.KeptNames(self.inputs.model, places.list_caller_spaces)
        self._tried.after = trial.take
        applied.spare_files()
        _spare_programs()
        for step in (notes.trace(late), late, late):  # the trial compares the third with the first
            yield from trial.take_one(ids, step)
            memory.look()
        if len(trial.taken) < 3 or trial.fault is not None:
            return  # other trials decide, of the loop as it begins
        usual, ended, begun = trial.taken[2][0], trial.ended[2], self._read_modes()
        own = {place.name for place in memory.list_changed()}
        for step in notes.choose(MOST_STEPS):
            if time.process_time() > until:
                break
            yield from trial.take_one(ids, notes.trace(step))
            yield from trial.take_one(ids, late)
            trial.note(trial.compare_rules(ended, trial.ended[-1], f"a batch of step {step}"))
            if not kept.is_same(usual, trial.taken[-1][0]):
                memory.look()
                changed = [place.name for place in memory.list_changed() if place.name not in own]
                trial.note(self._refuse(step, changed, kept.compare(usual, trial.taken[-1][0]), begun))
            if trial.fault is not None:
                raise trial.fault

    def _refuse(self, step: int, changed: list[str], what: str, begun: list[bool]) -> UsageError:
        names, hint = f" ({', '.join(changed[:3])})" if changed else "", "or keep it in a buffer of the model"
        hint = f"{applied.JOINS}: compute it from batch.step in each batch, {hint}"
        if (now := self._read_modes()) != begun:
            names, hint = f": {modes.describe_left(self.inputs.model, now, begun)}", modes.HINT
        return UsageError(
            f"in step {step} the loop changes something that later batches use{names}; after a batch of that step "
            f"{what}, with equal seeds and parameters",
            hint=hint,
        )

    def _read_modes(self) -> list[bool]:
        return [part.training for part in self.inputs.model.modules()]


def _spare_programs() -> None:
    """Makes this process, a fork, end where it would start a program, which may upload or remove something."""

    def end(*_: Any, **__: Any) -> Any:
        os._exit(0)

    subprocess.Popen.__init__ = os.system = os.posix_spawn = end  # type: ignore[method-assign]
