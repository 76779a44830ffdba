"""Whether the loss of a worker with parameter servers is the first worker's (`train/rehearsal/alike.py`).

Servers hold the parameters; what a loss reads beside them each worker makes for itself. So before it asks for
minibatches it computes some records as it computes those, and looks at what it would push:

    dense parameters   as the recipe made them
    rows of tables     as they begin, and those that begin with zeros by their ids: a loss would see no other ids

It also compares some of the records with those that the first worker has read (`train/records.py`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from trueline import events
from trueline.data.loading.seeding import SeededReader
from trueline.data.source import Batch, Source
from trueline.errors import TruelineError
from trueline.ps.model.embedding import Rows
from trueline.ps.model.minibatch import Minibatch
from trueline.ps.model.strategy import ServedModel
from trueline.ps.partition import Ids
from trueline.ps.tables.initial import initial_rows
from trueline.recipe.contract import Recipe
from trueline.train import devices, records
from trueline.train.rehearsal.alike import AlikeTrial, load_traits, settle_traits, wants_comparing
from trueline.train.settings import JobSettings
from trueline.train.step import features, model_traits
from trueline.train.step.contribution import StepBatch
from trueline.train.step.features import measure_gradient
from trueline.train.step.model_traits import ModelTraits
from trueline.train.step.options import Options
from trueline.train.step.plan import Ints
from trueline.train.step.trial import ATTEMPTS, FEW, LossTrial, TrialInputs
from trueline.train.worker.measure import call_model
from trueline.train.worker.recipe_trial import list_spaces

_SCALE = 0.05
"""Of the rows of a table that begins with zeros."""


class ServedTrial(LossTrial):
    """Shows of a loss what its minibatch would push: gradients of tables and dense parameters, values of buffers."""

    def __init__(self, given: TrialInputs, served: ServedModel) -> None:
        super().__init__(given)
        self._served = served
        self.minibatch: Minibatch

    def show(self, loss: torch.Tensor) -> list[float]:
        loss.backward()  # type: ignore[no-untyped-call]
        rows, dense, _ = self._served.gradients(self.minibatch)
        pushed = (*(values for _, values in rows.values()), *dense.values())
        numbers = (number for values in pushed for number in measure_gradient(torch.from_numpy(values)))
        return [float(loss.detach().double()), *numbers]


class _NotedReader(SeededReader):
    """`read_ids`: all records that it has read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read_ids = set[int]()

    def read(self, indices: Ints, *, epoch: int) -> Batch:
        self.read_ids.update(indices.tolist())
        return super().read(indices, epoch=epoch)


class ServedComparison:
    """`expect_alike()` once, before the worker's first minibatch."""

    def __init__(self, recipe: Recipe, served: ServedModel, source: Source, settings: JobSettings) -> None:
        self._recipe, self._served, self._source, self._settings = recipe, served, source, settings
        place = functools.partial(devices.place_batch, device=devices.of_model(served.model))
        self._reader = reader = _NotedReader(source, settings.seed, place)
        self._inputs = TrialInputs(
            model=served.model, reader=reader, num_records=source.num_records, seed=settings.seed,
            global_batch=settings.global_batch, options=Options.of(settings),
        )  # fmt: skip
        self._tables = {
            one.name: one if one.init != "zeros" else msgspec.structs.replace(one, init="uniform", scale=_SCALE)
            for one in served.spec.tables
        }

    def expect_alike(self) -> None:
        """Raises UsageError if the loss here is not that of the job's first worker, DataError if records are others."""
        shown, mine = model_traits.read_traits(self._served.model), dict[str, Any]()
        first = load_traits(shown)
        if first is None:
            mine = self._leave()
            sums = records.measure_records(self._reader, records.choose_records(self._reader.read_ids))
            first = settle_traits(replace(shown, reads=mine, records=sums))
            records.expect_same_records(first.records, sums)
        else:
            records.compare_with_first(first.records, self._reader)
        compared = not wants_comparing(mine, first.reads)
        for changes in (True, False):  # a value that differs may have no other one, and then the loss raises
            compared = compared or self._compare(first, changes=changes)

    def _leave(self) -> dict[str, Any]:
        """What others compare with; empty if the loss of no records could be computed."""
        tried = ServedTrial(self._inputs, self._served)
        alike = AlikeTrial(tried, self._list_spaces)
        alike.look()
        tried.after = alike.take
        for attempt in range(ATTEMPTS):
            ids = self._choose(attempt)
            began = time.monotonic()
            if self._take(tried, self._read(ids)):
                tried.took_s = time.monotonic() - began
                with contextlib.closing(alike.batches(ids)) as batches:
                    if all(self._take(tried, batch) for batch in batches):
                        return alike.reads
        return {}

    def _compare(self, first: ModelTraits, *, changes: bool) -> bool:
        """Whether the losses could be compared."""
        tried = ServedTrial(self._inputs, self._served)
        alike = AlikeTrial(tried, self._list_spaces, first, changes=changes)
        with contextlib.closing(alike.batches()) as batches:
            all(self._take(tried, batch) for batch in batches)
        return alike.compared

    def _choose(self, attempt: int) -> Ints:
        given = self._inputs
        chance = np.random.default_rng([given.seed % 2**32, attempt])
        if attempt:
            return features.choose_any(given.reader, given.num_records, given.most, chance)[:FEW]
        return features.choose_different(given.reader, given.num_records, given.most, chance, apart=False)[0][:FEW]

    def _read(self, ids: Ints) -> StepBatch | None:
        try:
            batch = self._inputs.reader.read(ids, epoch=0)
        except Exception as error:  # noqa: BLE001  a damaged record may raise anything; its minibatch finds it
            events.emit("loss.untried", why=f"{type(error).__name__}: {error}")
            return None
        return StepBatch(inputs=batch.inputs, labels=batch.labels, records=ids, step=0, weight=1.0, trial=True)

    def _take(self, tried: ServedTrial, batch: StepBatch | None) -> bool:
        """Whether the recipe's functions take `batch`."""
        if batch is None:
            return False
        try:
            with self._served.tables.minibatch(self._pull, batch.inputs) as tried.minibatch:
                loss = self._recipe.loss(call_model(self._served.model, batch.inputs), batch.labels).mean()
                tried.take(loss, None, len(batch.records))
        except TruelineError:
            raise
        except Exception as error:  # noqa: BLE001  the minibatch of a bad record finds and reports it
            events.emit("loss.untried", why=f"{type(error).__name__}: {error}")
            return False
        return True

    def _pull(self, wanted: dict[str, Ids]) -> Mapping[str, Rows]:
        return {table: initial_rows(self._tables[table], self._served.spec.seed, ids) for table, ids in wanted.items()}

    def _list_spaces(self) -> list[tuple[str, Any]]:
        return list_spaces(self._recipe, self._source)
