"""Finds the verb, runs it, and turns whatever comes out of it into an exit code and words on stderr.

0    done
1    a TruelineError, as `error: message` and `hint: ...`; or a fault of ours
2    the command line is wrong
130  Ctrl-C
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from trueline.cli.options import DEBUG
from trueline.errors import TruelineError, closest
from trueline.version import __version__

VERBS = {
    **dict.fromkeys(("init", "train", "run"), "line"),
    **dict.fromkeys(("jobs", "status", "logs", "scale", "halt", "resume", "chaos"), "jobs"),
    "data": "data",
    **dict.fromkeys(("evaluate", "predict", "doctor", "capture"), "line"),
    "import": "torchserve",
    **dict.fromkeys(("verify", "inspect", "export-cpp", "sign"), "bundles"),
    "register": "line",
    "archive": "torchserve",
    **dict.fromkeys(("serve", "ship"), "line"),
}
"""Each verb and its folder, in the order of the line; `trueline.cli.FOLDER.VERB` holds its `command`, with _ for -."""


class _Verbs(click.Group):
    """Loads the file of a verb when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = f"trueline.cli.{VERBS[cmd_name]}.{cmd_name.replace('-', '_')}"
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = closest(args[0], VERBS)
            ctx.fail(f"no such command '{args[0]}'" + (f"; did you mean '{near}'?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trueline")
def trueline() -> None:
    """One line from an eager PyTorch model to production, proven at every hand-over.

    \b
    recipe ──train──▶ checkpoint ──capture──▶ bundle ──register──▶ MLflow ──serve──▶ answers

    Start with `trueline init NAME`, then `trueline ship NAME/recipe.py` walks the whole line. Every command
    has examples in its own --help.
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
