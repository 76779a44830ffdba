"""`trueline serve` prints a command that works for the model that it has loaded."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from trueline.cli import app
from trueline.cli.line.serve import command as serve
from trueline.cli.line.train import command as train
from trueline.cli.options import FIRST
from worlds import bundles


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_line_that_a_ready_server_prints_is_answered_with_the_golden_answer(tmp_path: Path) -> None:
    path = bundles.double_plus(tmp_path / "tiny.bundle").path
    arguments = [sys.executable, "-m", "trueline", "serve", str(path), "--port", "0"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stderr is not None
            line = next((line for line in process.stderr if line.startswith("curl ")), "")
            done = subprocess.run(
                ["sh", "-c", line.replace("curl ", "curl -sS ")], capture_output=True, text=True, check=True
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert json.loads(done.stdout) == [[2 * (3 * row + x) + 1 for x in range(3)] for row in range(4)]


def help_of(command: click.Command, name: str) -> str:
    return command.get_help(click.Context(command, info_name=name, max_content_width=100))


def test_the_help_shows_the_five_options_that_are_used_most_first_and_each_option_once() -> None:
    for command, name in ((serve, "serve"), (train, "train")):
        text = help_of(command, name)
        sections = re.findall(r"^(\S.*):$", text, re.MULTILINE)
        assert sections[0] == FIRST
        first = text.split(f"{FIRST}:\n")[1].split("\n\n")[0]
        assert len(re.findall(r"^  --", first, re.MULTILINE)) == 5
        flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
        assert len(flags) == len(set(flags))
        assert set(flags) == {
            max(param.opts, key=len) for param in command.params if isinstance(param, click.Option)
        } | {"--help"}


def test_every_option_of_the_server_is_in_a_named_group() -> None:
    text = help_of(serve, "serve")
    options = text.split("\nOptions:\n")[1].split("\n\n")[0]
    assert set(re.findall(r"--[\w-]+", options.split("--help")[0])) <= {"--json", "--quiet", "--debug"}


@pytest.mark.parametrize("path", app.known_tables(), ids=" ".join)
def test_the_help_of_every_verb_loads_nothing_heavy(path: tuple[str, ...]) -> None:
    module = app.GROUPS[path[0]][0] if len(path) > 1 else next(g[path[0]] for g in app.VERBS.values() if path[0] in g)
    name = f"trueline.cli.{module}.{path[-1].replace('-', '_')}"
    source = Path(sys.modules["trueline.cli"].__path__[0], *name.split(".")[2:]).with_suffix(".py").read_text()
    heavy = re.findall(r"^(?:import|from) (torch|numpy|onnx\w*|mlflow|pyarrow|grpc|httpx)\b", source, re.MULTILINE)
    assert not heavy
