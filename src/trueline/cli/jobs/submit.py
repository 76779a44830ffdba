"""`trueline submit`."""

from typing import Any

from trueline.cli.jobs import _launch, _stores
from trueline.cli.options import Output, recipe_argument, section, verb

_EXAMPLES = """
trueline submit digits/recipe.py --on slurm --workers 2:8 --store /shared/jobs
    on the cluster whose sbatch is in PATH; returns at once

trueline submit digits/recipe.py --on slurm:staging --store s3://bucket/jobs --priority 5
    with the settings of [engine.slurm.staging] in trueline.toml; before the jobs of a lower priority

trueline submit digits/recipe.py --on kubernetes:gpu --store s3://bucket/jobs
    in pods of the cluster of your kubeconfig

trueline submit digits/recipe.py --on local --store jobs
    detached processes of this machine: the same commands, without a cluster
"""
OF_THE_ENGINE = ("hosts", "remote_trueline", "listen", "cores", "interface", "ports", "checkpoints", "page_port")
_job = section("The job")


@verb("submit", examples=_EXAMPLES, first=("on", "store", "workers", "epochs", "global_batch"))
@recipe_argument
@_stores.on_option(required=True)
@_stores.store_option
@_job("--name", default="", metavar="NAME", help="The job is NAME-1, NAME-2, ...; else the recipe's name.")
@_job("--priority", type=int, default=0, metavar="N", help="Higher ones start first, on local and podman.")
@_launch.training_options(without=OF_THE_ENGINE)
def command(
    recipe: str, on: str, store: str | None, name: str, priority: int, workers: str | None, **given: Any
) -> Output:
    """Submit a training job to a cluster, and return.

    The recipe's folder is copied into the store, without what .gitignore names, and the engine starts the job's head;
    the head asks the engine for more hosts, up to MAX workers. Checkpoints, logs and the state of the job are in the
    store: jobs, logs, scale, halt and resume work from every machine that sees it. What the engine needs to know
    (partition, image, slots) is in trueline.toml under [engine.NAME].
    """
    from trueline.train.cluster import operate

    settings = {key: value for key, value in given.items() if value is not None}
    where = operate.submit(
        recipe, on=on, engine=_stores.read_engine(on), store=_stores.choose_store(store), workers=workers or "3",
        settings=settings, name=name, priority=priority,
    )  # fmt: skip
    text = (
        f"{where.name} is submitted to {on}; it is in {where.where}\n"
        f"  trueline logs -f {where.name}    follow it: also while it waits\n"
        f"  trueline jobs               see all jobs of the store\n"
        f"  trueline halt {where.name}       end it after a checkpoint\n"
        f"  trueline resume {where.name}     continue it then, here or --on another engine"
    )
    return Output(text, {"job": where.name, "store": str(where.where), "engine": on})
