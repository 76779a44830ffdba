"""`trueline capture` asks for a checkpoint or a word that there is none, and says what became of each format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trueline.capture import api
from trueline.capture.proof.attempt import Attempt, Captured
from trueline.cli import app

RECIPE = """
def model(): ...
def loss(outputs, labels): ...
def optimizer(params): ...
def dataset(mode): ...
"""


def attempt(**changes: Any) -> Attempt:
    given = {
        "format": "onnx",
        "verdict": "proven",
        "why": "",
        "line": "",
        "range": "batch from 1 up, no bound",
    } | changes
    return Attempt(seconds=1.0, size_bytes=9, probes=20, max_abs_error=0.0, emitted=True, **given)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def capture(recipe: Any, checkpoint: Any, out: Path, **options: Any) -> Captured:
        asked.append((checkpoint, options["formats"]))
        scripted = attempt(format="torchscript", how="by script")
        refused = attempt(verdict="refused", why="no such operator", range="")
        return Captured(path=out, digest="d", serve="torchscript", programs=(refused, scripted))

    monkeypatch.setattr(api, "capture", capture)
    return asked


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


def test_a_recipe_without_a_checkpoint_is_an_error_that_says_what_to_do(
    recipe: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["capture", recipe]) != 0
    assert "--no-checkpoint" in capsys.readouterr().err
    assert app.run(["capture", recipe, "runs/one", "--no-checkpoint"]) != 0
    assert "leave one of them out" in capsys.readouterr().err
    assert app.run(["capture", f"{recipe}x"]) != 0
    assert f"cannot read the recipe {recipe}x" in capsys.readouterr().err
    assert asked == []


def test_a_model_is_captured_as_the_recipe_makes_it_and_each_format_has_a_line(
    recipe: str, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "b")
    assert app.run(["capture", recipe, "--no-checkpoint", "--out", out]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "onnx: refused (no such operator)",
        "torchscript: proven for batch from 1 up, no bound (by script)",
        "serve: torchscript",
        f"bundle: {out}",
    ]
    assert app.run(["capture", recipe, "--no-checkpoint", "--out", out, "--for", "torch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["serve"] == "torchscript"
    assert asked == [(None, None), (None, ("torch_export",))]
