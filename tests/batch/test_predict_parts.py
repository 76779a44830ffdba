"""Predictions by range: each part once, whatever ended the run before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from trueline import events
from trueline.batch.predict import predict
from trueline.data.open import open_records
from trueline.errors import DataError, UsageError
from worlds.jobs import MEASURED, checkpoint_of


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return checkpoint_of(MEASURED, tmp_path / "checkpoints")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Workers have one thread; so has this process while it writes what theirs is compared with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_parts_hold_the_rows_of_the_one_file_and_a_second_call_writes_nothing(
    trained: Path, tmp_path: Path
) -> None:
    predict(MEASURED, trained, tmp_path / "whole.parquet", batch=32)
    done = predict(MEASURED, trained, tmp_path / "parts", batch=32, part_records=64)
    assert (done.records, done.parts, done.path) == (333, 6, tmp_path / "parts")
    names = sorted(path.name for path in (tmp_path / "parts").glob("part-*"))
    assert names[0] == "part-000000000000-000000000064.parquet"
    rows = [row for name in names for row in pq.read_table(tmp_path / "parts" / name).to_pylist()]
    assert rows == pq.read_table(tmp_path / "whole.parquet").to_pylist()
    assert sum(unit.count for unit in open_records(tmp_path / "parts").units) == 333
    facts = json.loads((tmp_path / "parts" / "_commit.json").read_text())
    assert [part["records"] for part in facts["parts"]] == [64] * 5 + [13]
    assert predict(MEASURED, trained, tmp_path / "parts", batch=32, part_records=64).parts == 0


def test_a_run_that_was_cut_short_goes_on_where_it_ended(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(MEASURED, trained, tmp_path / "undisturbed", batch=32, part_records=64)
    monkeypatch.setenv("MEASURED_TROUBLE", "raise:200")
    with pytest.raises(DataError, match="record 200"):
        predict(MEASURED, trained, tmp_path / "parts", batch=32, part_records=64)
    before = {name: os.stat(tmp_path / "parts" / name).st_mtime_ns for name in contents(tmp_path / "parts")}
    assert sum(name.startswith("part-") for name in before) == 3
    assert "_commit.json" not in before, "nobody takes it for whole"
    monkeypatch.delenv("MEASURED_TROUBLE")
    told: list[int] = []
    with events.listening(lambda name, fields: told.append(fields["done"]) if name == "prediction.advanced" else None):
        assert predict(MEASURED, trained, tmp_path / "parts", batch=32, part_records=64).parts == 3
    assert told == [256, 320, 333]
    assert contents(tmp_path / "parts") == contents(tmp_path / "undisturbed")
    assert before == {name: os.stat(tmp_path / "parts" / name).st_mtime_ns for name in before}


def test_a_folder_of_other_predictions_is_refused_and_left_as_it_is(trained: Path, tmp_path: Path) -> None:
    predict(MEASURED, trained, tmp_path / "parts", batch=32, part_records=64)
    before = contents(tmp_path / "parts")
    others = checkpoint_of(MEASURED, tmp_path / "others", seed=2)
    with pytest.raises(DataError, match="was written with another plan"):
        predict(MEASURED, others, tmp_path / "parts", batch=32, part_records=64)
    with pytest.raises(DataError, match="was written with another plan"):
        predict(MEASURED, trained, tmp_path / "parts", batch=32, part_records=64, mode="evaluation")
    assert contents(tmp_path / "parts") == before


def test_parts_go_as_json_lines_and_into_a_store(trained: Path, tmp_path: Path) -> None:
    predict(MEASURED, trained, f"{tmp_path}/lines/", batch=32, part_records=100, format="jsonl")
    first = (tmp_path / "lines" / "part-000000000100-000000000200.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["record"] == 100
    done = predict(MEASURED, trained, "memory://answers/run-1", batch=32, part_records=100)
    assert done.path == "memory://answers/run-1"
    assert sum(unit.count for unit in open_records("memory://answers/run-1").units) == 333


def test_an_ending_that_says_nothing_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"answers\.csv has no ending that selects a format"):
        predict(MEASURED, trained, tmp_path / "answers.csv")


@pytest.mark.jobs
def test_many_processes_write_the_same_parts_whoever_dies(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(MEASURED, trained, tmp_path / "one", batch=8, part_records=32)
    monkeypatch.setenv("MEASURED_TROUBLE", f"die:100:{tmp_path / 'died'}")
    done = predict(MEASURED, trained, tmp_path / "many", batch=8, part_records=32, workers=3)
    assert (tmp_path / "died").exists()
    assert done.parts == 11
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


@pytest.mark.jobs
def test_many_processes_go_on_where_one_ended_and_name_the_record_that_stops_them(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEASURED_TROUBLE", "die:100")
    with pytest.raises(DataError, match=r"record 100 of dataset\('prediction'\) ends every process"):
        predict(MEASURED, trained, tmp_path / "many", batch=8, part_records=32, workers=2)
    there = sum(name.startswith("part-") for name in contents(tmp_path / "many"))
    assert 0 < there < 11
    monkeypatch.delenv("MEASURED_TROUBLE")
    assert predict(MEASURED, trained, tmp_path / "many", batch=8, part_records=32, workers=2).parts == 11 - there
    predict(MEASURED, trained, tmp_path / "one", batch=8, part_records=32)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
