"""Writes docs/guides/configuration.md from the commands; `make docs` runs it, and a test compares."""

from __future__ import annotations

from pathlib import Path

import click

from trueline.cli import app
from trueline.recipe.settings import TrainingSettings
from trueline.settings import declared_settings

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "configuration.md"
HEAD = """# Configuration

<!-- Written by `make docs` from the commands; edit `tests/reference.py` or the help of an option. -->

An option is set in one of four places. The first that sets it wins:

1. the flag: `trueline serve b --port 9000`
2. an environment variable: `TRUELINE_SERVE_PORT=9000`
3. the nearest `trueline.toml`, in the working directory or a folder above it
4. its default, or the recipe where the help says so

```toml
[train]
workers = "2:4"
epochs = 12

[bundle.verify]
seed = 7
```

Keys are the flags without their dashes (`max-batch` or `max_batch`); a switch is `true`, an option that may be repeated
is a list. An unknown table or key is an error that names the nearest one. Relative paths start at the current folder.

## Shell completion

One line installs it (for zsh: `zsh_source` and `~/.zshrc`):

    echo 'eval "$(_TRUELINE_COMPLETE=bash_source trueline)"' >> ~/.bashrc

## Exit codes
"""


def command_of(path: tuple[str, ...]) -> click.Command:
    """The command whose verbs are `path`."""
    found: click.Command = app.trueline
    for name in path:
        assert isinstance(found, click.Group)
        inner = found.get_command(click.Context(found), name)
        assert inner is not None, path
        found = inner
    return found


def page() -> str:
    lines = [HEAD, "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in app.EXIT_CODES.items()]
    lines += ["", "## Values of a recipe", "", "Names at the top level of the file; the command's flag wins.", ""]
    lines += ["| name | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{one.name}` | `{one.default!r}` | {one.setting.help} |"
        for one in declared_settings(TrainingSettings)
        if one.setting.recipe
    ]
    lines += ["", "## Options", ""]
    for path in app.known_tables():
        command = command_of(path)
        app.name_variables(command, path)
        lines += [f"### trueline {' '.join(path)}", "", "| flag | `[" + ".".join(path) + "]` | environment | meaning |"]
        lines += ["|---|---|---|---|"]
        for key, option in app.flags_of(command).items():
            flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
            text = (option.help or "").replace("|", "\\|")
            lines.append(f"| {flags} | `{key}` | `{option.envvar}` | {text} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
