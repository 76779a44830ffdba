"""Defaults of options from trueline.toml and from the environment.

    [train]
    workers = "2:4"

    [bundle.verify]
    seed = 7

A flag wins over `TRUELINE_TRAIN_WORKERS`, that over the file, that over the built-in default. The file is the nearest
one upwards from the working directory; paths in it are relative to the working directory, as on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trueline.errors import UsageError, closest

NAME = "trueline.toml"


def find(start: Path) -> Path | None:
    """The nearest trueline.toml in `start` and the folders above it."""
    return next((path for folder in (start, *start.parents) if (path := folder / NAME).is_file()), None)


def flags_of(command: click.Command) -> dict[str, click.Option]:
    """The options of `command` by the name that they have in trueline.toml: `max_delay` for --max-delay."""
    found = {}
    for param in command.params:
        if isinstance(param, click.Option) and param.opts:
            longest = max(param.opts, key=len)
            found[longest.lstrip("-").replace("-", "_")] = param
    return found


def name_variables(command: click.Command, path: Sequence[str]) -> None:
    """Gives each option its environment variable: TRUELINE_SERVE_MAX_DELAY."""
    for name, option in flags_of(command).items():
        if option.envvar is None:
            option.envvar = "_".join(["TRUELINE", *path, name]).upper().replace("-", "_")


def defaults(command: click.Command, path: Sequence[str], known: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """What the nearest trueline.toml says of `command`, whose verbs are `path`, by parameter. `known`: all verbs.

    Raises UsageError that names the file, the key and the nearest one that exists.
    """
    file = find(Path.cwd())
    if file is None:
        return {}
    table = _tables(file, known).get(tuple(path), {})
    options = flags_of(command)
    for key in table:
        if key.replace("-", "_") not in options:
            raise _unknown(file, f"[{'.'.join(path)}] has no option '{key}'", closest(key, options))
    return {_parameter(options[key.replace("-", "_")]): value for key, value in table.items()}


def _parameter(option: click.Option) -> str:
    assert option.name is not None
    return option.name


def _tables(file: Path, known: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    import tomllib

    try:
        told = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint="mend it, or move it away") from error
    groups = {path[0] for path in known if len(path) == 2}
    found: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for name, value in told.items():
        inner = value.items() if name in groups and isinstance(value, dict) else [("", value)]
        for sub, table in inner:
            path = (name, sub) if sub else (name,)
            if path not in known:
                names = [".".join(one) for one in known]
                raise _unknown(file, f"'{'.'.join(path)}' is no command", closest(".".join(path), names))
            if not isinstance(table, dict):
                raise UsageError(f"{file}: '{'.'.join(path)}' is no table", hint=f"write [{'.'.join(path)}]")
            found[path] = table
    return found


def _unknown(file: Path, what: str, near: str | None) -> UsageError:
    return UsageError(f"{file}: {what}", hint=f"did you mean '{near}'?" if near else "")
