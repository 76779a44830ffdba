"""Whether some records have the same loss in a process that has computed others before as in one that has not.

A worker that joins begins with empty caches. What a loop remembers of a record that it has seen (a target, noise that
was drawn for it, a history of its losses), of its first batch (a mean, a projection), or of the weights that it had
then, need not have a name. So a fork of its own computes the records first of all, at other parameters and seeds; the
trial computes them after others, as they are and then at those parameters and seeds. The fork also has another time,
other entropy, another name and files of its own (`elsewhere.py`), as a worker that joins may have.
Of what the loop reads among these there are then many other values, as a branch may be rare (`os.urandom(1)[0] > 250`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trueline.data.loading import seeding
from trueline.errors import UsageError
from trueline.train import dynamo
from trueline.train.rehearsal import copies, elsewhere, kept, pretence
from trueline.train.step import model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.parts import no_tensor
from trueline.train.step.plan import Ints, choose_late
from trueline.train.step.trial import LossTrial, TrialInputs

RECORDS = 3
MOST_BYTES = 64 << 20
"""Of a model whose parameters get gradients for a batch."""
LEAST_OTHERS = 3
"""Other values of what the loop reads, however long they take."""
OTHERS = {pretence.TIME: (64, 1.0), pretence.ENTROPY: (320, 2.5), pretence.PROCESS: (64, 1.0), pretence.HOST: (5, 0.25)}
"""By kind the most other values, and for how many seconds of the processor they are tried."""
_HINTS = {
    pretence.HOST: "leave it out: job.step(loss) sums over the workers; a loss needs no rank and no number of them. "
    "What one worker alone prints is under `if job.leads:`"
}
MANY, TOGETHER, MANY_S = 512, 64, 0.2
"""Records, as few of them may meet a branch, with two values of each kind: in all, in a batch, and for how long."""
Batches = Generator[StepBatch, None, None]


class FreshTrial:
    """`batches()` in a fork that has computed nothing, and `expect_same()` where something was; each batch is followed
    by a call of `take`. `belong_to` gives it the trial that takes the losses."""

    def __init__(self, given: TrialInputs, spaces: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        ids = np.unique(np.linspace(0, given.num_records - 1, RECORDS + 1).astype(np.int64))[-RECORDS:]
        self.inputs, self._spaces = replace(given, chosen=ids), spaces
        self._tried: LossTrial
        self._taken: list[list[float]] = []
        self._fresh: list[float] = []
        self._read: list[str] = []
        """What the loop has asked for of that which follows from no record and no seed."""

    def belong_to(self, tried: LossTrial) -> LossTrial:
        """Makes `tried` compare what it has computed with the fork's."""
        self._tried, tried.expect_same = tried, self.expect_same
        return tried

    def batches(self) -> Batches:
        before, self._tried.after = self._tried.after, self.take
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        try:
            with seeding.preserve_generators(), eager, elsewhere.pretend(self._spaces()) as other:
                yield from self._show(1)
                if other.refusal is not None:
                    raise other.refusal
                self._read = [kind for kind in pretence.KINDS if kind in other.read]
        finally:
            self._tried.after = before

    def answer(self) -> dict[str, Any]:
        return {"shown": self._taken[-1], "read": self._read}

    def accept(self, answer: dict[str, Any]) -> None:
        self._fresh, self._read = answer["shown"], answer["read"]

    def take(self, loss: torch.Tensor) -> bool:
        self._taken.append(self._tried.show(loss))
        return False

    def expect_same(self, reader: Any) -> Batches:
        """The batches in the process of the trial. Raises UsageError if a loss is another than in the fork."""
        if not self._fresh:
            return
        self.inputs = replace(self.inputs, reader=reader)
        before, self._tried.after, threads = self._tried.after, self.take, torch.get_num_threads()
        torch.set_num_threads(1)  # as in the fork: with others sums are rounded otherwise
        try:
            for number in range(2):
                yield from self._show(number)
            yield from self._compare_with_fork()
            yield from self._expect_no_rare_use()
            yield from self._expect_no_use_of_gradients()
            self._tried.leads = False
            yield from self._show(1, weight=0.25, last=False)
            self._compare_shares()
        finally:
            self._tried.after, self._tried.leads = before, True
            torch.set_num_threads(threads)

    def _compare_with_fork(self) -> Batches:
        usual = self._taken[-1]
        if kept.is_same(self._fresh, usual):
            return
        yield from self._show(1)
        for kind in pretence.KINDS if kept.is_same(usual, self._taken[-1]) else ():  # else it drifts by itself
            with elsewhere.pretend(self._spaces(), [kind]):
                yield from self._show(1)
            self._expect_other_alike(kind, usual)
        raise UsageError(
            f"once other batches were computed, {kept.compare(self._fresh, usual)}, with equal seeds and parameters: "
            "it uses something that is kept from one batch to the next, such as a cache by record, what was made of "
            "the first batch, or a file that it has written; or the number of its process",
            hint="a worker that joins receives model, optimizer and scheduler, and nothing that Python code has "
            "kept: compute it before the loop, in all workers alike, keep it in a buffer of the model "
            "(self.register_buffer), or leave it out",
        )

    def _expect_no_rare_use(self) -> Batches:
        """Of each kind that the loop reads many other values: a branch that few of them take is found with its kind."""
        usual, now = self._taken[-1], time.process_time  # others may load the host
        for kind in self._read:
            most, seconds = OTHERS[kind]
            until = now() + seconds
            with elsewhere.pretend(self._spaces(), [kind]) as other:
                for number in range(1, 1 + most):
                    if number > LEAST_OTHERS and now() > until:
                        break
                    other.choose(number)
                    yield from self._show(1)
                    self._expect_other_alike(kind, usual)
                    del self._taken[-1]
                yield from self._expect_no_use_for_few_records(kind, other)

    def _expect_no_use_for_few_records(self, kind: str, other: pretence.Pretence) -> Batches:
        until = time.process_time() + MANY_S
        ids = np.random.default_rng(2).permutation(self.inputs.num_records)[:MANY]
        for some in np.array_split(ids, max(1, len(ids) // min(TOGETHER, self.inputs.most))):
            if time.process_time() > until or not self._reads(some):
                return
            for number in (1, pretence.DIGESTS):
                other.choose(number)
                yield from self._show(1, ids=some)
            self._expect_other_alike(kind, self._taken[-2])
            del self._taken[-2:]

    def _reads(self, ids: Ints) -> bool:
        try:
            self.inputs.reader.read(ids, epoch=0)
        except Exception:  # noqa: BLE001  a damaged record may raise anything; its step finds it
            return False
        return True

    def _expect_other_alike(self, kind: str, usual: list[float]) -> None:
        if not kept.is_same(usual, self._taken[-1]):
            raise UsageError(
                f"the loss follows from {kind}: with another one {kept.compare(usual, self._taken[-1])}, with "
                "equal seeds and parameters, so each worker would train for another loss",
                hint=_HINTS.get(kind, "draw from the global generators of torch, numpy or random, which each batch "
                "seeds, and count with batch.step"),
            )  # fmt: skip

    def _expect_no_use_of_gradients(self) -> Batches:
        """A loop finds none: `job.step` takes those of a step away."""
        values = [value for value in self.inputs.model.parameters() if value.requires_grad]
        if sum(value.nbytes for value in values) > MOST_BYTES:
            return
        yield from self._show(1)
        held = [value.grad for value in values]
        try:
            for value in values:
                value.grad = torch.full_like(value, 0.5, requires_grad=False)
            yield from self._show(1)
        finally:
            for value, grad in zip(values, held, strict=True):
                value.grad = grad
        if not kept.is_same(*self._taken[-2:]):
            raise UsageError(
                "the loss uses the gradients of the parameters (.grad), which job.step(loss) takes away after a step: "
                f"with others {kept.compare(*self._taken[-2:])}",
                hint="keep what it needs of them in the state of an optimizer of your own, or in a buffer of the model",
            )

    def _compare_shares(self) -> None:
        if not kept.is_same(*self._taken[-2:]):
            raise UsageError(
                f"in a worker that does not lead, with a part of the step, {kept.compare(*self._taken[-2:])}, with "
                "equal seeds and parameters: it uses batch.weight, batch.last or job.leads, so training would depend "
                "on how a step is shared",
                hint="compute the loss of the batch alone; the job weighs it by its records",
            )

    def _show(self, number: int, *, weight: float = 1.0, last: bool = True, ids: Ints | None = None) -> Batches:
        """The records with the seed `number`: of 0 with the parameters as they are, else with others."""
        given, count = self.inputs, len(self._taken)
        ids = given.chosen if ids is None else ids
        assert ids is not None
        batch, step = given.reader.read(ids, epoch=0), choose_late(given.total_steps)
        with model_traits.restore_buffers(given.model), copies.nudge(given.model, number):
            seeding.seed_all(given.seed, 0, number)
            yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=step, weight=weight, last=last,
                            trial=True)  # fmt: skip
        if len(self._taken) == count:
            raise no_tensor.refuse_no_step()
