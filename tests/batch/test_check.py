"""What would fail or mislead a training is found before it, with the column and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from trueline.batch.check import DataReport, check
from trueline.columns import Category, Label, Number, Text

COLUMNS = {"x": Number(missing="mean"), "city": Category(), "note": Text(max_length=4), "label": Label()}


class Model(nn.Module):
    def __init__(self, columns: Any, classes: int = 0) -> None:
        super().__init__()
        self.city = nn.Embedding(columns["city"].size, 2)
        self.words = nn.Embedding(columns["note"].size, 2)
        self.head = nn.Linear(columns.num_numbers + 4, classes or columns.num_classes)

    def forward(self, numbers: Any, city: Any, note: Any, note_mask: Any) -> Any:
        return self.head(torch.cat([numbers, self.city(city), self.words(note).mean(1)], dim=1))


def rows(count: int = 40, **changed: list[Any]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        "x": [float(at % 7) if at % 5 else None for at in range(count)],
        "city": ["Rome" if at % 3 else "Oslo" for at in range(count)],
        "note": ["good place" if at % 2 else "bad" for at in range(count)],
        "label": ["yes" if at % 4 else "no" for at in range(count)],
    }
    return pa.table({**columns, **changed})


def report(folder: Path, training: pa.Table, evaluation: pa.Table, **more: Any) -> DataReport:
    for mode, table in (("training", training), ("evaluation", evaluation)):
        pq.write_table(table, folder / f"{mode}.parquet")
    recipe = {
        "model": Model, "columns": COLUMNS, "dataset": lambda mode: str(folder / f"{mode}.parquet"),
        "loss": nn.CrossEntropyLoss(), "optimizer": lambda params: torch.optim.SGD(params, 0.1),
    }  # fmt: skip
    return check({**recipe, **more})


def found(made: DataReport, level: str) -> dict[str, str]:
    return {one.where: one.what for one in made.findings if one.level == level}


def test_sound_data_give_notes_only(tmp_path: Path) -> None:
    made = report(tmp_path, rows(), rows(12))
    assert made.sound
    assert (found(made, "error"), found(made, "warning")) == ({}, {})
    assert found(made, "note") == {"x": "no value in 8 of 40 records (20.0%)"}
    assert made.records == {"training": 40, "evaluation": 12}
    assert made.as_text().endswith("40 records for training, 12 records for evaluation; nothing keeps it from training")


def test_what_only_evaluation_has_is_named(tmp_path: Path) -> None:
    made = report(tmp_path, rows(), rows(4, city=["Rome", "Bern", "Bern", None], note=["what is it"] * 4))
    assert "2 of 4 evaluation records have a value that training does not have" in found(made, "warning")["city"]
    assert found(made, "warning")["note"] == "100% of the words in evaluation are unknown"
    bad = report(tmp_path, rows(), rows(4, label=["yes", "no", "maybe", "no"]))
    assert not bad.sound
    assert "label 'label' of record 2 is 'maybe'" in found(bad, "error")["evaluation"]


def test_constant_equal_and_telling_columns_are_named(tmp_path: Path) -> None:
    told = ["was asked" if at % 4 else "was not" for at in range(40)]
    table = rows(x=[3.0] * 40, city=told).append_column("copy", rows()["label"])
    made = report(
        tmp_path, table, table, columns={**COLUMNS, "copy": Category()}, model=lambda columns: Wide(columns)
    )  # fmt: skip
    warnings = found(made, "warning")
    assert warnings["x"] == "is 3 in every record"
    assert "each of its 2 values stands with one class of 'label' only" in warnings["city"]
    assert "is the same as column 'label', the label" in {one.what for one in made.findings}


class Wide(Model):
    def forward(self, numbers: Any, city: Any, note: Any, note_mask: Any, copy: Any = None) -> Any:
        return super().forward(numbers, city, note, note_mask)


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    made = report(tmp_path, rows(note=["a b c d e f"] * 20 + ["a"] * 20), rows(4, note=["a"] * 4))
    assert found(made, "warning")["note"] == "50.0% of the texts are longer than 4 and are cut"


def test_a_model_with_too_few_outputs_is_an_error_and_exit_code(tmp_path: Path) -> None:
    labels = [["a", "b", "c"][at % 3] for at in range(40)]
    made = report(tmp_path, rows(label=labels), rows(label=labels), model=lambda columns: Model(columns, 2))
    assert found(made, "error")["model"] == "has 2 outputs, and the labels have 3 classes"
    assert made.as_text().startswith("error ")
    assert not made.sound


def test_each_blank_that_raises_is_an_error_of_its_own(tmp_path: Path) -> None:
    def broken(outputs: Any, labels: Any) -> Any:
        raise KeyError("weights")

    assert found(report(tmp_path, rows(), rows(4), loss=broken), "error") == {"loss": "KeyError: 'weights'"}
    no_model = report(tmp_path, rows(), rows(4), model=lambda columns: nn.Embedding(columns["town"].size, 2))
    assert "no column 'town'" in found(no_model, "error")["model"]
    gaps = report(tmp_path, rows(), rows(4), columns={**COLUMNS, "x": Number()})
    assert found(gaps, "error") == {"columns": "column 'x' has no value in 8 of 40 records, first in row 1"}


def test_outputs_that_broadcast_with_labels_are_a_warning(tmp_path: Path) -> None:
    table = rows(label=[float(at) for at in range(40)])
    made = report(
        tmp_path, table, table, columns={**COLUMNS, "label": Label(number=True)},
        model=lambda columns: Model(columns, 1), loss=nn.MSELoss(),
    )  # fmt: skip
    assert "they broadcast to [2, 2]" in found(made, "warning")["loss"]
