"""The recipe of `trueline init NAME my.csv --label COLUMN`: it trains on a table of the user's as it is written."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from recipe.test_recipe_template import accuracy_after
from trueline.batch.check import check
from trueline.cli.line import init
from trueline.columns.declared import Category, Label, Number, Text
from trueline.errors import DataError, UsageError
from trueline.recipe.from_records import write_for_records, write_source
from trueline.recipe.load import load_recipe

Row = dict[str, Any]


def rows(count: int = 240) -> list[Row]:
    draw = random.Random(0)
    found = []
    for at in range(count):
        visits, city = draw.randint(0, 30), draw.choice(["Rome", "Oslo", ""])
        found.append(
            {
                "customer_id": at + 1,
                "hours-per-week": "" if at % 11 == 0 else draw.randint(10, 60),
                "city": city,
                "class": " ".join(draw.choices(["good", "bad", "a", "shop"], k=draw.randint(1, 9))),
                "since": f"2020-01-{1 + at % 28:02d}",
                "visits": visits,
                "spent": round(visits * 3.5 + draw.gauss(0, 1), 2),
                "left": "yes" if visits + (5 if city == "Rome" else 0) < 15 else "no",
            }
        )
    return found


def write_csv(path: Path, table: list[Row], separator: str = ",") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(table)
    return path


def test_a_recipe_for_a_csv_learns_its_label_as_it_is_written(tmp_path: Path) -> None:
    written = write_for_records("mine", tmp_path, write_csv(tmp_path / "my.csv", rows()), "left")
    recipe = load_recipe(written.path)
    assert recipe.columns == {
        "hours-per-week": Number(missing="mean", indicator=True),
        "city": Category(),
        "class": Text(max_length=16),
        "visits": Number(),
        "spent": Number(),
        "left": Label(),
    }
    assert "left out since: it holds dates" in written.note
    assert (recipe.source("training").num_records, recipe.source("evaluation").num_records) == (192, 48)
    labels = recipe.source("evaluation").read(np.arange(48)).labels
    assert int(labels.sum()) == round(0.2 * sum(row["left"] == "yes" for row in rows()))
    assert check(written.path).sound
    assert accuracy_after(written.path, epochs=20) > 0.9


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_number_is_learnt_from_json_lines_and_parquet(tmp_path: Path, ending: str) -> None:
    table = [{**row, "hours-per-week": row["hours-per-week"] or None} for row in rows()]
    path = tmp_path / f"my.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    written = write_for_records("mine", tmp_path, path, "spent")
    recipe = load_recipe(written.path)
    assert recipe.columns is not None
    assert recipe.columns["spent"] == Label(number=True, scale="standard")
    assert recipe.columns["hours-per-week"] == Number(missing="mean", indicator=True)
    assert check(written.path).sound


def test_names_and_values_of_the_records_are_literals_in_the_recipe(tmp_path: Path) -> None:
    evil = '"""\nimport os\nraise SystemExit("run")\n"""'
    table = [{evil: at % 5, "quote\"'\\": ["a\n", "b"][at % 2], "café": "x\u202ey" * (at % 3), "y": at % 2}
             for at in range(100)]  # fmt: skip
    path = tmp_path / "my.parquet"
    pq.write_table(pa.Table.from_pylist(table), path)
    recipe = load_recipe(write_for_records("mine", tmp_path, path, "y").path)
    assert recipe.columns is not None
    assert set(recipe.columns) == set(table[0])
    assert check(recipe).sound


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: write_csv(folder / "my.csv", rows(), ";"), "separated by semicolons"),
        (lambda folder: write_csv(folder / "my.csv", rows(12)), "has 12 records"),
    ],
)
def test_a_file_that_is_no_table_to_learn_from_is_refused_in_words(tmp_path: Path, change: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        write_for_records("mine", tmp_path, change(tmp_path), "left")
    assert not (tmp_path / "mine").exists()


def test_a_recipe_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "my.csv", rows())
    write_for_records("mine", tmp_path, path, "left")
    with pytest.raises(UsageError, match="exists already"):
        write_for_records("mine", tmp_path, path, "left")


def test_epochs_and_batch_follow_the_number_of_records() -> None:
    from trueline.columns.guess import ColumnGuess

    guesses = [ColumnGuess("x", Number(), ""), ColumnGuess("y", Label(), "")]
    sizes = {}
    for records in (100, 5_000, 50_000, 5_000_000):
        scope: dict[str, Any] = {}
        exec(write_source("mine", guesses, records), scope)
        sizes[records] = scope["global_batch"], scope["epochs"]
    assert sizes == {100: (32, 30), 5_000: (64, 8), 50_000: (256, 3), 5_000_000: (1024, 2)}


def test_init_prints_what_it_guessed_and_the_next_command(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "my.csv", rows())
    done = CliRunner().invoke(init.command, ["mine", str(path), "--label", "left", "--into", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "Number   visits: 0 to 30" in done.stderr
    assert f"next: trueline ship {tmp_path}/mine/recipe.py --workers 2 --serve" in done.stderr
    for wrong, why in ((["a", "--label", "left"], "--label names a column"),
                       (["a", str(path), "--template", "text"], "--template brings records"),
                       (["a", str(path), "--into", str(tmp_path)], "no column ''")):  # fmt: skip
        assert why in str(CliRunner().invoke(init.command, wrong).exception)
