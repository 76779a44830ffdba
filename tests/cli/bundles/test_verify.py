"""`trueline bundle verify` says of every program whether it holds here, and its exit code says it of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trueline.capture import verify as room
from trueline.capture.verify import ProgramVerdict, Verified
from trueline.cli import app


def found(**changes: Any) -> Verified:
    good = ProgramVerdict(format="onnx", holds=True, why="", golden=3, probes=28, max_abs_error=1e-7, evidence=())
    bad = ProgramVerdict(format="torch_export", holds=False, why="on probe 'p': differs", golden=3, probes=27,
                  max_abs_error=0.0, evidence=())  # fmt: skip
    given = {"programs": (good, bad), "notes": ("the recipe differs",)} | changes
    return Verified(path=Path("b"), digest="d", against="eager model", seed=7, **given)


def test_every_program_has_a_line_and_one_that_fails_makes_the_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(room, "verify", lambda path, **options: asked.append((path, options)) or found())
    assert app.run(["bundle", "verify", "b", "--against", "recipe.py", "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "onnx: holds (3 golden records, 28 probes, max error 1e-07)" in said
    assert "torch_export: FAILS: on probe 'p': differs" in said
    assert "note: the recipe differs" in said
    assert asked == [
        (Path("b"), {"against": "recipe.py", "checkpoint": None, "format": None, "seed": 7, "native": False})
    ]


def test_a_bundle_that_holds_is_exit_code_0_and_json_says_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "verify", lambda path, **options: found(programs=found().programs[:1], notes=()))
    assert app.run(["bundle", "verify", "b", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["holds"] is True
    assert facts["programs"][0]["probes"] == 28


def test_a_bundle_that_is_none_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["bundle", "verify", str(tmp_path / "absent.bundle")]) == 1
    assert "there is no bundle at" in capsys.readouterr().err
