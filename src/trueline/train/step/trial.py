"""Tries a loss before the first step: what it draws, whether it is a function of records and seeds, how it reduces.

    twice as it is       random numbers move the generators: the job then needs shards, each with a seed of its own;
                         other values the second time come from a generator, or a memory, that no seed reaches; where
                         they differ in the last bits alone, more times, which shows a slow counter
    whole and in parts   without draws and statistics of the batch (`still.py`): `reduction.py` decides by these; and
                         again with other values for parameters that begin as constants, such as gates at zero

A recipe's loss is called; a loop of the user's own gets the same records as batches (`rehearsal.py`). The parts
are of uneven length, and the records differ in their labels as far as a short look into the data set shows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Unpack

import numpy as np
import torch

from trueline import events
from trueline.data.loading.random_state import generator_state, single_states
from trueline.data.loading.seeding import preserve_generators, seed_all
from trueline.data.loading.worker_pool import ReadMemory
from trueline.data.source import Readable
from trueline.engine.contract import parse_ref
from trueline.errors import UsageError
from trueline.parallel.ddp import list_used
from trueline.train import dynamo
from trueline.train.step import features, model_traits, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.options import Options
from trueline.train.step.parts import drawn_counts, no_tensor, own_seeds, silent
from trueline.train.step.parts.buffer_changes import BufferChanges, find_followers
from trueline.train.step.parts.late_steps import LateTrial, find_decisive
from trueline.train.step.parts.seeded_generators import NotedSeeds, note_seeds
from trueline.train.step.parts.still import CONSTANT, Bends, Bound, WatchedOperators, unsettle, without_draws
from trueline.train.step.plan import Ints
from trueline.train.step.reduction import LossSample

FEW, QUICK_S = 5, 0.2  # records that are tried where a few of them take longer than this
AGAIN = 4  # times more that records are tried whose loss differs a little the second time
TOSSES = 8  # more seeds, where what is drawn may decide which layers are computed
ATTEMPTS = 3  # choices of records: some may be damaged
PARAMETERS, ELEMENTS = 8, 1 << 20  # the last parameters whose gradients are compared, and the most elements of one
KEPT = 1 << 16  # elements of a gradient that are kept: seven whole ones would be the most memory that a worker ever has
TOLERANCE, ON_DEVICE, IN_HALF = 1e-4, 5e-3, 3e-2  # of loss and gradients: float32, with TF32, in half precision
IN_DOUBLE, LARGE = 1e-9, 1e4  # in double precision; a gradient that is clipped if anything is
SCALE = 2.0**16  # of a loss whose gradients show whether something clips them
Batches = Generator[StepBatch, None, None]


@dataclass(frozen=True, slots=True)
class TrialInputs:
    """What is tried, and the options of the job."""

    model: torch.nn.Module
    reader: Readable
    num_records: int
    global_batch: int
    seed: int
    options: Options
    attempt: int = 0
    """Above 0: records are chosen at random, since some of those that were chosen before may be damaged."""
    chosen: Ints | None = None
    """The records of a batch that is unlike those of the trial before the first step; its step is `step`."""
    step: int = 0
    total_steps: int = 1
    hidden_steps: int = 0
    """Of a job whose loss is not given its step, as a recipe's: a counter in a buffer may show it."""
    on_read: Callable[[], object] = lambda: None  # called when records are read for a fork: the worker is not stuck
    kept: ReadMemory | None = None  # what forks have read

    @property
    def most(self) -> int:
        """Records of a batch of the trial: no more than a batch of the job has, and two where a step has two."""
        most = min(self.options.micro_batch or self.global_batch, self.num_records)
        return max(most, min(2, self.global_batch, self.num_records))


class LossComparison(Protocol):
    """What this worker leaves for others to compare with (`alike.py`): `reads`, after batches of some records."""

    reads: dict[str, Any]

    def batches(self, ids: Ints) -> Batches: ...


class LossTrial:
    """`batches()` are to be trained with, each followed by a call of `take`; `traits` is known when they end."""

    traits: ModelTraits
    failed, bends = False, True  # whether the loop's code raised for a batch; whether to look for what clips gradients
    leads, in_double = True, IN_DOUBLE  # what `job.leads` is meanwhile; the tolerance of losses in float64

    def __init__(self, trial: TrialInputs) -> None:
        self.inputs, self.taken = trial, False
        self.after: Callable[[torch.Tensor], bool] | None = None
        """Takes the losses of other trials in this one's place, and returns what `job.step` does."""
        self.alike: LossComparison | None = None
        self.expect_same: Callable[[Any], Batches] | None = None  # with a reader: `fresh.py`
        self.tried: list[LossSample] = []  # the losses of the last batches
        self.bounds: list[list[Bound]] = []
        """What each of them has compared with a bound; the single numbers that code has looked at; and all of it."""
        self.numbers, self.glances = list[list[float]](), list[list[float]]()
        self._watched = WatchedOperators(still=False)
        values = self._trained = [value for value in trial.model.parameters() if value.requires_grad]
        self._frozen = [value for value in trial.model.parameters() if not value.requires_grad]
        self._parameters = [value for value in values if value.numel() <= ELEMENTS][-PARAMETERS:] or values[-1:]
        self._draws = self._seeds = self._tosses = self._half = self._single = self._uneven = self._bent = False
        self.noted, self.constant = NotedSeeds(), CONSTANT
        self._used: set[frozenset[int]] = set()  # of each batch, the parameters that led to its loss
        self._marked = min(self._parameters, key=torch.Tensor.numel, default=None)
        """Has a large gradient while the loop's code runs, which shows what that does with gradients."""
        self.took_s, self._deaths = 0.0, parse_ref(os.environ.get("TRUELINE_REF") or "worker-0.0")[2]
        self.earlier = trial.attempt + self._deaths
        self._state: tuple[Any, ...] = ()
        self._changes: list[dict[str, torch.Tensor]] = []  # what each try added to the model's buffers
        self._buffers: set[str] = set()
        self._looks: list[features.Column] = []
        self.divisors: list[reduction.Divisors] = []
        """Of the losses of a whole and of its parts."""
        self._kept: list[torch.Tensor] = []
        """Of each parameter, the indices at which gradients are compared: where the first of them is largest."""

    def batches(self) -> Batches:
        """Raises UsageError for a loop that no seed makes repeatable, and for a loss that is not made of its parts."""
        trial = self.inputs
        eager = torch.compiler.set_stance("force_eager") if dynamo.is_loaded() else nullcontext()
        with preserve_generators(), eager:
            for attempt in range(self.earlier, self.earlier + ATTEMPTS):
                ids = self._choose(attempt)
                with note_seeds(self.noted):
                    yield from self._twice(ids[:FEW])
                if not self.is_finite():
                    continue
                if self._tosses and trial.chosen is None:
                    yield from self._toss(ids[:FEW])
                if (self._draws or self._seeds) and trial.chosen is None:
                    yield from own_seeds.expect_other_noise(self, ids)
                    yield from drawn_counts.expect_no_count(self, ids[:FEW])
                if self.expect_same is not None:
                    yield from self.expect_same(trial.reader)
                if self.alike is not None:
                    yield from self.alike.batches(ids[:FEW])
                few = trial.chosen is None and self.took_s >= QUICK_S
                self._changes.clear()
                yield from drawn_counts.each_part(self, ids[:FEW] if few else ids, draws=self._draws)
                ids = yield from silent.try_more(self, ids)
                if self.is_finite():
                    yield from self._settle(ids)
                    return
            events.emit("loss.untried", why="it is not finite")
            if trial.chosen is not None:
                return  # the step finds the record
            named = trial.options.reduction
            self.traits = self._traits("mean" if named == "auto" else named, whole=True)

    def _choose(self, attempt: int) -> Ints:
        trial = self.inputs
        if trial.chosen is not None:
            return trial.chosen
        given = trial.reader, trial.num_records, trial.most, np.random.default_rng([trial.seed % 2**32, attempt])
        if attempt and (self._looks or self._deaths):  # a look at many records may be what this slot died of
            return features.choose_any(*given)
        chosen, self._looks = features.choose_different(*given, apart=trial.options.reduction == "auto")
        return features.choose_any(*given) if attempt else chosen

    def is_finite(self) -> bool:
        """Whether all losses of the last batches, and their gradients, are finite."""
        return all(
            tried.weight == 0 or (math.isfinite(tried.loss) and bool(tried.gradient.isfinite().all()))
            for tried in self.tried
        )

    def take(self, loss: torch.Tensor, weight: float | None, records: int) -> bool:
        """Takes the loss of the last batch; returns what `job.step` does. Raises RecipeError for a loss of another
        shape, UsageError without one."""
        model_traits.expect_same_training(self._trained, self._frozen, "a later step")
        if self.after is not None:
            return self.after(loss)
        self._watched.looks = False  # what is looked at from here on is not the loop's
        self._expect_unchanged()
        value = reduction.as_scalar(loss, records, self.inputs.options.reduction)
        if not value.requires_grad:
            raise UsageError("the loss has no gradient", hint="compute it with the model, and not under no_grad()")
        self._used.add(frozenset(map(id, list_used(value, list(self.inputs.model.parameters())))))
        elements = reduction.averaged_elements(value)
        self.divisors.append(reduction.read_divisors(value, records))
        gradient = self._sample_gradients(value)
        uneven = elements is not None and elements[0] != elements[1]
        self._uneven = self._uneven or uneven
        found = (0.0, torch.zeros_like(gradient)) if weight == 0 else (float(value.item()), gradient)
        self.tried.append(LossSample(records, *found, weight, uneven and weight != 0))
        self.taken = True
        return False

    def show(self, loss: torch.Tensor) -> list[float]:
        """A loss as one number, and of each gradient that is compared its norm and its largest element."""
        shown = [float(loss.detach().double().mean())]
        if loss.requires_grad:
            for grad in reduction.compute_gradients(loss.mean(), list(self._parameters), self.inputs.model):
                shown += features.measure_gradient(grad)
        return shown

    def answer(self) -> dict[str, Any]:
        """What a fork that has tried the loop sends to its parent."""
        return asdict(self.traits) if hasattr(self, "traits") else {}

    def accept(self, answer: dict[str, Any]) -> None:
        """Takes the answer of such a fork."""
        if answer:
            self.traits = ModelTraits(**answer)

    def _sample_gradients(self, loss: torch.Tensor) -> torch.Tensor:
        """The elements of the compared gradients that are kept. Those of the first loss are compared with those of many
        times it: these show what clips or rounds, which would see a part of a step. One set of gradients at a time."""
        model, first = self.inputs.model, not self.tried
        bends = self.bends and first and not self._half and not reduction.has_node(loss, "CheckpointFunctionBackward")
        of = list(self._parameters)
        if bends:
            of += [value for value in model.parameters() if value.requires_grad and value._backward_hooks]
            found: Sequence[Any] = torch.autograd.grad(loss, of, allow_unused=True, retain_graph=True)
        else:
            found = reduction.compute_gradients(loss, of, model)
        if first:
            self._kept = [features.pick_largest(grad, value, KEPT) for grad, value in zip(found, of, strict=True)]
        kept = [features.take_elements(grad, at) for grad, at in zip(found, self._kept, strict=False)]
        del found
        if bends:
            self._find_bends(torch.autograd.grad(loss * SCALE, of, allow_unused=True), kept)
        return torch.cat(kept[: len(self._parameters)])

    def _find_bends(self, larger: Sequence[Any], kept: Sequence[torch.Tensor]) -> None:
        for grad, at, mine in zip(larger, self._kept, kept, strict=True):
            if grad is not None and not grad.is_sparse:
                off = float((features.take_elements(grad, at) / SCALE - mine).norm())
                self._bent = self._bent or (off > 1e-3 * float(mine.norm()) and math.isfinite(off))
        if self._bent and self.inputs.options.reduction == "auto":
            raise UsageError(
                f"the gradients of {SCALE:g} times the loss are not {SCALE:g} times its own: a hook or an autograd "
                "function of yours changes them (clips or rounds), and would see those of a part of a step",
                hint="clip with clip_norm (in a loop: Options(clip_norm=...)) or in the optimizer, or set reduction = "
                '"mean" and micro_batch = N: it then sees those of whole shards of N records',
            )

    def _traits(self, how: str, *, whole: bool) -> ModelTraits:
        shown = model_traits.read_traits(self.inputs.model)
        even = self.inputs.options.reduction == "auto" and not self._uneven
        whole, draws = whole or self._bent, shown.draws or self._draws
        half = self._half and self.inputs.options.precision == "fp32"  # else the user knows of its rounding
        buffers = tuple(sorted(self._buffers))
        looks = self._looks if self.inputs.options.reduction == "auto" and not whole and self.divisors else []
        form, rules = reduction.fit_divisors(self.divisors) if even and how == "mean" and not whole else ("", ())
        reads = self.alike.reads if self.alike is not None else {}
        return replace(shown, draws=draws, reduction=how, even=even, whole=whole, buffers=buffers, half=half,
                       form=form, divisors=rules, looks=looks, reads=reads, skips=len(self._used) > 1,
                       glances=any(self.glances))  # fmt: skip

    def _one(self, ids: Ints, watched: WatchedOperators, step: int | None = None, seed: int = 0) -> Batches:
        trial = self.inputs
        batch = trial.reader.read(ids, epoch=0)
        self._state = _state(trial)
        if self._marked is not None:
            self._marked.grad = torch.full_like(self._marked, LARGE, requires_grad=False)
        try:
            kinds = (model_traits.buffer_slots(trial.model, persistent=kind) for kind in (True, False))
            slots = [(slot, slot.value.clone()) for kind in kinds for slot in kind]
            with model_traits.restore_buffers(trial.model):
                seed_all(trial.seed, 0, seed)
                before, singly, self.taken = generator_state(), single_states(), False
                watched.begin()
                self.noted.begin()
                self._watched = watched
                began = time.thread_time()  # the same on a busy host
                yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, weight=1.0, trial=True,
                                step=trial.step if step is None else step)  # fmt: skip
                self.took_s = time.thread_time() - began
                if not self.taken:
                    raise no_tensor.refuse_no_step()
                changes = {slot.name: slot.change(old) for slot, old in slots if slot.value.shape == old.shape}
            self.bounds.append(watched.bounds)
            self.numbers.append(watched.numbers)
            self.glances.append(watched.glances)
            self._changes.append({name: change for name, change in changes.items() if change.any()})
            self._buffers.update(self._changes[-1])
            here = single_states() != singly
            self._seeds = self._seeds or self.noted.were_used()
            self._tosses = self._tosses or watched.tosses or here
            self._draws = self._draws or watched.draws or here or generator_state() != before
            self._half, self._single = self._half or watched.half, self._single or watched.single
            self._expect_unchanged()
        finally:  # also after a record that code of the loop refuses: another trial follows
            if self._marked is not None:
                self._marked.grad = None

    def one_as_it_is(self, ids: Ints, *, step: int | None = None, seed: int = 0) -> Batches:
        """A batch with what it draws."""
        with WatchedOperators(still=False) as watched:
            yield from self._one(ids, watched, step, seed)

    def _expect_unchanged(self) -> None:
        model_traits.expect_same_versions(self.inputs.model, [version for version, _ in self._state])
        grad = None if self._marked is None else self._marked.grad
        # Clearing it is of no use, and does no harm.
        same = grad is None or not bool(grad.any()) or bool(grad.eq(LARGE).all())
        if not same or _state(self.inputs, but=self._marked) != self._state:
            raise UsageError(
                "the loop changes the parameters or their gradients itself",
                hint="job.step(loss) runs backward and optimizer; gradients are clipped by clip_norm (in a loop: "
                "Options(clip_norm=...))",
            )

    def _twice(self, ids: Ints) -> Batches:
        self.tried.clear()
        for _ in range(2):
            yield from self.one_as_it_is(ids)
        first, again = self.tried
        large = reduction.difference(first, again) > max(self.tolerance / 10, IN_DOUBLE)
        if not large and first.loss != again.loss and not self._half:
            for _ in range(AGAIN):
                yield from self.one_as_it_is(ids)
            large, again = reduction.drifts(self.tried), self.tried[-1]
        if math.isfinite(first.loss) and large:
            raise UsageError(
                f"the loss of the same {len(ids)} records was {first.loss:.9g} and then {again.loss:.9g}, with equal "
                "seeds and parameters: it depends on what was trained before, so on how a step is shared",
                hint="draw from the global generators of torch, numpy or random, which each batch seeds; count with "
                "batch.step, and keep nothing that the loss uses from one batch to the next",
            )

    def _toss(self, ids: Ints) -> Batches:
        """Other seeds, which may leave out other layers."""
        for seed in range(1, 1 + (TOSSES if self.took_s < QUICK_S else 1)):
            yield from self.one_as_it_is(ids, seed=seed)

    def _settle(self, ids: Ints) -> Batches:
        trial, draws = self.inputs, self._draws
        whole, parts = next(iter(self.tried), None), self.tried[1:]
        named = trial.options.reduction
        cuts = [parts[:2], parts[2:]]
        how, confirmed = reduction.decide(whole, cuts, named, self.tolerance, draws=draws or self._seeds)
        shares, off = [part.records / self.tried[0].records for part in parts], reduction.measure_off(self.tried, how)
        numbers = find_decisive(self.numbers) if named == "auto" else ()
        late = LateTrial(self, how, ids[:FEW] if self.took_s >= QUICK_S else ids)
        changed, seen = BufferChanges(trial.model, self._buffers, self._changes), len(self.divisors)
        counters = changed.constant()
        if whole is not None and trial.chosen is None:
            yield from find_followers(self, self._buffers, self._changes, ids[: whole.records])
            del self.divisors[seen:]
        confirmed = confirmed and changed.confirm(shares, self.tolerance, refuses=named == "auto")
        if confirmed and whole is not None and trial.chosen is None:
            with unsettle(trial.model) as names:
                yield from self.each_part(ids if names else ids[:0])
            del self.divisors[seen:]
            where = f"once parameters that begin as constants ({names}) have other values"
            confirmed = reduction.confirm(self.tried, how, named, self.tolerance, where)
        self._draws = draws
        if confirmed and whole is not None and trial.chosen is None:
            confirmed = yield from late.batches(counters)
            del self.divisors[seen:]
        self.traits = replace(self._traits(how, whole=not confirmed), off=off, numbers=numbers)
        if self.traits.whole:
            yield from silent.expect_shards(self, ids, trial.options.shard_records(trial.global_batch, needed=True))

    def each_part(self, ids: Ints, *, step: int | None = None, cuts: int = 2, **still: Unpack[Bends]) -> Batches:
        """The batches `ids` as a whole and cut in two, in one or two ways; `tried` has their losses then."""
        cut, other = max(1, len(ids) // 3), np.random.default_rng(1).permutation(ids)
        for kept in (self.tried, self.bounds, self.numbers):
            kept.clear()
        parts = (ids, ids[:cut], ids[cut:], other[:cut], other[cut:])[: 1 + 2 * cuts]
        if len(ids) > 1:
            with without_draws(self.inputs.model, **still) as watched:
                watched.constant = self.constant
                for part in parts:
                    yield from self._one(part, watched, step)

    @property
    def tolerance(self) -> float:
        if self._half:
            return IN_HALF
        if not self._single and all(value.dtype == torch.float64 for value in self._parameters):
            return self.in_double
        return TOLERANCE if all(value.is_cpu for value in self._parameters) else ON_DEVICE


def _state(trial: TrialInputs, but: torch.nn.Parameter | None = None) -> tuple[Any, ...]:
    """Equal states mean that the loop changed no parameters, or gradients except that of `but`, in between."""
    return tuple((value._version, value is but or value.grad is None) for value in trial.model.parameters())
