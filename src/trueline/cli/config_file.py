"""Defaults of options from trueline.toml and from the environment.

    [train]
    workers = "2:4"

    [bundle.verify]
    seed = 7

A flag overrides `TRUELINE_TRAIN_WORKERS`, which overrides the file, which overrides the built-in default. The file is
the nearest one from the working directory upwards; paths in it are relative to the working directory, as on the command
line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from trueline.errors import UsageError, closest

NAME = "trueline.toml"


def find(start: Path) -> Path | None:
    """The nearest trueline.toml in `start` or a folder above it."""
    return next((path for folder in (start, *start.parents) if (path := folder / NAME).is_file()), None)


def flags_of(command: click.Command) -> dict[str, click.Option]:
    """The options of `command` by their names in trueline.toml: `max_delay` for --max-delay."""
    options = [param for param in command.params if isinstance(param, click.Option) and param.opts]
    return {max(option.opts, key=len).lstrip("-").replace("-", "_"): option for option in options}


def name_variables(command: click.Command, path: Sequence[str]) -> None:
    """Gives each option its environment variable: TRUELINE_SERVE_MAX_DELAY."""
    for name, option in flags_of(command).items():
        if option.envvar is None:
            option.envvar = "_".join(["TRUELINE", *path, name]).upper().replace("-", "_")


def defaults(command: click.Command, path: Sequence[str], known: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The nearest trueline.toml's values for `command` at `path`, by parameter. `known`: the paths of all verbs.

    Raises UsageError that names the file, the key and the nearest one that exists.
    """
    file = find(Path.cwd())
    if file is None:
        return {}
    options = flags_of(command)
    values = {}
    for key, value in _tables(file, known).get(tuple(path), {}).items():
        option = options.get(key.replace("-", "_"))
        if option is None:
            raise _unknown(file, f"[{'.'.join(path)}] has no option '{key}'", closest(key, options))
        assert option.name is not None
        values[option.name] = value
    return values


def _tables(file: Path, known: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    import tomllib

    try:
        content = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint="correct it, or move it away") from error
    groups = {path[0] for path in known if len(path) == 2}
    tables: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for name, value in content.items():
        inner = value.items() if name in groups and isinstance(value, dict) else [("", value)]
        for sub, table in inner:
            path = (name, sub) if sub else (name,)
            if path not in known:
                names = [".".join(one) for one in known]
                raise _unknown(file, f"'{'.'.join(path)}' is no command", closest(".".join(path), names))
            if not isinstance(table, dict):
                raise UsageError(f"{file}: '{'.'.join(path)}' is no table", hint=f"write [{'.'.join(path)}]")
            tables[path] = table
    return tables


def _unknown(file: Path, what: str, near: str | None) -> UsageError:
    return UsageError(f"{file}: {what}", hint=f"did you mean '{near}'?" if near else "")
