"""The command `trueline`: finds the verb, fills its options, runs it, and turns errors into exit codes.

A flag overrides its environment variable, which overrides trueline.toml, which overrides the built-in default.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trueline.cli._progress import DEBUG
from trueline.cli.options import ENGINE, find_config, read_config
from trueline.errors import TruelineError, UsageError, closest
from trueline.events import printable
from trueline.extras import naming_extras
from trueline.version import __version__

EXIT_CODES = {
    0: "done; for `bundle verify`, `data verify` and `chaos`: and every check holds",
    1: "an error, on stderr as `error: ...` and `hint: ...`; or a check that does not hold",
    2: "the command line, an environment variable or trueline.toml is wrong",
    3: "train, run, resume: all steps are trained, but without records that failed on every worker; the summary and "
    "--json (`left_out`, `set_aside`) name them",
    130: "Ctrl-C",
}

VERBS: Mapping[str, Mapping[str, str]] = {
    "The line": dict.fromkeys(
        (
            "try",
            "init",
            "train",
            "run",
            "evaluate",
            "predict",
            "doctor",
            "capture",
            "compress",
            "register",
            "serve",
            "ship",
        ),
        "line",
    ),
    "Jobs": dict.fromkeys(
        ("submit", "join", "jobs", "status", "logs", "scale", "halt", "resume", "publish", "chaos"), "jobs"
    ),
    "Bundles, records, TorchServe": dict.fromkeys(("bundle", "data", "torchserve"), ""),
    "This machine": {"env": "line"},
}
"""By heading: each verb and its folder, in the order of the line; its `command` is in `trueline.cli.FOLDER.VERB`, with
_ for -. A verb without a folder is one of GROUPS.
"""
GROUPS = {
    "bundle": (
        "bundles",
        ("inspect", "report", "verify", "sign", "delta", "export-cpp"),
        "Inspect, verify, sign, update or export a bundle.",
    ),
    "data": ("data", ("check", "split", "inspect", "verify", "convert"), "Check, split, inspect or convert records."),
    "torchserve": ("torchserve", ("import", "archive"), "Import archives from TorchServe, or write one."),
}
"""Groups of verbs: their folder, their names, the help."""


class _Verbs(click.Group):
    """Imports a verb's module when it is used, and lists verbs under headings."""

    def __init__(self, verbs: Mapping[str, Mapping[str, str]], **rest: object) -> None:
        super().__init__(**rest)  # type: ignore[arg-type]
        self.headings = verbs
        self.folders = {name: folder for group in verbs.values() for name, folder in group.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.folders)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        folder = self.folders.get(cmd_name)
        if folder is None:
            return None
        if not folder:
            return _group(cmd_name)
        module = f"trueline.cli.{folder}.{cmd_name.replace('-', '_')}"
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.folders and not args[0].startswith("-"):
            near = closest(args[0], self.folders)
            inner = [f"{group} {args[0]}" for group, (_, names, _) in GROUPS.items() if args[0] in names]
            near = near or (inner[0] if inner else None)
            ctx.fail(f"no such command '{args[0]}'" + (f"; did you mean '{near}'?" if near else ""))
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None and not isinstance(command, click.Group):
            path = (*ctx.command_path.split()[1:], name)
            name_variables(command, path)
            ctx.default_map = {name: read_defaults(command, path)}
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in self.headings.items():
            commands = {name: self.get_command(ctx, name) for name in names}
            with formatter.section(heading):
                formatter.write_dl([(name, one.get_short_help_str(80)) for name, one in commands.items() if one])


def _group(name: str) -> click.Group:
    folder, names, text = GROUPS[name]
    epilog = f"`trueline {name} VERB --help` has the options and examples of a verb."
    return _Verbs({"Commands": dict.fromkeys(names, folder)}, name=name, help=text, epilog=epilog)


def known_tables() -> list[tuple[str, ...]]:
    """The path of every verb: `("train",)`, `("bundle", "verify")`."""
    top = [(name,) for group in VERBS.values() for name, folder in group.items() if folder]
    return top + [(group, name) for group, (_, names, _) in GROUPS.items() for name in names]


def flags_of(command: click.Command) -> dict[str, click.Option]:
    """The options of `command` by their names in trueline.toml: `max_delay` for --max-delay."""
    options = [param for param in command.params if isinstance(param, click.Option) and param.opts]
    return {max(option.opts, key=len).lstrip("-").replace("-", "_"): option for option in options}


def name_variables(command: click.Command, path: Sequence[str]) -> None:
    """Gives each option its environment variable: TRUELINE_SERVE_MAX_DELAY."""
    for name, option in flags_of(command).items():
        if option.envvar is None:
            option.envvar = "_".join(["TRUELINE", *path, name]).upper().replace("-", "_")


def read_defaults(command: click.Command, path: Sequence[str]) -> dict[str, Any]:
    """The values for `command` at `path` in the nearest trueline.toml from the working directory upwards, by parameter.

    Raises UsageError that names the file, the key and the nearest one that exists.
    """
    file = find_config()
    if file is None:
        return {}
    options = flags_of(command)
    values = {}
    for key, value in _read_tables(file).get(tuple(path), {}).items():
        option = options.get(key.replace("-", "_"))
        if option is None:
            raise _unknown_key(file, f"[{'.'.join(path)}] has no option '{key}'", closest(key, options))
        assert option.name is not None
        values[option.name] = value
    return values


def _read_tables(file: Path) -> dict[tuple[str, ...], Mapping[str, Any]]:
    tables: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for name, value in read_config(file).items():
        if name == ENGINE:  # read by the verbs that have --on
            continue
        for sub, table in value.items() if name in GROUPS and isinstance(value, dict) else [("", value)]:
            path = (name, sub) if sub else (name,)
            dotted = ".".join(path)
            if path not in known_tables():
                near = closest(dotted, [".".join(known) for known in known_tables()])
                raise _unknown_key(file, f"'{dotted}' is no command", near)
            if not isinstance(table, dict):
                raise UsageError(f"{file}: '{dotted}' is no table", hint=f"write [{dotted}]")
            tables[path] = table
    return tables


def _unknown_key(file: Path, what: str, near: str | None) -> UsageError:
    return UsageError(f"{file}: {what}", hint=f"did you mean '{near}'?" if near else "")


@click.group(
    cls=_Verbs,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every option can also be set in trueline.toml or in the environment: docs/guides/configuration.md.",
)
@click.version_option(__version__, prog_name="trueline")
def trueline() -> None:
    """Takes an eager PyTorch model from a recipe to served answers, and checks every step.

    \b
    recipe ──train──▶ checkpoint ──capture──▶ bundle ──register──▶ MLflow ──serve──▶ answers

    Start with `trueline try`, which shows the whole line on a small table, or with `trueline init NAME`;
    `trueline ship NAME/recipe.py` then runs the whole line. The --help of every
    command has examples.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs the command line `arguments` and returns the exit code. Raises nothing."""
    try:
        with naming_extras():
            code = trueline.main(list(arguments), prog_name="trueline", standalone_mode=False)
        sys.stdout.flush()
    except TruelineError as error:
        return _report(error, error.message, error.hint, error.exit_code)
    except click.ClickException as error:
        error.show(sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # the reader is gone (`| head`): nothing more is written, also not by the exit's flush
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 (blind except): the last place that can report an error
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        hint = "run it again with --debug to see the traceback"
        return _report(error, f"unexpected {type(error).__name__} at {where}: {error}", hint, 1)
    return code if isinstance(code, int) else 0


def _report(error: Exception, message: str, hint: str, code: int) -> int:
    debugging = os.environ.get(DEBUG, "") not in ("", "0")
    if debugging:
        traceback.print_exception(error, file=sys.stderr)
    click.echo(f"error: {printable(message, multiline=True)}", err=True)
    if hint and not (debugging and "--debug" in hint):
        click.echo(f"hint: {printable(hint, multiline=True)}", err=True)
    return code
