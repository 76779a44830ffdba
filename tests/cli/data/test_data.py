"""`trueline data` shows, verifies and converts records, and says what is wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
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


def test_inspect_draws_the_samples_that_are_pictures_with_their_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(3):
            image.new("RGB", (40, 20), (80 * number, 0, 200)).save(tmp_path / "photos" / label / f"{number}.png")
    sheet = tmp_path / "sheet.png"
    asked = ["data", "inspect", str(tmp_path / "photos"), "--samples", "4", "--pictures", str(sheet)]
    assert app.run(asked) == 0
    said = capsys.readouterr().out
    assert f"4 pictures on {sheet}" in said
    assert "PNG image 40x20" in said
    drawn = image.open(sheet)
    assert drawn.size[0] > 4 * 160
    assert (80, 0, 200) in {color for _, color in drawn.getcolors(1 << 20)}
    assert app.run([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pictures"] == 4


def test_inspect_of_records_without_pictures_says_what_a_picture_is(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    assert app.run(["data", "inspect", str(clicks), "--pictures", str(tmp_path / "sheet.png")]) != 0
    said = capsys.readouterr().err
    assert "none of the columns id, word holds images in 5 samples" in said
    assert "nested lists of grey values" in said
    assert not (tmp_path / "sheet.png").exists()


def test_grey_values_in_nested_lists_are_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    rows = [[[float(r == c) for c in range(4)] for r in range(4)], [[0.5] * 4] * 4]
    pq.write_table(pa.table({"digit": rows, "label": [1, 2]}), tmp_path / "digits.parquet")
    sheet = tmp_path / "sheet.png"
    assert app.run(["data", "inspect", str(tmp_path / "digits.parquet"), "--pictures", str(sheet)]) == 0
    assert "2 pictures on" in capsys.readouterr().out
    grey = image.open(sheet).convert("L")
    assert grey.getpixel((10, 10)) == 255
    assert grey.getpixel((100, 10)) == 0
