"""Tries records that are unlike each other, where the loss's code looks at what it computes.

    if (outputs.argmax(1) == labels).sum().item() > 12:     a count, a list or an array decides, and each worker would
        loss = 2 * loss                                     decide by its own part of a step

A trial sees nothing of it as long as a batch and its parts are on one side of the bound. So a fork computes records
alone, and orders them by their losses and by each number that the code looks at. Both ends of such an order are tried:

    one end beside the other    as the parts of a batch: the bound of a mean lies between them
    one end alone               as many records as a step has, a third of them, a ninth: so does the bound of a count

Then the model is trained with some of the records, and the others are tried at the weights that follow: an accuracy
begins with zero. What is tried are batches of real records, so a loss that is made of its parts passes. Code that
refuses a batch decides nothing.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from trueline.data.source import Batch, Readable
from trueline.errors import UsageError
from trueline.train import dynamo
from trueline.train.rehearsal.double import MOST_BYTES, FurtherTrial
from trueline.train.step import reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.plan import Ints, choose_late
from trueline.train.step.trial import LossTrial, TrialInputs

POOL, FEWEST, TWICE = 16, 6, 2
"""Records that are computed alone, the fewest of them, and how often each is in its batch: code may need two."""
MOST_S = 1.5
"""Processor time of all of it."""
MOST_RECORDS = 256
"""Of a batch of records that are like each other."""
MIXED, ORDERS = 12, 4
"""Records of a batch of both ends, and most orders that are tried."""
TURNS, TRAINED, STRIDE, LEAST = 20, 8, 0.15, 0.05
"""Steps of a training, records of each, how far a step moves a number, relative to the size of its parameter, and the
least such size."""
LEARNT = 0.1
"""Of the first loss: at less the training ends, and smaller losses and gradients are judged by this part of the first
ones, since those of a model that has learnt its records are rounding."""
Batches = Generator[StepBatch, None, None]


class ExtremesTrial(FurtherTrial):
    """Of a loss that reduces as `how` says."""

    def __init__(self, tried: LossTrial, how: str) -> None:
        super().__init__(tried)
        self._how, self._until = how, 0.0
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._first: tuple[float, float] | None = None
        """Loss, and norm of the gradient, of the first batch that was compared."""
        self._values = [value for value in tried.inputs.model.parameters() if value.requires_grad]

    def batches(self) -> Batches:
        tried, given = self._tried, self.inputs
        once = replace(given, reader=RepeatsReader(given.reader))
        tried.inputs, tried.bends, self._until = once, False, time.process_time() + MOST_S
        pool = np.random.default_rng([given.seed % 2**32, 2]).permutation(given.num_records)[:POOL]
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        with eager:
            steps = yield from self._choose_steps(pool)
            for step in steps:
                yield from self._try_ends(pool, step)
            if steps and (yield from self._train(pool[: 2 * TRAINED : 2], steps[0])):
                for step in steps:
                    yield from self._try_ends(pool, step)

    def _choose_steps(self, pool: Ints) -> Generator[StepBatch, None, list[int]]:
        """The step of the trial, and a late one, if the code looks at anything there, and at other things."""
        tried, counts = self._tried, dict[int, int]()
        for step in dict.fromkeys((self.inputs.step, choose_late(self.inputs.total_steps))):
            yield from tried.each_part(pool[:TWICE], step=step, cuts=0)
            counts.setdefault(len(tried.glances[-1]) if tried.glances else 0, step)
        return [step for count, step in counts.items() if count]

    def _try_ends(self, pool: Ints, step: int) -> Batches:
        alone = yield from self._compute_alone(pool, step)
        most = min(self.inputs.most, MOST_RECORDS)
        for number, (low, high) in enumerate(itertools.islice(find_ends(alone), ORDERS)):
            count = min(most, MIXED)
            if not number or not self._is_late():
                yield from self._compare(np.resize(low, count // 3), np.resize(high, count - count // 3), step)
            count = most
            while count > 2 and not self._is_late():
                for end in (low, high):
                    yield from self._compare(np.resize(end, count // 3), np.resize(end, count - count // 3), step)
                count //= 3

    def _compute_alone(self, pool: Ints, step: int) -> Generator[StepBatch, None, dict[int, list[float]]]:
        """Of each record its loss, and all that the code looks at."""
        found, tried = dict[int, list[float]](), self._tried
        for record in pool:
            if self._is_late() and len(found) >= FEWEST:
                break
            yield from tried.each_part(np.repeat(record, TWICE), step=step, cuts=0)
            if tried.is_finite():
                found[int(record)] = [tried.tried[0].loss, *tried.glances[-1]]
        return found

    def _is_late(self) -> bool:
        return time.process_time() > self._until

    def _compare(self, one: Ints, other: Ints, step: int) -> Batches:
        """Raises UsageError if the loss of a third of a batch and two thirds do not make that of the batch."""
        tried = self._tried
        yield from tried.each_part(np.concatenate([one, other]), step=step, cuts=1)
        if not tried.tried or not tried.is_finite():
            return
        self._first = self._first or _measure(tried.tried)
        if _fits(tried.tried, self._how, tried.tolerance, self._first):
            return
        try:
            reduction.confirm(tried.tried, self._how, "auto", tried.tolerance, "with records that are unlike others")
        except UsageError as error:
            raise UsageError(
                f"{error.message}. The code looks at a number, a list, an array or a size that it has computed of its "
                "batch: each worker would decide by its own part of a step",
                hint="decide by batch.step, or record by record with torch.where; or set reduction = "
                '"mean" and micro_batch = N, and it is decided for whole shards of N records',
            ) from error

    def _train(self, ids: Ints, step: int) -> Generator[StepBatch, None, bool]:
        """Steps along the signs of gradients; False if there is no time, or the model is large."""
        tried = self._tried
        if sum(value.nbytes for value in self._values) > MOST_BYTES:
            return False
        with torch.no_grad():
            strides = [STRIDE * max(float(value.float().square().mean().sqrt()), LEAST) for value in self._values]
        for turn in range(TURNS):
            if self._is_late():
                return False
            tried.after = self._note_gradients
            yield from tried.each_part(ids, step=step, cuts=0)
            tried.after = None
            if tried.tried and self._first and abs(tried.tried[0].loss) < LEARNT * self._first[0]:
                return True
            with torch.no_grad():
                for value, grad, stride in zip(self._values, self._gradients, strides, strict=True):
                    if grad is not None and not grad.is_complex():
                        value.sub_(grad.to_dense().sign().to(value.dtype), alpha=stride / (1 + turn / TRAINED))
        return True

    def _note_gradients(self, loss: torch.Tensor) -> bool:
        tried = self._tried
        self._gradients = reduction.compute_gradients(loss.mean(), list(self._values), tried.inputs.model)
        tried.taken = True
        return False


class RepeatsReader:
    """Reads the records of a batch once that it has several times: most of these batches are a few records over and
    over, and reading may take longer than all that is computed of them."""

    def __init__(self, reader: Readable) -> None:
        self._reader = reader

    def read(self, indices: Ints, *, epoch: int) -> Batch:
        """Raises DataError."""
        some, places = np.unique(indices, return_inverse=True)
        if len(some) < len(indices):
            batch = self._reader.read(some, epoch=epoch)
            leaves, form = torch.utils._pytree.tree_flatten((batch.inputs, batch.labels))
            if all(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == len(some) for leaf in leaves):
                at = torch.from_numpy(places.reshape(-1))
                return Batch(*torch.utils._pytree.tree_unflatten([leaf[at] for leaf in leaves], form))
        return self._reader.read(indices, epoch=epoch)


def find_ends(alone: dict[int, list[float]]) -> Iterator[tuple[Ints, Ints]]:
    """The records with the smallest and the largest number, for each order that there is of those computed `alone`.

    >>> [(low.tolist(), high.tolist()) for low, high in find_ends({7: [0.5, 0], 8: [0.1, 1], 9: [0.3, 1]})]
    [([8], [7]), ([7], [8, 9])]
    """
    if not alone:
        return
    width = Counter(map(len, alone.values())).most_common(1)[0][0]
    rows = {record: row for record, row in alone.items() if len(row) == width}
    records, known = np.array(list(rows), np.int64), set[tuple[bytes, bytes]]()
    for column in np.array(list(rows.values())).T:
        low, high = records[column == column.min()], records[column == column.max()]
        pair = low.tobytes(), high.tobytes()
        if column.min() < column.max() and pair not in known:
            known.update((pair, pair[::-1]))
            yield low, high


def _measure(tried: Sequence[reduction.LossSample]) -> tuple[float, float]:
    """The largest loss, and norm of a gradient."""
    return max(abs(one.loss) for one in tried), max(float(one.gradient.norm()) for one in tried)


def _fits(tried: Sequence[reduction.LossSample], how: str, tolerance: float, first: tuple[float, float]) -> bool:
    """Whether the first is made of the others. What is left where gradients cancel is rounding."""
    whole, made = tried[0], reduction.combine(tried[1:], how)
    loss, size = (max(now, LEARNT * then) for now, then in zip(_measure(tried), first, strict=True))
    return (
        abs(whole.loss - made.loss) <= tolerance * loss
        and float((whole.gradient - made.gradient).norm()) <= tolerance * size
    )


def wants_extremes(given: TrialInputs, found: ModelTraits) -> bool:
    """Whether a trial that has found these traits has seen code look at what it computes."""
    return found.glances and not found.whole and not found.half and given.options.reduction == "auto"
