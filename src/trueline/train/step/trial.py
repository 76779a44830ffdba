"""Tries a loss before the first step: what it draws, whether it is a function of records and seeds, how it reduces.

    twice as it is       random numbers move the generators: the job then needs shards, each with a seed of its own;
                         other values the second time come from a generator, or a memory, that no seed reaches
    whole and in parts   without draws and statistics of the batch (`still.py`): `reduction.py` decides by these

A recipe's loss is called; a loop of the user's own gets the same records as batches (`rehearsal.py`). The parts
are of uneven length, and the records differ in their labels as far as a short look into the data set shows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueline import events, files
from trueline.data.loading import seeding
from trueline.data.loading.seeding import SeededReader
from trueline.data.loading.worker_pool import ReaderClient, ReaderPool
from trueline.data.source import Batch
from trueline.engine.contract import parse_ref
from trueline.errors import UsageError
from trueline.train.job_dir import JobDir
from trueline.train.link.grpc_client import settle_on_master
from trueline.train.step import model_traits, reduction
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.options import Options
from trueline.train.step.plan import Ints
from trueline.train.step.reduction import LossSample
from trueline.train.step.still import WatchedOperators, without_draws

COUNTS = 13, 11, 7, 5, 3, 2, 1  # primes: no part of the records has the same share of them and of something else
FEW, QUICK_S = 5, 0.2  # records that are tried where a few of them take longer than this
POOL, LOOK_S = 64, 0.05  # most records that are looked at, and for how long, to find some that differ
ATTEMPTS = 3  # choices of records: some may be damaged
PARAMETERS, ELEMENTS = 8, 1 << 20  # the last parameters whose gradients are compared, and the most elements of one
KEPT = 1 << 16  # elements of a gradient that are kept: seven whole ones would be the most memory that a worker ever has
TOLERANCE, ON_DEVICE, IN_HALF = 1e-4, 5e-3, 3e-2  # of loss and gradients: float32, with TF32, in half precision
Batches = Generator[StepBatch, None, None]


@dataclass(frozen=True, slots=True)
class TrialInputs:
    """What is tried, and the options of the job."""

    model: torch.nn.Module
    reader: SeededReader | ReaderPool | ReaderClient
    num_records: int
    global_batch: int
    seed: int
    options: Options
    attempt: int = 0
    """Above 0: records are chosen at random, since some of those that were chosen before may be damaged."""


class LossTrial:
    """`batches()` are to be trained with, each followed by a call of `take`; `traits` is known when they end."""

    traits: ModelTraits

    def __init__(self, trial: TrialInputs) -> None:
        self.inputs, self.taken = trial, False
        self._tried: list[LossSample] = []
        values = [value for value in trial.model.parameters() if value.requires_grad]
        self._parameters = [value for value in values if value.numel() <= ELEMENTS][-PARAMETERS:] or values[-1:]
        self._draws = self._half = self._uneven = False
        self._took_s = 0.0
        self._state: tuple[Any, ...] = ()
        self._kept: list[torch.Tensor] = []
        """Of each parameter, the indices at which gradients are compared: where the first of them is largest."""

    def batches(self) -> Batches:
        """Raises UsageError for a loop that no seed makes repeatable, and for a loss that is not made of its parts."""
        trial = self.inputs
        compiled = "torch._dynamo" in sys.modules  # which takes a second to import
        with seeding.preserve_generators(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            earlier = trial.attempt + parse_ref(os.environ.get("TRUELINE_REF") or "worker-0.0")[2]
            for attempt in range(earlier, earlier + ATTEMPTS):  # a record may have killed the worker before this one
                ids = self._choose(attempt)
                yield from self._twice(ids[:FEW])
                if all(math.isfinite(tried.loss) or tried.weight == 0 for tried in self._tried):
                    break
            else:
                events.emit("loss.untried", why="it is not finite")
                named = trial.options.reduction
                self.traits = self._traits("mean" if named == "auto" else named, whole=True)
                return
            yield from self._in_parts(ids if self._took_s < QUICK_S else ids[:FEW])

    def take(self, loss: torch.Tensor, weight: float | None, records: int) -> None:
        """Takes the loss of the last batch. Raises RecipeError for a loss of another shape, UsageError without one."""
        self._expect_unchanged()
        value = reduction.as_scalar(loss, records, self.inputs.options.reduction)
        if not value.requires_grad:
            raise UsageError("the loss has no gradient", hint="compute it with the model, and not under no_grad()")
        elements = reduction.averaged_elements(value)
        found = _gradients(value, self._parameters, self.inputs.model)
        flat = [
            (torch.zeros_like(mine) if its is None else its.to_dense()).detach().flatten()
            for mine, its in zip(self._parameters, found, strict=True)
        ]
        if not self._tried:
            self._kept = [value.abs().topk(min(KEPT, len(value)), sorted=False).indices for value in flat]
        kept = [value[indices].double() for value, indices in zip(flat, self._kept, strict=True)]
        uneven = elements is not None and elements[0] != elements[1]
        self._uneven = self._uneven or uneven
        gradient = torch.cat(kept).cpu()
        self._tried.append(
            LossSample(records, 0.0, torch.zeros_like(gradient), weight)
            if weight == 0
            else LossSample(records, float(value.item()), gradient, weight, uneven)
        )
        self.taken = True

    def _traits(self, how: str, *, whole: bool) -> ModelTraits:
        shown = model_traits.read_traits(self.inputs.model)
        even = self.inputs.options.reduction == "auto" and not self._uneven
        draws = shown.draws or self._draws
        return ModelTraits(draws=draws, neighbours=shown.neighbours, reduction=how, even=even, whole=whole)

    def _choose(self, attempt: int) -> Ints:
        """Records whose labels differ, the most different first; those that cannot be read are left to their step."""
        trial = self.inputs
        most = min(trial.options.micro_batch or trial.global_batch, trial.num_records)
        most = max(most, min(2, trial.global_batch, trial.num_records))
        count = next(count for count in COUNTS if count <= most)
        chance = np.random.default_rng([trial.seed % 2**32, attempt])
        if attempt:
            picked: Ints = chance.choice(trial.num_records, count, replace=False).astype(np.int64)
            return picked
        spread = np.linspace(0, trial.num_records - 1, min(POOL, trial.num_records)).astype(np.int64)
        pool = chance.permutation(spread)
        keys = np.full(len(pool), np.nan)
        until = time.monotonic() + LOOK_S
        for start in range(0, len(pool), count):
            ids = pool[start : start + count]
            with contextlib.suppress(Exception):  # a damaged record may raise anything
                keys[start : start + count] = _keys(trial.reader.read(ids, epoch=0), len(ids))
            if time.monotonic() > until:
                break
        readable = np.flatnonzero(~np.isnan(keys))
        if not len(readable):
            return pool[:count]
        _, first = np.unique(keys[readable], return_index=True)
        few = readable[first[np.unique(np.linspace(0, len(first) - 1, count).astype(int))]]
        few = np.concatenate([few[-1:], few[:-1]])
        chosen: Ints = pool[np.concatenate([few, np.setdiff1d(readable, few, assume_unique=True)])[:count]]
        return chosen

    def _one(self, ids: Ints, watched: WatchedOperators) -> Batches:
        trial = self.inputs
        batch = trial.reader.read(ids, epoch=0)
        self._state = _state(trial)
        with _restore_buffers(trial.model):
            seeding.seed_all(trial.seed, 0, 0)
            before, watched.draws, self.taken = seeding.generator_state(), False, False
            began = time.monotonic()
            yield StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=0, weight=1.0, trial=True)
            self._took_s = time.monotonic() - began
            if not self.taken:
                raise UsageError("the loop did not call job.step(loss)", hint="call it once for every batch")
        self._draws = self._draws or watched.draws or seeding.generator_state() != before
        self._half = self._half or watched.half
        self._expect_unchanged()

    def _expect_unchanged(self) -> None:
        if _state(self.inputs) != self._state:
            raise UsageError(
                "the loop changes the parameters or their gradients itself",
                hint="job.step(loss) runs backward and optimizer",
            )

    def _twice(self, ids: Ints) -> Batches:
        self._tried.clear()
        for _ in range(2):
            with WatchedOperators(still=False) as watched:
                yield from self._one(ids, watched)
        first, again = self._tried
        if math.isfinite(first.loss) and reduction.difference(first, again) > self._tolerance / 10:
            raise UsageError(
                f"the loss of the same {len(ids)} records was {first.loss:.7g} and then {again.loss:.7g}, with equal "
                "seeds and parameters: it depends on what was trained before, so on how a step is shared",
                hint="draw from the global generators of torch, numpy or random, which each batch seeds; count with "
                "batch.step, and keep nothing that the loss uses from one batch to the next",
            )

    def _in_parts(self, ids: Ints) -> Batches:
        trial, cut = self.inputs, max(1, len(ids) // 3)
        draws, other = self._draws, np.random.default_rng(1).permutation(ids)
        self._tried.clear()
        if len(ids) > 1:
            with without_draws(trial.model) as watched:
                for part in (ids, ids[:cut], ids[cut:], other[:cut], other[cut:]):
                    yield from self._one(part, watched)
        self._draws = draws
        whole, parts = next(iter(self._tried), None), self._tried[1:]
        named = trial.options.reduction
        how, confirmed = reduction.decide(whole, [parts[:2], parts[2:]], named, self._tolerance, draws=draws)
        self.traits = self._traits(how, whole=not confirmed)

    @property
    def _tolerance(self) -> float:
        if self._half:
            return IN_HALF
        return TOLERANCE if all(value.is_cpu for value in self._parameters) else ON_DEVICE


def _gradients(loss: torch.Tensor, of: list[torch.nn.Parameter], model: torch.nn.Module) -> Sequence[Any]:
    """The gradients of some parameters. Reentrant activation checkpointing has to go through all of `model`."""
    if not reduction.has_node(loss, "CheckpointFunctionBackward"):
        return torch.autograd.grad(loss, of, allow_unused=True)
    held = [(value, value.grad) for value in model.parameters()]
    for value, _ in held:
        value.grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    found = [value.grad for value in of]
    for value, grad in held:
        value.grad = grad
    return found


def _keys(batch: Batch, count: int) -> list[float]:
    """A number for each record, which tells records with other labels apart."""
    flat = torch.utils._pytree.tree_leaves(batch.labels if batch.labels is not None else batch.inputs)
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count]
    sums = [leaf.detach().cpu().double().reshape(count, -1).sum(dim=1) for leaf in tensors]
    total: list[float] = sum(sums, torch.zeros(count, dtype=torch.float64)).nan_to_num().tolist()
    return total


def _state(trial: TrialInputs) -> tuple[Any, ...]:
    """Equal states mean that the loop changed no parameters or gradients in between."""
    return tuple((value._version, value.grad is None) for value in trial.model.parameters())


@contextmanager
def _restore_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Gives the model's buffers their values again after the block."""
    copies = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


_SETTLED = ("draws", "reduction", "even", "whole")
"""What the first worker finds out for all others of the job, in JOB/loss.json."""


def load_traits(shown: ModelTraits) -> ModelTraits | None:
    """`shown` with what another worker of this job has settled; None if there is nothing yet."""
    if "TRUELINE_CA" in os.environ:
        settled = settle_on_master(b"")
        return replace(shown, **json.loads(settled)) if settled else None
    try:
        return replace(shown, **json.loads(JobDir(Path(os.environ["TRUELINE_JOB"])).loss.read_bytes()))
    except (KeyError, FileNotFoundError):
        return None


def settle_traits(traits: ModelTraits) -> ModelTraits:
    """Settles `traits` for the job, unless another worker already has; returns what is settled."""
    settled = {name: value for name, value in asdict(traits).items() if name in _SETTLED}
    events.emit("loss.tried", **settled)
    if "TRUELINE_JOB" not in os.environ:
        return traits
    if "TRUELINE_CA" in os.environ:
        return replace(traits, **json.loads(settle_on_master(json.dumps(settled).encode())))
    files.write_atomic(JobDir(Path(os.environ["TRUELINE_JOB"])).loss, json.dumps(settled).encode(), replace=False)
    return load_traits(traits) or traits
