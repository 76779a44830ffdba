"""Tries a recipe's model and loss before the first step, and compares them with the first worker's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from trueline import events
from trueline.data.loading import seeding
from trueline.data.loading.seeding import SeededReader
from trueline.data.loading.worker_pool import ReadMemory
from trueline.data.source import Batch, Source
from trueline.errors import RecipeError
from trueline.recipe.contract import Recipe
from trueline.train import devices, records
from trueline.train.job_dir import note_trial
from trueline.train.link.grpc_client import is_replacement
from trueline.train.rehearsal import fork, kept
from trueline.train.rehearsal.alike import AlikeTrial, load_traits, settle_traits, wants_comparing
from trueline.train.rehearsal.double import DoubleTrial, NumberTrial, wants_double, wants_numbers
from trueline.train.rehearsal.extremes import ExtremesTrial, wants_extremes
from trueline.train.rehearsal.fresh import FreshTrial
from trueline.train.rehearsal.steps.chosen_counts import ChosenCountsTrial, list_singles
from trueline.train.rehearsal.steps.counts import list_counts
from trueline.train.rehearsal.steps.many_batches import ManyBatchesTrial
from trueline.train.settings import JobSettings
from trueline.train.step import model_traits, trial
from trueline.train.step.contribution import StepBatch
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.options import Options
from trueline.train.step.parts.scalers import refuse_scalers
from trueline.train.step.reduction import as_weight
from trueline.train.worker.measure import call_model

TRIED = 8  # records in the trial forward before the first step


class RecipeTrial:
    def __init__(self, recipe: Recipe, model: torch.nn.Module, source: Source, settings: JobSettings) -> None:
        self._recipe, self._model, self._source, self._settings = recipe, model, source, settings
        self._place = functools.partial(devices.place_batch, device=devices.of_model(model))
        self._reader = SeededReader(source, settings.seed, self._place)
        self._options, self._kept = Options.of(settings), ReadMemory()
        self._counts = False
        """Whether the recipe or its model counts batches."""

    def find_traits(self) -> ModelTraits:
        """What the trials of model and loss show; if they fail, what the module types do. Raises UsageError if the loss
        is not that of the job's first worker."""
        settled = load_traits(model_traits.read_traits(self._model))
        if settled is not None:
            records.compare_with_first(settled.records, self._reader)
        if settled is not None and is_replacement():  # it takes the others' rate, and has no time to lose
            return self._compare(settled, {})
        leaves = AlikeTrial(self._make_trial(), self._list_spaces)
        leaves.look()
        fresh = None if settled is not None else self._try_fresh()
        traits = self._try_forward()
        settled = load_traits(traits)
        for number in range(trial.ATTEMPTS):
            if settled is not None:
                break
            tried = leaves.belong_to(self._make_trial(number))
            tried = tried if fresh is None else fresh.belong_to(tried)
            if self._try_loss(tried):
                self._try_further(tried.traits)
                drawn = tried.traits.draws or traits.draws
                settled = self._settle(dataclasses.replace(tried.traits, rate=traits.rate, draws=drawn))
        return self._compare(settled or self._settle(dataclasses.replace(traits, whole=True)), leaves.reads)

    def _settle(self, traits: ModelTraits) -> ModelTraits:
        sums = records.measure_records(self._reader, records.choose_records(self._kept.read))
        settled = settle_traits(dataclasses.replace(traits, records=sums))
        records.expect_same_records(settled.records, sums)
        return settled

    def _loss_of(self, batch: Batch | StepBatch) -> torch.Tensor:
        return self._recipe.loss(call_model(self._model, batch.inputs), batch.labels)

    def _make_trial(self, attempt: int = 0) -> trial.LossTrial:
        return trial.LossTrial(trial.TrialInputs(
            model=self._model, reader=self._reader, num_records=self._source.num_records, seed=self._settings.seed,
            global_batch=self._settings.global_batch, options=self._options, attempt=attempt,
            hidden_steps=self._settings.epochs * -(-self._source.num_records // self._settings.global_batch),
            kept=self._kept,
        ))  # fmt: skip

    def _try_fresh(self) -> FreshTrial | None:
        """Computes some records in a fork, before any other is computed here."""
        if not fork.can_fork(self._model):
            return None
        tried = self._make_trial()
        fresh = FreshTrial(tried.inputs, self._list_spaces)
        fresh.belong_to(tried)
        with contextlib.closing(fork.try_again(fresh, None)) as batches:
            all(self._take(tried, batch) for batch in batches)
        return fresh

    def _try_further(self, found: ModelTraits) -> None:
        """Raises UsageError if the loss is not made of its parts in double precision, or decides by a number of its
        batch."""
        tried = self._make_trial()
        trials: list[fork.ForkedTrial] = []
        if wants_double(tried.inputs, found):
            trials.append(DoubleTrial(tried))
        if wants_numbers(found):
            trials.append(NumberTrial(tried, found.numbers))
        if wants_extremes(tried.inputs, found):
            trials.append(ExtremesTrial(tried, found.reduction))
        counts = ChosenCountsTrial(tried, self._list_spaces)
        if self._counts:
            trials.append(counts)
        trials.append(ManyBatchesTrial(tried, self._list_spaces, None))
        for one in trials if fork.can_fork(self._model) else ():
            with contextlib.closing(fork.try_again(one, None)) as batches:
                all(self._take(tried, batch) for batch in batches)
        if counts in trials and counts.untried:
            events.emit("loss.untried", why=f"what it does where it counts to other numbers: {counts.untried}")

    def _try_forward(self) -> ModelTraits:
        source, batch = self._source, self._settings.global_batch
        first = np.arange(min(TRIED, source.num_records), dtype=np.int64)
        try:
            traits = model_traits.try_forward(
                self._model, lambda: self._loss_of(self._place(source.read(first))), len(first)
            )
        except Exception as error:  # noqa: BLE001  the step of a bad record finds and reports it
            events.emit("model.untried", why=f"{type(error).__name__}: {error}")
            traits = model_traits.read_traits(self._model)
        shard = self._options.shard_records(batch, needed=True)
        if traits.neighbours and model_traits.count_fewest(source.num_records, batch, shard) == 1:
            self._try_single()
        return traits

    def _try_single(self) -> None:
        """Raises UsageError if a layer refuses a batch of one record, which some step has."""
        with model_traits.restore_buffers(self._model), seeding.preserve_generators(), torch.no_grad():
            try:
                self._loss_of(self._place(self._source.read(np.zeros(1, np.int64))))
            except Exception as error:  # the step of a bad record finds and reports it
                refused = model_traits.explain_single(error, 1)
                if refused is not None:
                    raise refused from error

    def _list_spaces(self) -> list[tuple[str, Any]]:
        return list_spaces(self._recipe, self._source)

    def _try_loss(self, tried: trial.LossTrial) -> bool:
        """Whether the recipe's functions take the batches of the trial. Raises what the trial finds."""
        note_trial("whole and in parts, and at later steps")
        memory, ids = kept.KeptNames(self._model, self._list_spaces), np.empty(0, np.int64)
        memory.begin()
        with contextlib.closing(tried.batches()) as batches:
            for number, batch in enumerate(batches):
                if not self._take(tried, batch):
                    return False
                if number < 2:  # of the same records
                    ids = batch.records
                    memory.look()
        self._counts = bool(list_counts(memory) or list_singles(self._model) or any(tried.glances))
        with seeding.preserve_generators():
            memory.expect_unused(lambda: self._show_loss(tried, ids))
        return True

    def _take(self, tried: trial.LossTrial, batch: StepBatch) -> bool:
        """Whether the recipe's functions take `batch`."""
        weight = self._recipe.weight
        try:
            with refuse_scalers(RecipeError, "the recipe's loss", 'precision = "fp16"'):
                loss = self._loss_of(batch)
            divisor = None if weight is None else as_weight(weight(batch.labels), len(batch.records))
        except RecipeError:
            raise
        except Exception as error:  # noqa: BLE001  the step of a bad record finds and reports it
            events.emit("loss.untried", why=f"{type(error).__name__}: {error}")
            return False
        tried.take(loss, divisor, len(batch.records))
        return True

    def _show_loss(self, tried: trial.LossTrial, ids: Any) -> list[float]:
        given = tried.inputs
        with model_traits.restore_buffers(given.model):
            seeding.seed_all(given.seed, 0, 0)
            batch = given.reader.read(ids, epoch=0)
            given_out = StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=0, weight=1.0, trial=True)
            return tried.show(self._loss_of(given_out))

    def _compare(self, first: ModelTraits, mine: dict[str, Any]) -> ModelTraits:
        """`first`, the traits of the job. Raises UsageError if the loss here is another than the first worker's."""
        compared = not wants_comparing(mine, first.reads)
        for changes in (True, False):
            if not compared:
                tried = self._make_trial()
                alike = AlikeTrial(tried, self._list_spaces, first, changes=changes)
                with contextlib.closing(alike.batches()) as batches:
                    all(self._take(tried, batch) for batch in batches)
                compared = alike.compared
        return first


def list_spaces(recipe: Recipe, source: Source) -> list[tuple[str, Any]]:
    """Where the recipe's code keeps what it keeps."""
    functions = [getattr(value, "__func__", value) for value in (recipe.loss, recipe.model, recipe.feed)]
    spaces = {id(found): found for one in functions if (found := getattr(one, "__globals__", None)) is not None}
    enclosing = [one for one in functions if getattr(one, "__closure__", None)]
    return [*(("the recipe's ", space) for space in (*spaces.values(), *enclosing)), ("the data set's ", source)]
