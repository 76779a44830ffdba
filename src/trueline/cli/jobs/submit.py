"""`trueline submit`."""

from pathlib import Path
from typing import Any

import click

from trueline.cli.jobs import _launch, _stores
from trueline.cli.options import Output, recipe_argument, section, verb
from trueline.errors import UsageError

_EXAMPLES = """
trueline submit digits/recipe.py --on slurm --workers 2:8 --store /shared/jobs
    on the cluster whose sbatch is in PATH; returns at once

trueline submit digits/recipe.py --on slurm:staging --store s3://bucket/jobs --priority 5
    with the settings of [engine.slurm.staging] in trueline.toml; before the jobs of a lower priority

trueline submit digits/recipe.py --on kubernetes:gpu --store s3://bucket/jobs
    in pods of the cluster of your kubeconfig

trueline submit digits/recipe.py --on local --store jobs
    detached processes of this machine: the same commands, without a cluster

trueline submit own_loop.py --on slurm --workers 2:8 -- --lr 0.1
    a script with a loop over trueline.Elastic; arguments after -- are the script's

trueline submit clicks/recipe.py --on slurm --strategy ps --servers 2 --workers 4
    parameter servers and workers together on one host of the cluster, with a slot for each

trueline submit manifest.yml --model model-files --set gpus=0
    a manifest of Fabric for Deep Learning, with another value for one of its fields
"""
OF_THE_ENGINE = ("hosts", "remote_trueline", "listen", "cores", "interface", "ports", "checkpoints", "page_port")
_job = section("The job")
_manifest = section("A manifest of Fabric for Deep Learning")


@verb("submit", examples=_EXAMPLES, first=("on", "store", "workers", "epochs", "global_batch"))
@recipe_argument
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_stores.on_option()
@_stores.store_option
@_job("--name", default="", metavar="NAME", help="The job is NAME-1, NAME-2, ...; else the recipe's name.")
@_job("--priority", type=int, default=0, metavar="N", help="Higher ones start first, on local and podman.")
@_manifest("--model", metavar="FOLDER|ZIP", help="The model definition; else the manifest's folder.")
@_manifest("--set", "fields", multiple=True, metavar="FIELD=VALUE", help="In place of the manifest's; repeatable.")
@_launch.training_options(without=OF_THE_ENGINE)
def command(
    recipe: str, arguments: tuple[str, ...], on: str | None, store: str | None, workers: str | None, **given: Any
) -> Output:
    """Submit a training job to a cluster, and return.

    The recipe's folder is copied into the store, without what .gitignore names, and the engine starts the job's head;
    the head asks the engine for more hosts, up to MAX workers. Checkpoints, logs and the state of the job are in the
    store: jobs, logs, scale, halt and resume work from every machine that sees it. What the engine needs to know
    (partition, image, slots) is in trueline.toml under [engine.NAME]. RECIPE may be a script with a loop over
    trueline.Elastic, with its ARGUMENTS; or a manifest of Fabric for Deep Learning (manifest.yml): its learners run on
    the same engines, without --on on this machine.
    """
    engine = _stores.read_engine(on) if on else None
    from trueline.train.cluster import operate
    from trueline.train.learners.submission import is_manifest

    name, priority, model, fields = (given.pop(key) for key in ("name", "priority", "model", "fields"))
    settings = {key: value for key, value in given.items() if value is not None}
    if is_manifest(recipe):
        if workers or settings or arguments:
            other = ", ".join([*(["workers"] if workers else ()), *settings, *arguments])
            raise UsageError(f"a manifest has no use for {other}", hint="its own fields change by --set FIELD=VALUE")
        return _submit_manifest(recipe, on or "local", store, model, fields, name=name, priority=priority)
    if model or fields:
        raise UsageError("--model and --set are for manifests (manifest.yml)", hint="leave them out")
    if not on or engine is None:
        raise UsageError("--on is missing: the engine that the job runs on", hint="for example --on local")
    where = operate.submit(
        recipe, *arguments, on=on, engine=engine, store=_stores.choose_store(store),
        workers=workers or "3", settings=settings, name=name, priority=priority,
    )  # fmt: skip
    return _describe(where, on)


def _submit_manifest(
    recipe: str, on: str, store: str | None, model: str | None, fields: tuple[str, ...], **how: Any
) -> Output:
    from trueline.train.learners.submission import submit_manifest

    if other := [one for one in fields if "=" not in one]:
        raise UsageError(f"--set {other[0]} is not FIELD=VALUE", hint="for example --set gpus=0")
    where, manifest, notes = submit_manifest(
        Path(recipe), on=on, engine=_stores.read_engine(on), store=_stores.choose_store(store, default="jobs"),
        model=Path(model) if model else None, given=dict(one.split("=", 1) for one in fields), **how,
    )  # fmt: skip
    return _describe(where, on, notes, learners=manifest.learners)


def _describe(where: Any, on: str, notes: tuple[str, ...] = (), **facts: Any) -> Output:
    text = (
        f"{where.name} is submitted to {on}; it is in {where.where}\n"
        f"  trueline logs -f {where.name}    follow it: also while it waits\n"
        f"  trueline jobs               see all jobs of the store\n"
        f"  trueline halt {where.name}       end it after a checkpoint\n"
        f"  trueline resume {where.name}     continue it then, here or --on another engine"
    )
    text = "\n".join([*(f"note: {note}" for note in notes), text])
    noted = {"notes": list(notes)} if notes else {}
    return Output(text, {"job": where.name, "store": str(where.where), "engine": on, **noted, **facts})
