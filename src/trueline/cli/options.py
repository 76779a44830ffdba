"""Declares verbs: their common options, and the output of a result as text or JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import textwrap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import click

from trueline.cli._progress import DEBUG, progress
from trueline.errors import UsageError
from trueline.events import printable
from trueline.settings import DeclaredSetting, declared_settings

if TYPE_CHECKING:
    from trueline.storage.location import Location

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]


RED = ("quarantined:", "ruined:")
"""How lines begin that are red on a terminal."""


class Output(NamedTuple):
    """The result of a verb: on stdout as `text`, or as `facts` with --json."""

    text: str
    facts: Any
    code: int = 0


FIRST = "Used most"
REST = "Options"


class _Verb(click.Command):
    """Shows its options in sections: the parameters that `first` names, those of `section`, the rest."""

    first: Collection[str] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {FIRST: []} if self.first else {}
        params = self.get_params(ctx)
        for param in sorted(params, key=lambda one: one.name not in self.first):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                title = FIRST if param.name in self.first else getattr(param, "section", REST)
                sections.setdefault(title, []).append(record)
        for title in sorted(sections, key=REST.__eq__):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def section(title: str) -> Callable[..., Decorator[Any]]:
    """`click.option` for options that the help lists under `title`."""
    return functools.partial(click.option, cls=type("Option", (click.Option,), {"section": title}))


def verb(
    name: str, *, examples: str, shows_progress: bool = False, first: Collection[str] = ()
) -> Callable[[Callable[..., Any]], click.Command]:
    """Declares a verb whose function returns an Output, or None if it prints by itself.

    The function's docstring is the help, followed by the options and `examples`. `shows_progress`: the events of the
    function appear on stderr, without --quiet. `first`: parameters whose options the help lists first.
    """
    paragraphs = (textwrap.indent(paragraph, "  ") for paragraph in examples.strip().split("\n\n"))
    epilog = "Examples:\n\n" + "\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs)

    def declare(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        def run(*, as_json: bool, quiet: bool = False, **given: Any) -> int:
            shown = shows_progress and not given.get("detach")
            with progress(quiet=quiet) if shown else contextlib.nullcontext():
                output: Output | None = function(**given)
            if output is not None and (as_json or output.text):
                text = json.dumps(output.facts, default=str) if as_json else output.text.rstrip("\n")
                lines = printable(text, multiline=True).split("\n")
                click.echo("\n".join(click.style(line, fg="red") if line.startswith(RED) else line for line in lines))
            return 0 if output is None else output.code

        command = click.command(name, cls=_Verb, epilog=epilog)(run)
        command.first = first
        command.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one line of JSON."))
        if shows_progress:
            command.params.append(click.Option(["-q", "--quiet"], is_flag=True, help="Show no progress."))
        debug = f"Show tracebacks of errors (or set {DEBUG}=1)."
        command.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_set_debug, help=debug)
        )
        return command

    return declare


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        os.environ[DEBUG] = "1"


def combine(*decorators: Decorator[Any]) -> Decorator[Any]:
    """One decorator for several, in their order."""

    def decorate(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def setting_options(
    settings: type, *, only: Collection[str] = (), without: Collection[str] = (), unset: bool = False
) -> Decorator[Any]:
    """An option for each setting that the dataclass `settings` declares; `unset`: None by default."""
    chosen = [one for one in declared_settings(settings) if one.name not in without and (not only or one.name in only)]
    return combine(*(_setting_option(one, unset=unset) for one in chosen))


def _setting_option(one: DeclaredSetting, *, unset: bool) -> Decorator[Any]:
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


recipe_argument = click.argument("recipe")
job_argument = click.argument("job")
uris_argument = click.argument("uris", nargs=-1, required=True, metavar="URI...")
format_option = click.option(
    "--format", metavar="NAME", default="", help="Format of the files, if their names do not end in it."
)
tracking_option = click.option(
    "--tracking-uri", metavar="URI", help="MLflow store; else MLFLOW_TRACKING_URI, else ./mlflow.db."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace a file or folder that exists.")


def batch_options(mode: str) -> Decorator[Any]:
    """Options of `evaluate` and `predict`; `mode` is the default."""
    from trueline.data.source import Mode

    modes = click.Choice(get_args(Mode))
    return combine(
        click.option("--mode", type=modes, default=mode, show_default=True, help="Which records."),
        click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Number of processes."),
        click.option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N; else the recipe's, else auto."),
        click.option("--format", type=click.Choice(["parquet", "jsonl"]), default="parquet", show_default=True,
                     help="Of the parts in a folder."),
    )  # fmt: skip


def checkpoint_path(given: str) -> Location:
    """The checkpoint that `given` names: itself, or of a job or a URL the newest good one, or a job's best if it has
    --monitor or --patience. A choice of the best is an event.

    Raises UsageError, StorageError.
    """
    from trueline import events
    from trueline.checkpoint import checkpoint
    from trueline.storage.location import parse_location
    from trueline.train import settings
    from trueline.train.job_dir import JobDir

    folder = parse_location(given)
    if isinstance(folder, Path):
        if not folder.exists():
            raise UsageError(f"there is no {given}", hint="name a checkpoint, a job's folder or a file of weights")
        if not JobDir(folder).settings.is_file():
            return folder
        job = settings.load(folder)
        folder = job.checkpoints or JobDir(folder).checkpoints
        if job.wants_best and (best := checkpoint.best(folder)) is not None:
            events.emit("checkpoint.chosen", path=str(best))
            return best
    if checkpoint.exists(folder):
        return folder
    newest = checkpoint.latest(folder)
    if newest is None:
        raise UsageError(f"{given} has no checkpoint yet", hint="let the job train, or continue it with --resume")
    return newest.path


ENGINE = "engine"
"""The table of trueline.toml that describes engines, not a verb."""


def find_config() -> Path | None:
    """The nearest trueline.toml, in the working directory or a folder above it."""
    folders = (Path.cwd(), *Path.cwd().parents)
    return next((place for folder in folders if (place := folder / "trueline.toml").is_file()), None)


def read_config(file: Path) -> dict[str, Any]:
    """Raises UsageError."""
    import tomllib

    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint="correct it, or move it away") from error


def parse_pairs(given: tuple[str, ...], flag: str) -> dict[str, str]:
    """`("lr=0.1",)` as `{"lr": "0.1"}`. Raises UsageError."""
    pairs = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"{flag} '{text}' is not NAME=VALUE")
        pairs[name] = value
    return pairs
