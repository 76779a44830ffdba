"""What the verbs share: how a verb is declared, its common options, and how a result is said."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

DEBUG = "TRUELINE_DEBUG"
"""Environment variable of --debug, so that child processes know of it too."""


def verb(name: str, *, examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Declares a verb: its function's docstring is the help, `examples` stands below the options."""
    paragraphs = (textwrap.indent(one, "  ") for one in examples.strip().split("\n\n"))
    epilog = "Examples:\n\n" + "\n\n".join(f"\b\n{one}" for one in paragraphs)

    def declare(function: Callable[..., Any]) -> click.Command:
        debugged = click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_set_debug,
            help=f"Show tracebacks of errors (or set {DEBUG}=1).",
        )(function)
        return click.command(name, epilog=epilog)(debugged)

    return declare


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        os.environ[DEBUG] = "1"


recipe_argument = click.argument("recipe")
json_option = click.option("--json", "as_json", is_flag=True, help="Say the result as one line of JSON.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
tracking_option = click.option(
    "--tracking-uri",
    metavar="URI",
    help="MLflow store; MLFLOW_TRACKING_URI or ./mlflow.db when left out.",
)


def say(text: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """The result on stdout: `text` for people or `facts` as one line of JSON."""
    click.echo(json.dumps(facts, default=str) if as_json else text.rstrip("\n"))


def checkpoint_path(given: str) -> Path:
    """`given`, or the newest good checkpoint when it is the folder of a job. Raises UsageError,
    CheckpointError."""
    from trueline.errors import UsageError

    folder = Path(given)
    if not (folder / "job.json").is_file():
        return folder
    from trueline.state import checkpoint

    newest = checkpoint.latest(folder / "checkpoints")
    if newest is None:
        raise UsageError(f"the job in {folder} has no checkpoint yet", hint="let it train, or go on with --resume")
    return newest.path


def pairs(given: tuple[str, ...], flag: str) -> dict[str, str]:
    """`("lr=0.1",)` as `{"lr": "0.1"}`. Raises UsageError."""
    from trueline.errors import UsageError

    found = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name:
            raise UsageError(f"{flag} '{one}' is not NAME=VALUE")
        found[name] = value
    return found
