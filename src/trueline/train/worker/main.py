"""The worker process: a recipe's functions in an `Elastic` loop, or a script with a custom loop.

The agent forks it; it lives until the job ends. A script runs as `__main__` with its arguments, the same in every
worker. On SIGTERM a worker leaves between two steps. An exception ends the job, because every worker would meet it.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from trueline import files
from trueline.checkpoint import model_files
from trueline.columns.fitted import decode as decode_columns
from trueline.data.loading import seeding
from trueline.data.source import Batch, Countable, Source
from trueline.errors import CheckpointError, DataError, UsageError
from trueline.parallel.exchange import is_collective
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.train import devices, dynamo, records
from trueline.train import settings as job_settings
from trueline.train.elastic import Elastic
from trueline.train.job_dir import JobDir
from trueline.train.link.grpc_client import ask_status, connect, is_replacement
from trueline.train.rehearsal import fork as rehearsal
from trueline.train.rehearsal import joined
from trueline.train.settings import JobSettings
from trueline.train.step import model_traits
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.contribution import StepBatch
from trueline.train.step.optimizer_step import OptimizerStep
from trueline.train.step.options import Options
from trueline.train.step.validation import Rule, Surround, Validation, keep_exchange
from trueline.train.worker import failure
from trueline.train.worker.measure import call_model, expect_no_memory, make_measure
from trueline.train.worker.recipe_trial import RecipeTrial


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a strategy that stands above train puts in the place of parts of the worker."""

    recipe: Recipe
    checkpointer: Callable[[JobSettings, Path, dict[str, Any]], Checkpointer] = Checkpointer.of
    exchange: Surround = keep_exchange
    clips: bool = False
    """The exchange clips gradients, of more than the model's parameters."""


def main(replace_parts: Callable[[Recipe, JobSettings], WorkerParts] | None = None) -> int:
    """Trains in the job that the environment names (TRUELINE_JOB, _MASTER, _SECRET, _REF); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    job_dir = Path(os.environ["TRUELINE_JOB"])
    settings = job_settings.load(job_dir)
    torch.set_num_threads(settings.threads)
    dynamo.defer()
    if settings.script:
        return _run_script(settings)
    return _run_recipe(settings, job_dir, replace_parts or (lambda recipe, _: WorkerParts(recipe)))


def _run_recipe(
    settings: JobSettings, job_dir: Path, replace_parts: Callable[[Recipe, JobSettings], WorkerParts]
) -> int:
    job: Elastic | None = None
    try:
        recipe = load_recipe(settings.recipe)
        check_digest(recipe.digest, "recipe", settings.recipe, settings)
        recipe = bind_columns(recipe, job_dir)
        parts = replace_parts(recipe, settings)
        job = build(parts, settings, job_dir)
        _leave_on_sigterm(job.leave)
        train(recipe, job, Options.of(settings))
        return 0
    except Exception as error:  # noqa: BLE001  the process boundary: every worker would meet this error, so the job ends
        rehearsal.end_fork()
        traceback.print_exc()
        if isinstance(error, RuntimeError) and is_collective(error):
            return failure.UNREACHABLE_EXIT  # the master replaces this process
        if devices.is_lost(error):
            return failure.LOST_EXIT  # the master replaces this process
        _fail(error, "recipe_raised", connect(lambda _: None).fail if job is None else job.fail)
        return 1


def _fail(error: Exception, code: str, fail: Callable[[str, str], None]) -> None:
    code, what, detail = failure.describe(error, code)
    fail(f"{code}|{what}", detail)


def _leave_on_sigterm(leave: Callable[[], None]) -> None:
    def handle(*_: object) -> None:
        threading.Thread(target=leave, name="leave", daemon=True).start()  # gRPC must not run in a signal handler

    signal.signal(signal.SIGTERM, handle)


def check_digest(digest: str, kind: str, name: str, settings: JobSettings) -> None:
    if digest != settings.recipe_digest:
        raise CheckpointError(
            f"the {kind} {name} was changed since the job began",
            hint=f"start a new job with the changed {kind}, or restore the old one",
        )


def bind_columns(recipe: Recipe, job_dir: Path) -> Recipe:
    """The recipe with its columns as they were fitted when the job was prepared."""
    path = JobDir(job_dir).columns
    return recipe.with_columns(decode_columns(path.read_bytes(), str(path)) if path.exists() else None)


def build(parts: WorkerParts, settings: JobSettings, job_dir: Path) -> Elastic:
    """The job's loop: same seed, same model in every worker."""
    recipe, options = parts.recipe, Options.of(settings)
    if parts.clips:
        options = dataclasses.replace(options, clip_norm=0.0)
    random.seed(settings.seed)
    np.random.seed(settings.seed % 2**32)
    torch.manual_seed(settings.seed)
    model = recipe.make_model()
    if settings.weights:
        model_files.load_stored(model, JobDir(job_dir).weights)
    model = model.to(devices.choose_own(settings.device, repeatable=settings.bitwise))
    if not model.training:  # as pretrained models are; a part in evaluation mode is frozen on purpose
        model.train()
    optimizer = recipe.optimizer(model.parameters())
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler is not None else None
    source = recipe.source("training")
    if not is_replacement() and joined.needs_trial(model, optimizer, scheduler):
        steps = settings.epochs * -(-source.num_records // settings.global_batch)
        rehearsal.expect_same_after_join(lambda: _make_step(recipe, model, options), model, steps)
    records.expect_same_files(data := source.fingerprint())
    facts = {"recipe": {"name": recipe.name, "digest": recipe.digest}, "data": data}
    if settings.weights:
        facts["weights"] = settings.started_from
    if fills := getattr(source, "fills", None):
        facts["data_fills"] = fills  # what stands in the place of missing values
    if recipe.fitted is not None:
        facts["columns"] = msgspec.to_builtins(recipe.fitted)
    traits = _find_traits(RecipeTrial(recipe, model, source, settings), source)
    return Elastic(
        model, optimizer, source, global_batch=settings.global_batch, epochs=settings.epochs, seed=settings.seed,
        scheduler=scheduler, options=options, validation=validation_of(recipe, model, settings),
        checkpointer=parts.checkpointer(settings, job_dir, facts), faults=settings.faults,
        traits=traits, owned=True, exchange=parts.exchange,
    )  # fmt: skip


def _find_traits(trial: RecipeTrial, source: Source) -> model_traits.ModelTraits:
    """Where the first records cannot be read because of missing values, or of text among numbers, the error counts
    these in all records."""
    try:
        return trial.find_traits()
    except DataError:
        if isinstance(source, Countable):
            source.check_missing()
        raise


def _make_step(recipe: Recipe, model: torch.nn.Module, options: Options) -> OptimizerStep:
    """The optimizer's side of a step as in a worker that joins, with a copy of `model`."""
    model = joined.copy_model(model)
    optimizer = recipe.optimizer(model.parameters())
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler is not None else None
    return OptimizerStep(model, optimizer, scheduler, options, owned=True)


def validation_of(recipe: Recipe, model: torch.nn.Module, settings: JobSettings) -> Validation | None:
    """The evaluation while training that the settings configure, if any."""
    if not (settings.evaluate_every or settings.monitor or settings.patience):
        return None
    rule = Rule(every=settings.evaluate_every, monitor=settings.monitor or "loss", patience=settings.patience)
    names = tuple(recipe.metrics()) if recipe.metrics is not None else ()
    source = recipe.source("evaluation")
    compute = make_measure(recipe, model, source)

    def measure(start: int, stop: int) -> list[float]:
        with model_traits.evaluating(model):
            sums = compute(start, stop)
        return [sums["loss"], *(sums[f"metric {name}"] for name in names)]

    if not is_replacement():
        with model_traits.evaluating(model):
            expect_no_memory(compute, source.num_records)
    return Validation(rule=rule, num_records=source.num_records, names=names, measure=measure)


def train(recipe: Recipe, job: Elastic, options: Options) -> None:
    """The loop. If a batch raises, `blame` finds the records that cause it."""
    cast = autocast(job.model, options)

    def loss_of(batch: Batch | StepBatch) -> torch.Tensor:
        with cast():
            return recipe.loss(call_model(job.model, batch.inputs), batch.labels)

    job.try_with(lambda batch: loss_of(batch).mean())
    for batch in job:
        try:
            with job.forward():
                loss = loss_of(batch)
            weight = None if recipe.weight is None else recipe.weight(batch.labels)
        except Exception as error:  # noqa: BLE001  a user's code may raise anything
            job.blame(error)
            continue
        job.step(loss, weight=weight)


def autocast(model: torch.nn.Module, options: Options) -> Callable[[], AbstractContextManager[None]]:
    """The context in which forward and loss are computed."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if options.precision not in dtypes:
        return contextlib.nullcontext
    device = next(model.parameters()).device.type
    return functools.partial(torch.autocast, device, dtype=dtypes[options.precision])


def _run_script(settings: JobSettings) -> int:
    _leave_on_sigterm(lambda: connect(lambda _: None).leave())
    try:
        script, *arguments = settings.script
        check_digest(files.sha256_file(Path(script)), "script", script, settings)
        seeding.seed_all(
            settings.seed
        )  # what a script draws without a seed of its own is then drawn alike in all workers
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
        rehearsal.end_fork()
        expect_finished(ask_status(), script)
        return 0
    except Exception as error:  # noqa: BLE001  the process boundary: every worker would meet this error, so the job ends
        rehearsal.end_fork()
        traceback.print_exc()
        if devices.is_lost(error):
            return failure.LOST_EXIT
        if not _has_finished(ask_status()):  # else only this process failed
            _fail(error, "script_raised", connect(lambda _: None).fail)
        return 1


def expect_finished(status: dict[str, object] | None, script: str) -> None:
    """Raises UsageError if the script has ended before its job; an unreachable master (None) proves nothing."""
    if status is not None and not _has_finished(status):
        raise UsageError(
            f"the script {script} ended before its loop over trueline.Elastic did",
            hint="make one Elastic in every worker and iterate over it to its end; to stop early (instead of `break`), "
            'write Elastic(validation=Validation(rule=Rule(every=50, monitor="loss", patience=3), ...)), which ends '
            "the loop in all workers after the same step",
        )


def _has_finished(status: dict[str, object] | None) -> bool:
    return status is not None and status.get("phase") == "finished"
