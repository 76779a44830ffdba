"""The worker process of a parameter-server job: leases minibatches, pulls what they need, computes, pushes gradients.

    lease t+1, read it, ask for its rows ──▶ compute t ──▶ push t ──▶ (acknowledged by every server) commit t

Rows of the next minibatch travel while this one is computed, and so do gradients. A minibatch that is computed again,
here or elsewhere, has the same random numbers. On SIGTERM a worker commits what it has pushed, and leaves.
"""

import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trueline.checkpoint import model_files
from trueline.data.loading.seeding import SeededReader, seed_all
from trueline.data.source import Batch
from trueline.errors import RecipeError, TruelineError
from trueline.ps.client import PsClient
from trueline.ps.compared import ServedComparison
from trueline.ps.gradients import Gradients, Pulled
from trueline.ps.hot_rows import HotLookup, HotRows
from trueline.ps.master.ledger import MinibatchGrid
from trueline.ps.model.convert import convert_embeddings, refuse_table_weights
from trueline.ps.model.minibatch import LookupPlan
from trueline.ps.model.strategy import ServedModel
from trueline.ps.tasks import CommitRequest, Computed, LeaseReply, TasksLink
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.train import devices, dynamo
from trueline.train import settings as job_settings
from trueline.train.faults import Faults
from trueline.train.job_dir import JobDir
from trueline.train.link.grpc_client import resident_bytes
from trueline.train.settings import JobSettings
from trueline.train.step.options import Options
from trueline.train.step.plan import order_of
from trueline.train.worker import failure
from trueline.train.worker.main import bind_columns, check_digest
from trueline.train.worker.measure import call_model

WAIT_S, COMMIT_S = 2.0, 0.2
"""How long the master may hold a request for a minibatch; how long acknowledged ones are gathered for one commit."""
OUTSTANDING = 2
"""Pushes that may be on their way; one more minibatch is being computed."""


def main() -> int:
    """Trains in the job that the environment names (TRUELINE_JOB, _MASTER, _SECRET, _REF); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    job_dir, link = Path(os.environ["TRUELINE_JOB"]), TasksLink(os.environ["TRUELINE_REF"])
    settings = job_settings.load(job_dir)
    torch.set_num_threads(settings.threads)
    dynamo.defer()
    try:
        recipe = load_recipe(settings.recipe)
        check_digest(recipe.digest, "recipe", settings.recipe, settings)
        recipe = bind_columns(recipe, job_dir)
        served, source = build(recipe, settings, job_dir)
        loop = WorkerLoop(recipe, served, settings, job_dir, link, source)
        signal.signal(signal.SIGTERM, lambda *_: loop.leave())
        loop.run()
        return 0
    except Exception as error:  # noqa: BLE001  the process boundary: every worker would meet this error, so the job ends
        traceback.print_exc()
        code, what, detail = failure.describe(error, "recipe_raised")
        link.fail(code, what, detail)
        return 1


def build(recipe: Recipe, settings: JobSettings, job_dir: Path) -> tuple[ServedModel, Any]:
    """The recipe's model and its training records: the same in every worker."""
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    torch.manual_seed(settings.seed)
    model = recipe.make_model()
    if settings.weights:
        model_files.load_stored(model, JobDir(job_dir).weights)
    if settings.tables_above:
        convert_embeddings(model, settings.tables_above)
    model = model.to(devices.choose_own(settings.device, repeatable=False))
    model.train()
    optimizer = recipe.optimizer(model.parameters())
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler is not None else None
    served = ServedModel(model, optimizer, scheduler, seed=settings.seed, clip_norm=settings.clip_norm)
    if settings.weights:
        refuse_table_weights(served.tables, JobDir(job_dir).weights)
    if settings.clip_norm and settings.staleness == 0 and settings.workers > 1:
        raise RecipeError(
            "clip_norm with synchronous steps: each worker has the gradient of its part alone",
            hint="train with --staleness 1 or more, or with one worker",
        )
    return served, recipe.source("training")


@dataclass(slots=True)
class LeasedMinibatch:
    """A leased minibatch. `rows`: on their way, with the ids that they are of."""

    lease: LeaseReply
    minibatch: int
    batch: Batch
    records: int
    part: int
    parts: int
    data_ms: float
    prediction: LookupPlan | None = None
    hot: HotLookup | None = None
    rows: "Future[Pulled] | None" = None


@dataclass(slots=True)
class _Pushed:
    lease: LeaseReply
    minibatch: int
    computed: Computed
    acknowledged: bool = False


@dataclass
class WorkerLoop:
    recipe: Recipe
    served: ServedModel
    settings: JobSettings
    job_dir: Path
    link: TasksLink
    source: Any
    _lease: LeaseReply = field(default_factory=LeaseReply)
    _next: int = 0  # minibatch of the lease
    _pushed: deque[_Pushed] = field(default_factory=deque)
    _leaving: bool = False
    _finished: bool = False
    _committed_at: float = 0.0

    def __post_init__(self) -> None:
        job = self.settings
        place = partial(devices.place_batch, device=devices.of_model(self.served.model))
        self._reader = SeededReader(self.source, job.seed, place)
        blocks = Options.of(job).blocks(self.source)
        self._order = order_of(self.source.num_records, blocks, seed=job.seed)
        self._faults = Faults(job.faults, self.link.ref)
        self._blocks = blocks
        self._ahead = job.staleness != 0
        self._hot = HotRows(job.hot_rows, job.staleness) if job.hot_rows else None

    def leave(self) -> None:
        self._leaving = True

    def run(self) -> None:
        """Trains until the job is finished, or this worker leaves."""
        self.link.begin_beats(resident_bytes)
        ServedComparison(self.recipe, self.served, self.source, self.settings).expect_alike()
        joined = self.link.join(self.served.spec, self.source.num_records, self._blocks)
        batch = self.settings.global_batch
        self._grid = MinibatchGrid(num_records=self.source.num_records, batch=batch, parts=joined.parts)
        self._client = PsClient(
            self.link.find_servers(self.job_dir), joined.routing, os.environ["TRUELINE_SECRET"].encode(),
            half=self.settings.half_rows, outstanding=OUTSTANDING, on_routing=self.link.route,
        )  # fmt: skip
        try:
            self._client.initialize(self.served.initial())
            for work in self._works():
                self._train(work)
                self._commit(force=not self._ahead)
            self._client.drain()
            self._commit(force=True)
            if not self._finished:
                self.link.leave()
        except TruelineError as error:
            if self._client.refused is None:
                raise
            epoch, minibatch = self._client.refused
            raise type(error)(error.message, hint=f"{self._describe(epoch, minibatch)}; {error.hint}") from error
        finally:
            self._client.close()
            self.link.close()

    def _works(self) -> Iterator[LeasedMinibatch]:
        """Minibatches with their records; the pull of the next one begins before this one is computed."""
        here = self._fetch(wait=True)
        while here is not None:
            ahead = self._fetch(wait=False) if self._ahead else None
            yield here
            here = ahead or self._fetch(wait=True)

    def _fetch(self, *, wait: bool) -> LeasedMinibatch | None:
        """The next minibatch; None without `wait` if none may begin now, and at the end."""
        while self._next >= self._lease.stop:
            if self._leaving:
                return None
            if wait and self._pushed:  # others may wait for these
                self._client.drain()
                self._commit(force=True)
            self._lease = self.link.lease(WAIT_S if wait else 0.0)
            self._next = self._lease.start
            if self._lease.finished:
                self._finished = True
                return None
            if not wait:
                break
        if self._next >= self._lease.stop or self._leaving:
            return None
        work = self._read(self._lease, self._next)
        self._next += 1
        return work

    def _read(self, lease: LeaseReply, minibatch: int) -> LeasedMinibatch:
        began = time.perf_counter()
        start, stop, part, parts = self._grid.locate(minibatch)
        ids = self._order.at(np.arange(start, stop), epoch=lease.epoch)
        batch = self._reader.read(ids, epoch=lease.epoch)
        work = LeasedMinibatch(lease, minibatch, batch, stop - start, part, parts, 0.0)
        if len(self.served.tables):
            work.prediction = self.served.tables.predict(batch.inputs)
        wanted = {} if work.prediction is None else work.prediction.wanted
        if self._hot is not None:
            self._hot.note(lease.step)
            work.hot = self._hot.look_up(wanted)
            wanted = work.hot.missing
        work.rows = self._client.start_pull(wanted, dense=True)
        work.data_ms = 1e3 * (time.perf_counter() - began)
        return work

    def _train(self, work: LeasedMinibatch) -> None:
        step = work.lease.epoch * self._grid.steps + self._grid.step_of(work.minibatch)
        self._faults.at("before", step)
        began = time.perf_counter()
        assert work.rows is not None
        fresh = work.rows.result()
        pulled = self._add_copies(work.hot, fresh)
        waited = time.perf_counter()
        self.served.load(pulled.dense)
        seed_all(self.settings.seed, work.lease.epoch, work.minibatch)
        tables = self.served.tables.minibatch(
            lambda wanted: self._client.pull(wanted, dense=False).rows, work.batch.inputs,
            prediction=work.prediction, rows=pulled.rows if work.prediction is not None else None,
        )  # fmt: skip
        try:
            with tables as minibatch:
                loss = self.recipe.loss(call_model(self.served.model, work.batch.inputs), work.batch.labels).mean()
                weight = work.records if self.recipe.weight is None else float(self.recipe.weight(work.batch.labels))
                loss.backward()  # type: ignore[no-untyped-call]
                rows, dense, norm = self.served.gradients(minibatch)
        except TruelineError:
            raise
        except Exception as error:
            error.add_note(self._describe(work.lease.epoch, work.minibatch))
            raise
        self._faults.at("backward", step)
        lrs = self.served.lrs(min(fresh.steps.values(), default=step))
        self._client.push(Gradients(
            epoch=work.lease.epoch, minibatch=work.minibatch, weight=weight, lrs=lrs, tables=rows, dense=dense,
            pulled=pulled.steps, part=work.part, parts=work.parts,
        ))  # fmt: skip
        ended = time.perf_counter()
        computed = Computed(work.minibatch, work.records, float(loss.detach()), norm, lrs[0], work.data_ms,
                            1e3 * (ended - waited), 1e3 * (waited - began))  # fmt: skip
        self._pushed.append(_Pushed(work.lease, work.minibatch, computed))
        self._faults.at("applied", step)
        if not self._ahead:
            self._client.drain()

    def _describe(self, epoch: int, minibatch: int) -> str:
        start, stop, _, _ = self._grid.locate(minibatch)
        ids = self._order.at(np.arange(start, min(stop, start + 3)), epoch=epoch).tolist()
        return f"in minibatch {minibatch} of epoch {epoch}, records {ids} and others"

    def _add_copies(self, lookup: HotLookup | None, pulled: Pulled) -> Pulled:
        """The rows with those that this worker had; `steps` as of the oldest of them."""
        if self._hot is None or lookup is None:
            return pulled
        steps = pulled.steps.values()
        rows = self._hot.join(lookup, pulled.rows, min(steps, default=self._hot.step))
        self._hot.note(max(steps, default=0))
        return Pulled(rows, pulled.dense, {ref: min(step, lookup.oldest) for ref, step in pulled.steps.items()})

    def _commit(self, *, force: bool = False) -> None:
        """Tells the master what every server has, in the order of the lease."""
        for epoch, minibatch in self._client.take_acknowledged():
            for one in self._pushed:
                if (one.lease.epoch, one.minibatch) == (epoch, minibatch):
                    one.acknowledged = True
        now = time.monotonic()
        bounded = self.settings.staleness >= 0
        if not (force or bounded or now - self._committed_at >= COMMIT_S):
            return
        self._committed_at = now
        while self._pushed and self._pushed[0].acknowledged:
            lease, computed = self._pushed[0].lease, []
            while self._pushed and self._pushed[0].acknowledged and self._pushed[0].lease is lease:
                computed.append(self._pushed.popleft().computed)
            upto = computed[-1].minibatch + 1
            ref = self.link.ref
            self.link.commit(CommitRequest(ref, lease.token, lease.epoch, upto, tuple(computed), time.monotonic_ns()))
