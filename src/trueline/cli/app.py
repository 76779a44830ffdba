"""The command `trueline`: finds the verb, fills its options, runs it, and turns what it raises into an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

import click

from trueline.cli import config_file
from trueline.cli.options import DEBUG
from trueline.errors import TruelineError, closest
from trueline.version import __version__

EXIT_CODES = {
    0: "done; for `bundle verify`, `data verify` and `chaos`: and everything holds",
    1: "an error, said on stderr as `error: ...` and `hint: ...`; or a check that does not hold",
    2: "the command line, an environment variable or trueline.toml is wrong",
    130: "Ctrl-C",
}

VERBS: Mapping[str, Mapping[str, str]] = {
    "The line": dict.fromkeys(
        ("init", "train", "run", "evaluate", "predict", "doctor", "capture", "register", "serve", "ship"), "line"
    ),
    "Jobs": dict.fromkeys(("jobs", "status", "logs", "scale", "halt", "resume", "chaos"), "jobs"),
    "Bundles, records, TorchServe": dict.fromkeys(("bundle", "data", "torchserve"), ""),
}
"""By heading: each verb and its folder, in the order of the line; `trueline.cli.FOLDER.VERB` holds its `command`, with
_ for -. A verb without a folder is one of GROUPS.
"""
GROUPS = {
    "bundle": ("bundles", ("inspect", "verify", "sign", "export-cpp"), "Inspect, verify, sign or export a bundle."),
    "data": ("data", ("inspect", "verify", "convert"), "Inspect, verify or convert records, wherever they are."),
    "torchserve": ("torchserve", ("import", "archive"), "Import archives from TorchServe, or write one."),
}
"""A verb with verbs of its own: their folder, their names, its help."""


class _Verbs(click.Group):
    """Imports the module of a verb when it is used, and lists verbs under headings."""

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
            config_file.name_variables(command, path)
            ctx.default_map = {name: config_file.defaults(command, path, known_tables())}
        return name, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in self.headings.items():
            rows = [(name, _help_of(self.get_command(ctx, name))) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)


def _group(name: str) -> click.Group:
    folder, names, text = GROUPS[name]
    epilog = f"`trueline {name} VERB --help` has the options and examples of a verb."
    return _Verbs({"Commands": dict.fromkeys(names, folder)}, name=name, help=text, epilog=epilog)


def _help_of(command: click.Command | None) -> str:
    return "" if command is None else command.get_short_help_str(limit=80)


def known_tables() -> list[tuple[str, ...]]:
    """The path of every verb: `("train",)`, `("bundle", "verify")`."""
    top = [(name,) for group in VERBS.values() for name, folder in group.items() if folder]
    return top + [(group, name) for group, (_, names, _) in GROUPS.items() for name in names]


@click.group(
    cls=_Verbs,
    verbs=VERBS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every option may also stand in trueline.toml or in the environment: docs/guides/configuration.md.",
)
@click.version_option(__version__, prog_name="trueline")
def trueline() -> None:
    """Takes an eager PyTorch model from a recipe to served answers, and checks every step.

    \b
    recipe ──train──▶ checkpoint ──capture──▶ bundle ──register──▶ MLflow ──serve──▶ answers

    Start with `trueline init NAME`; `trueline ship NAME/recipe.py` then runs the whole line. Every command has
    examples in its own --help.
    """


def run(arguments: Sequence[str]) -> int:
    """Runs the command line `arguments` and returns the exit code. Raises nothing."""
    try:
        code = trueline.main(list(arguments), prog_name="trueline", standalone_mode=False)
        sys.stdout.flush()
    except TruelineError as error:
        return _told(error)
    except click.ClickException as error:
        error.show(sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        _close_stdout()
        return 1
    except Exception as error:  # noqa: BLE001 (blind except): the last door reports whatever comes
        return _unexpected(error)
    return code if isinstance(code, int) else 0


def _told(error: TruelineError) -> int:
    if _debugging():
        traceback.print_exception(error, file=sys.stderr)
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)
    return error.exit_code


def _unexpected(error: Exception) -> int:
    if _debugging():
        traceback.print_exception(error, file=sys.stderr)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(last.filename)}:{last.lineno}"
    click.echo(f"error: unexpected {type(error).__name__} at {where}: {error}", err=True)
    if not _debugging():
        click.echo("hint: run it again with --debug to see the traceback", err=True)
    return 1


def _debugging() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0")


def _close_stdout() -> None:
    """The reader has gone (`| head`): nothing more can be said, not even when the interpreter flushes at
    exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
