"""What the verbs share: how a verb is declared, its common options, and how a result is said."""

from __future__ import annotations

import functools
import json
import os
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trueline.settings import Declared, declared

if TYPE_CHECKING:
    from trueline.storage.location import Location

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]

DEBUG = "TRUELINE_DEBUG"
"""Environment variable of --debug, so that child processes know of it too."""


class _Verb(click.Command):
    """Says its options in sections: those of `section`, then the others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title in sorted(sections, key="Options".__eq__):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def section(title: str) -> Callable[..., Decorator[Any]]:
    """`click.option` for options that stand together under `title` in the help."""
    return functools.partial(click.option, cls=type("Option", (click.Option,), {"section": title}))


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
        return click.command(name, cls=_Verb, epilog=epilog)(debugged)

    return declare


def setting_options(settings: type, *, without: Collection[str] = (), unset: bool = False) -> Decorator[Any]:
    """An option for each setting that the dataclass `settings` declares, except `without`; `unset`: None by default."""

    def decorate(function: Function) -> Function:
        for one in reversed(declared(settings)):
            if one.name not in without:
                function = _setting_option(one, unset=unset)(function)
        return function

    return decorate


def _setting_option(one: Declared, *, unset: bool) -> Decorator[Any]:
    setting = one.setting
    option = section(setting.section) if setting.section else click.option
    if one.kind is bool:
        if unset:
            return option(f"--{one.flag}/--no-{one.flag}", one.name, default=None, help=setting.help)
        return option(f"--{one.flag}", one.name, is_flag=True, help=setting.help)
    kind: Any = one.kind
    if setting.choices:
        kind = click.Choice(setting.choices)
    elif setting.bounds:
        high = setting.high if setting.below is None else setting.below
        ranged = click.IntRange if one.kind is int else click.FloatRange
        kind = ranged(setting.low, high, max_open=setting.below is not None)  # type: ignore[arg-type]
    default = None if unset else one.default
    default = default // setting.unit if setting.unit > 1 and default is not None else default

    def scale(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return value if value is None else value * setting.unit

    return option(
        f"--{one.flag}",
        one.name,
        type=kind,
        default=default,
        show_default=default not in (None, "", False, 0),
        metavar=setting.metavar or None,
        help=setting.help,
        callback=scale if setting.unit > 1 else None,
    )


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        os.environ[DEBUG] = "1"


recipe_argument = click.argument("recipe")
json_option = click.option("--json", "as_json", is_flag=True, help="Say the result as one line of JSON.")
job_argument = click.argument("job")
uris_argument = click.argument("uris", nargs=-1, required=True, metavar="URI...")
format_option = click.option(
    "--format", "format_", metavar="NAME", default="", help="Format of the files, where their ending does not say it."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
tracking_option = click.option(
    "--tracking-uri",
    metavar="URI",
    help="MLflow store; MLFLOW_TRACKING_URI or ./mlflow.db when left out.",
)


def say(text: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """The result on stdout: `text` for people or `facts` as one line of JSON."""
    click.echo(json.dumps(facts, default=str) if as_json else text.rstrip("\n"))


def checkpoint_path(given: str) -> Location:
    """`given`; for the folder of a job its best checkpoint if it was asked for one, else the newest good one, which is
    also meant by a URL with checkpoints in it. Which one it is, is an event.

    Raises UsageError, StorageError.
    """
    from trueline.errors import UsageError
    from trueline.storage.location import parse_location
    from trueline.train.job_dir import JobDir

    folder = parse_location(given)
    if isinstance(folder, Path):
        if not JobDir(folder).settings.is_file():
            return folder
        from trueline.train import settings

        job = settings.load(folder)
        folder = job.checkpoints or JobDir(folder).checkpoints
        if job.wants_best and (best := _best(folder)) is not None:
            return best
    from trueline.checkpoint import checkpoint

    if checkpoint.exists(folder):
        return folder
    newest = checkpoint.latest(folder)
    if newest is None:
        raise UsageError(f"{given} has no checkpoint yet", hint="let the job train, or go on with --resume")
    return newest.path


def _best(folder: Location) -> Location | None:
    from trueline import events
    from trueline.checkpoint import checkpoint

    best = checkpoint.best(folder)
    if best is not None:
        events.emit("checkpoint.chosen", path=str(best))
    return best


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
