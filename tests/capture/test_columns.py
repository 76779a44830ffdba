"""A bundle of a recipe with columns takes records as they are, and proves that it encodes them as training did."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from trueline.batch.predict import predict
from trueline.bundle import Bundle, open_bundle
from trueline.bundle.describe import describe
from trueline.bundle.report import render
from trueline.bundle.schema import COLUMNS, RECORDS_CASE, FileEntry, encode, with_digest
from trueline.capture.api import capture
from trueline.checkpoint.checkpoint import load_model
from trueline.errors import NotProven, RecipeError
from trueline.files import sha256_bytes
from trueline.runtime.open import open_program, replay_records
from trueline.serve import column_records
from trueline.serve.tensors.bounds import UNBOUNDED
from worlds.columns import DECLARED, recipe_in, table_of, write_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("columns"))


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    capture(recipe_in(folder), None, folder / "b.bundle", formats=["onnx"])
    return open_bundle(folder / "b.bundle")


def test_the_bundle_holds_columns_and_records_and_proves_them(folder: Path, bundle: Bundle) -> None:
    columns = replay_records(bundle)
    assert columns == recipe_in(folder).with_columns().fitted
    assert bundle.lineage()["columns"] == columns.digest
    golden = next(one for one in bundle.golden() if one.case == RECORDS_CASE)
    assert len(bundle.golden_records()) == len(golden.inputs["city"]) == 5
    assert "Columns of a record" in (page := render(bundle))
    assert "Berlin, São Paulo, 東京; others are unseen" in page
    assert "Berlin, São Paulo, 東京; others are unseen" in describe(bundle)


def test_served_records_get_the_answer_of_the_eager_model(folder: Path, bundle: Bundle) -> None:
    recipe = recipe_in(folder).with_columns()
    columns, table = bundle.columns(), table_of(1, 60)
    assert columns is not None
    body = json.dumps(columns.rows_of_table(table)).encode()
    records = column_records.decode(body, columns, UNBOUNDED, None, False)
    answers = json.loads(column_records.encode(open_program(bundle).run(records.inputs), columns, records))
    batch = recipe.source("evaluation").read(np.arange(60))
    with torch.no_grad():
        eager = load_model(recipe, None)(**batch.inputs).softmax(dim=1).numpy()
    served = np.array([[*one["probabilities"].values()] for one in answers])
    assert np.allclose(served, eager, atol=1e-6)
    assert [one["class"] for one in answers] == [columns.classes[at] for at in eager.argmax(axis=1)]


def test_a_bundle_that_encodes_otherwise_is_not_served(tmp_path: Path, bundle: Bundle) -> None:
    columns = bundle.columns()
    assert columns is not None
    city = columns["city"]
    swapped = msgspec.structs.replace(city, values=city.values[::-1])
    changed = msgspec.structs.replace(
        columns, columns=tuple(swapped if one.name == "city" else one for one in columns.columns)
    )
    for file in ("", "programs", "golden"):
        (tmp_path / "b" / file).mkdir(parents=True, exist_ok=True)
    for name in bundle.manifest.files:
        (tmp_path / "b" / name).write_bytes((bundle.path / name).read_bytes())
    text = msgspec.json.encode(changed)
    (tmp_path / "b" / COLUMNS).write_bytes(text)
    entry = FileEntry(sha256=sha256_bytes(text), size=len(text))
    files = {**bundle.manifest.files, COLUMNS: entry}
    manifest = with_digest(msgspec.structs.replace(bundle.manifest, files=files))
    (tmp_path / "b" / "bundle.json").write_bytes(encode(manifest))
    with pytest.raises(NotProven, match="make another input 'city' of its golden records"):
        replay_records(open_bundle(tmp_path / "b"))


def test_predictions_name_classes(folder: Path, bundle: Bundle) -> None:
    predict(recipe_in(folder), bundle.path, folder / "out.jsonl")
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 60
    assert list(lines[0]) == ["record", "output", "class", "probabilities"]
    assert {one["class"] for one in lines} <= {"<=50K", ">50K"}


def test_columns_that_were_changed_since_are_refused(folder: Path, bundle: Bundle) -> None:
    other = dataclasses.replace(recipe_in(folder), columns={**DECLARED, "age": DECLARED["visits"]})
    with pytest.raises(RecipeError, match=r"column .age. is declared as Number.*and was fitted as Number"):
        predict(other, bundle.path, folder / "never.jsonl")
