"""What the forwards of a trial add to a model's buffers: of a batch it has to be the mean of that of its parts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from trueline.errors import UsageError
from trueline.parallel.finite import find_infinite
from trueline.train.step import model_traits, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts.late_steps import PartsTrial
from trueline.train.step.parts.still import unsettle
from trueline.train.step.plan import Ints, choose_late

FEW, NUDGE = 5, 1.01
"""Records of a batch that shows whether a forward changes more, and by how much parameters are larger meanwhile."""


@dataclass(frozen=True, slots=True)
class BufferChanges:
    """`changes`: what a whole batch adds to each buffer, then what its parts do, two for each way to cut it."""

    model: torch.nn.Module
    names: set[str]
    changes: Sequence[dict[str, torch.Tensor]]

    def confirm(self, shares: Sequence[float], tolerance: float, *, refuses: bool) -> bool:
        """Whether the changes by the whole are the means of those by its parts, which are these `shares` of its
        records. Raises UsageError if they are not and the trial `refuses`."""
        self._expect_finite()
        name, off = "", 0.0
        for at in range(1, len(shares), 2):
            for buffer in sorted(self.names):
                whole, *parts = (
                    changes.get(buffer, torch.zeros(())) for changes in (self.changes[0], *self.changes[at : at + 2])
                )
                mean = shares[at - 1] * parts[0] + shares[at] * parts[1]
                scale = max(float(whole.norm()), float(mean.norm()))
                found = float((whole - mean).norm()) / scale if scale else 0.0
                name, off = (buffer, found) if found > off else (name, off)
        if off > tolerance and refuses:
            raise UsageError(
                f"a forward changes the model's buffer '{name}', by all the records of a batch otherwise than by the "
                f"mean of its parts ({reduction.as_percent(off)} off), so training depends on how a step is shared",
                hint='change it by a mean over the records, as running statistics are, or set reduction = "mean" and '
                "micro_batch = N: each shard of N records then changes it, and the changes are averaged",
            )
        return off <= tolerance

    def constant(self) -> dict[str, torch.Tensor]:
        """The changes that do not depend on the records: those of counters."""
        first = self.changes[0] if self.changes else {}
        return {
            name: change for name, change in first.items()
            if all(name in other and torch.equal(other[name], change) for other in self.changes)
        }  # fmt: skip

    def _expect_finite(self) -> None:
        """What is infinite and moves has no mean over the workers."""
        name = find_infinite(pair for pair in self.model.named_buffers() if pair[0] in self.names)
        if name:
            raise UsageError(
                f"a forward changes the model's buffer '{name}', which begins with a number that is not finite: what "
                "the workers add to it has no mean",
                hint="let it begin with a large number, such as torch.finfo(dtype).max, or keep it constant",
            )


def find_followers(
    trial: PartsTrial, names: set[str], changes: list[dict[str, torch.Tensor]], ids: Ints
) -> Generator[StepBatch, None, None]:
    """Adds to `names` the buffers that a forward changes once the parameters have moved: a teacher begins as what it
    follows, and the first averages change nothing. `changes` are then those of `ids` and their parts."""
    given = trial.inputs
    slots = [slot for kind in (True, False) for slot in model_traits.buffer_slots(given.model, persistent=kind)]
    known, before = set(names), list(changes)
    if known.issuperset(slot.name for slot in slots):
        return
    with unsettle(given.model, NUDGE):
        for step in dict.fromkeys((given.step, choose_late(max(given.total_steps, given.hidden_steps)))):
            yield from trial.each_part(ids[:FEW], step=step, cuts=0)
            changes.clear()
            if names != known:
                yield from trial.each_part(ids, step=step)
                return
    changes.extend(before)
