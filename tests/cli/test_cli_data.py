"""`trueline data` shows, verifies and converts records, and says what is wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trueline.cli import app


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.csv"
    path.write_text("id,word\n" + "".join(f"{n},w{n}\n" for n in range(100)))
    return path


@pytest.mark.parametrize("name", ["inspect", "verify", "convert"])
def test_each_of_its_verbs_teaches_with_two_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["data", name, "--help"]) == 0
    assert len(re.findall(f"\n    trueline data {name} ", capsys.readouterr().out)) >= 2


def test_inspect_shows_counts_columns_and_records(clicks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["data", "inspect", str(clicks), "--samples", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("100 records in 1 units of at most 100")
    assert "  id    int64" in said
    assert "  word  'w50'" in said
    assert app.run(["data", "inspect", str(clicks), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["records"], facts["columns"]) == (100, {"id": "int64", "word": "string"})


def test_convert_writes_the_same_records_and_a_second_run_has_nothing_to_do(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["data", "convert", str(clicks), str(out), "--range-records", "30"]
    assert app.run(arguments) == 0
    assert "100 records in 4 parts of parquet" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert app.run(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    found = [name for path in sorted(out.glob("*.parquet")) for name in pq.read_table(path)["id"].to_pylist()]
    assert found == list(range(100))


def test_verify_names_what_cannot_be_read_and_its_exit_code_says_so(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert app.run(["data", "convert", str(clicks), str(out), "--to", "recordio", "--range-records", "50"]) == 0
    assert app.run(["data", "verify", str(out)]) == 0
    assert capsys.readouterr().out.endswith("100 records in 2 units can be read\n")
    path = min(out.glob("*.recordio"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert app.run(["data", "verify", str(out)]) == 1
    said = capsys.readouterr().out
    assert f"{path.name} is torn at byte 0: the chunk does not match its CRC-32" in said
    assert "50 records in 1 units can be read" in said


def test_records_that_cannot_be_opened_are_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["data", "inspect", "nowhere.csv"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: no records at 'nowhere.csv': the file does not exist")
    assert hint.startswith("hint: paths are relative")
