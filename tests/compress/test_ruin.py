"""A program that was chosen by hand and lost nearly everything is sealed, and named in red."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import trueline
from trueline.cli import app
from trueline.compress import search as searching
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.method import Budget
from trueline.compress.ruin import is_ruined
from worlds import compressible


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "QUICK_S", 0.02)
    monkeypatch.setattr(searching, "FULL_S", 0.05)


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose second convolution int8 ruins: it has large weights for a channel that is dead."""
    made = compressible.make(tmp_path_factory.mktemp("trained"))
    first, second = made.module[0], made.module[2]
    first.weight.data[0], first.bias.data[0] = 0.0, -1.0
    second.weight.data[:, 0] = 20_000
    out = made.recipe.parent / "ruined.bundle"
    return compressible.seal(made.module, out, made.bundle.manifest.lineage.recipe_digest).path


@pytest.mark.jobs
def test_a_ruined_program_chosen_by_hand_names_what_it_lost_and_the_layers_to_blame(
    ruined: Path, tmp_path: Path
) -> None:
    found = trueline.compress(ruined, quantize=["static", "dynamic"], target="size", out=tmp_path / "small.bundle")
    assert found.row.kind == "static"
    assert found.row.changed is not None
    assert found.row.changed > 200
    assert f"{found.row.changed} of 600 decisions are other ones" in found.ruined
    assert found.ruined.partition("change the answers most: ")[2].startswith("second (")
    assert "dynamic:u8 was tried too and loses" in found.ruined
    assert found.as_dict()["ruined"] == found.ruined
    assert "ruined: static" in (found.report.parent / "report.json").read_text()


@pytest.mark.jobs
def test_the_command_says_in_red_that_a_program_is_ruined(
    ruined: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red: list[str] = []

    def style(text: str, **how: str) -> str:
        red.extend([text] if how == {"fg": "red"} else [])
        return text

    monkeypatch.setattr(click, "style", style)
    assert app.run(["compress", str(ruined), "--quantize", "static", "-o", str(tmp_path / "small.bundle"), "-q"]) == 0
    (line,) = red
    assert line.startswith("ruined: static:u8s8,minmax: 'accuracy' is 0.")


def test_a_program_that_keeps_its_metric_is_not_called_ruined(tmp_path: Path) -> None:
    made = compressible.make(tmp_path)
    found = trueline.compress(made.bundle.path, quantize=["static"], target="size", out=tmp_path / "small.bundle")
    assert found.ruined == ""
    assert "ruined" not in found.as_text()


def test_only_a_loss_that_is_sure_and_large_ruins() -> None:
    def judge(budget: Budget, parent: float, low: float) -> bool:
        row = CompressedCandidate(name="static", kind="static", verdict="offered", loss=low, loss_low=low)
        return is_ruined(budget, parent, row)

    accuracy, error = Budget("accuracy", float("inf")), Budget("mae", float("inf"))
    assert [judge(accuracy, 0.9, low) for low in (0.05, 0.2, float("inf"), float("nan"))] == [False, True, True, True]
    assert [judge(error, 2.0, low) for low in (1.5, 2.5)] == [False, True]
