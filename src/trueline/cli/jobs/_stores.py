"""Options and helpers of the verbs that know jobs in a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trueline.cli.options import Decorator, find_config, read_config
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.engine.cluster.settings import AnySettings
    from trueline.train.cluster.store import JobStore


def on_option(*, required: bool = False) -> Decorator[Any]:
    return click.option(
        "--on",
        required=required,
        metavar="ENGINE[:NAME]",
        help="hosts, kubernetes, local, podman, ray or slurm; NAME: a table in trueline.toml.",
    )


store_option = click.option("--store", metavar="FOLDER|URL", help="Where submitted jobs are; else the last one used.")


def read_engine(on: str) -> AnySettings:
    """The settings of an engine from the nearest trueline.toml, for a command that submits to it. Raises UsageError."""
    from trueline.engine.cluster.open import begin_connecting
    from trueline.engine.cluster.settings import parse_engine

    file = find_config()
    tables = read_config(file).get("engine", {}) if file is not None else {}
    settings = parse_engine(on, tables, str(file or "trueline.toml"))
    begin_connecting(settings)
    return settings


def choose_store(given: str | None, *, default: str = "") -> str:
    """The store of --store, else the one that was used last, else `default`. Raises UsageError."""
    from trueline.train.cluster.operate import list_remembered

    if given:
        return given
    known = list_remembered()
    if not known and not default:
        raise UsageError(
            "there is no store yet", hint="name one with --store: a folder that all hosts see, or s3://..."
        )
    return known[0] if known else default


def list_stores(given: str | None) -> list[str]:
    """The store of --store, else all that were used on this machine."""
    from trueline.train.cluster.operate import list_remembered

    return [given] if given else list_remembered()


def find_stored(job: str, store: str | None) -> JobStore | None:
    """The submitted job that `job` names; None: it is one of this machine. Raises UsageError."""
    from trueline.train.cluster import operate

    if not store and any((folder / "job.json").is_file() for folder in (Path(job), Path("runs") / job)):
        return None
    stores = list_stores(store)
    found = operate.find(job, stores)
    if found is None and store:
        raise operate.describe_missing(job, stores)
    return found
