"""Evaluations record by record: each value once, adding up to the evaluation of the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from trueline.batch.evaluate import evaluate
from trueline.cli import app
from trueline.data.open import open_records
from trueline.errors import DataError, RecipeError
from worlds.jobs import MEASURED, checkpoint_of


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return checkpoint_of(MEASURED, tmp_path / "checkpoints")


def rows_in(folder: Path) -> list[dict[str, float]]:
    records = open_records(folder)
    return [row for number, unit in enumerate(records.units) for row in records.load(number, 0, unit.count).to_pylist()]


def test_each_record_has_its_values_and_they_add_up_to_the_whole(trained: Path, tmp_path: Path) -> None:
    whole = evaluate(MEASURED, trained, batch=32)
    found = evaluate(MEASURED, trained, batch=32, out=tmp_path / "values", part_records=64)
    assert (found.records, found.checkpoint) == (333, "step-00000003")
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert found.metrics == pytest.approx(whole.metrics, rel=1e-5)
    rows = rows_in(tmp_path / "values")
    assert [row["record"] for row in rows] == list(range(333))
    assert all(row["loss"] == pytest.approx(row["absolute"] ** 2, rel=1e-5) for row in rows)
    assert all(abs(row["mean"]) == pytest.approx(row["absolute"], rel=1e-6) for row in rows)
    assert len(list((tmp_path / "values").glob("part-*.parquet"))) == 6


def test_an_evaluation_that_was_cut_short_goes_on_and_one_of_something_else_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEASURED_TROUBLE", "raise:200")
    with pytest.raises(DataError, match="record 200"):
        evaluate(MEASURED, trained, batch=32, out=tmp_path / "values", part_records=64, format="jsonl")
    there = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "values").glob("part-*")}
    assert len(there) == 3
    monkeypatch.delenv("MEASURED_TROUBLE")
    evaluate(MEASURED, trained, batch=32, out=tmp_path / "values", part_records=64, format="jsonl")
    assert there.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "values").iterdir()}.items()
    assert len(rows_in(tmp_path / "values")) == 333
    with pytest.raises(DataError, match="written with another plan"):
        evaluate(MEASURED, None, batch=32, out=tmp_path / "values", part_records=64, format="jsonl")


def test_what_is_no_mean_over_its_records_has_no_value_of_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(MEASURED.read_text() + "\n\ndef loss(outputs, labels):\n    return (outputs - labels).norm()\n")
    with pytest.raises(RecipeError, match=r"'loss' is .* for a batch of 32 records, and .* on average") as raised:
        evaluate(recipe, None, batch=32, out=tmp_path / "values")
    assert "one value for each record" in raised.value.hint
    recipe.write_text(MEASURED.read_text() + "\n\ndef metrics():\n    return {'record': loss}\n")
    with pytest.raises(RecipeError, match="a metric is called 'record'"):
        evaluate(recipe, None, batch=32, out=tmp_path / "others")


def test_the_command_writes_the_values_beside_its_answer(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(MEASURED), str(trained), "--out", f"{tmp_path}/values/", "--json", "--quiet"]
    assert app.run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 333
    (part,) = (tmp_path / "values").glob("part-*.parquet")
    assert pq.read_schema(part).names == ["record", "loss", "absolute", "mean"]


@pytest.mark.jobs
def test_many_processes_write_the_same_values(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = evaluate(MEASURED, trained, batch=8, out=tmp_path / "one", part_records=32)
    torch.set_num_threads(threads)
    monkeypatch.setenv("MEASURED_TROUBLE", f"die:100:{tmp_path / 'died'}")
    many = evaluate(MEASURED, trained, batch=8, out=tmp_path / "many", part_records=32, workers=3)
    assert many == one
    assert rows_in(tmp_path / "many") == rows_in(tmp_path / "one")
