"""Tables leave training as part of a proven bundle."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from trueline.bundle import open_bundle
from trueline.bundle.delta import apply_delta
from trueline.bundle.describe import describe
from trueline.bundle.external_data import find_tensors
from trueline.capture.api import capture
from trueline.capture.deltas import make_delta
from trueline.capture.subject import count_table_lookups
from trueline.capture.verify import verify
from trueline.checkpoint import checkpoint
from trueline.errors import BundleError, UsageError
from trueline.ps.model.embedding import Embedding, EmbeddingBag, TableModule, choose_cuts
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from worlds.recipes import untrained

KNOWN = np.unique(np.random.default_rng(0).integers(-(2**62), 2**62, size=1000))


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.words, self.tags = Embedding(4), EmbeddingBag(4, "mean", padding_idx=0), EmbeddingBag(4, "max")

    def forward(self, user, words, tags):
        return torch.cat([self.user(user), self.words(words), self.tags(tags)], dim=1)


def examples():
    random = np.random.default_rng(1)
    user, words, tags = (torch.from_numpy(random.choice(KNOWN, size)) for size in (5, (5, 3), (5, 2)))
    words[1, 1:] = 0
    user[2], tags[3, 1] = 7, -9  # without rows
    return {"user": user, "words": words, "tags": tags}


@pytest.mark.slow
@pytest.mark.long
def test_tables_are_proven_in_every_format_and_answer_zeros_for_unknown_ids(tmp_path):
    model = Tabled()
    state = model.state_dict()
    for name in ("user", "words", "tags"):
        state[f"{name}.ids"] = torch.from_numpy(KNOWN)
        state[f"{name}.rows"] = torch.randn(len(KNOWN), 4, generator=torch.Generator().manual_seed(len(name)))
    made = checkpoint.write(tmp_path, step=1, state={"model": dict(state)}, facts={})
    formats = ["onnx", "torch_export"]
    capture(untrained(Tabled, examples=examples), made, tmp_path / "bundle", formats=formats)
    bundle = open_bundle(tmp_path / "bundle")
    inputs = {name: value.numpy() for name, value in examples().items()}
    places = np.searchsorted(KNOWN, inputs["user"])
    for format in formats:
        (answer,) = open_program(bundle, format).run(inputs).values()
        np.testing.assert_array_equal(answer[[0, 1, 3, 4], :4], state["user.rows"].numpy()[places[[0, 1, 3, 4]]])
        assert not answer[2, :4].any()
        np.testing.assert_array_equal(answer[1, 4:8], state["words.rows"].numpy()[inputs["words"][1, 0] == KNOWN][0])
        known = state["tags.rows"].numpy()[inputs["tags"][3, 0] == KNOWN][0]
        np.testing.assert_array_equal(answer[3, 8:], np.maximum(known, 0.0))
    assert bundle.lineage()["tables"][0].items() >= {"name": "user", "rows": len(KNOWN), "dim": 4}.items()
    assert "tables.1.largest_norm" in describe(bundle)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = Embedding(4)

    def forward(self, user):
        return self.user(user)


def trained(folder, rows):
    state = {"user.anchor": torch.empty(0, 4), "user.ids": torch.from_numpy(KNOWN), "user.rows": rows}
    return checkpoint.write(folder, step=1, state={"model": state}, facts={})


ROWS = torch.randn(len(KNOWN), 4, generator=torch.Generator().manual_seed(2)) * 3


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bound"), [pytest.param("float16", 2.0**-11, marks=pytest.mark.long), ("int8", 1 / 127)]
)
def test_narrow_rows_are_as_near_as_the_lineage_states_and_make_the_programs_smaller(tmp_path, kind, bound):
    rows = ROWS.clone()
    rows[0] = 0.0
    made = trained(tmp_path, rows)
    recipe = untrained(Single, examples=lambda: {"user": torch.from_numpy(KNOWN[:6])})
    sizes = {}
    for name in ("float32", kind):
        out = tmp_path / f"{name}.bundle"
        capture(recipe, made, out, formats=["onnx", "torch_export"], table_rows=name)
        sizes[name] = sum(one.stat().st_size for one in out.glob("programs/**/*") if one.is_file())
    bundle = open_bundle(out)
    (table,) = bundle.lineage()["tables"]
    largest = float(rows.abs().max())
    assert table["stored_as"] == kind
    assert 0 < table["largest_change"] <= bound * largest
    for format in ("onnx", "torch_export"):
        (answer,) = open_program(bundle, format).run({"user": KNOWN}).values()
        assert np.abs(answer - rows.numpy()).max() <= table["largest_change"] * 1.01
        assert not answer[0].any()
    assert verify(out, against=recipe, checkpoint=made).holds
    assert sizes[kind] < sizes["float32"]


def test_the_cuts_of_a_table_stay_where_they_are_when_ids_come_and_go():
    random = np.random.default_rng(3)
    ids = np.unique(random.integers(-(2**62), 2**62, size=100_000))
    cuts = choose_cuts(ids, 8_000)
    sizes = np.diff([0, *cuts, len(ids)])
    assert sizes.max() <= 8_000
    assert sizes[:-1].min() >= 7_000
    later = np.union1d(np.delete(ids, random.choice(len(ids), 100)), random.integers(-(2**62), 2**62, size=200))
    again = choose_cuts(later, 8_000)
    assert len(np.intersect1d(ids[cuts], later[again])) >= len(cuts) - 2
    assert choose_cuts(ids[:50], 50) == []


def capture_sharded(folder, rows, monkeypatch):
    """In files of at most 375 rows."""
    recipe = untrained(Single, examples=lambda: {"user": torch.from_numpy(KNOWN[:6])})
    split = TableModule.split_rows
    monkeypatch.setattr(TableModule, "split_rows", lambda table, _: split(table, 375 * 16))
    out = folder / "sharded.bundle"
    capture(recipe, trained(folder, rows), out, formats=["onnx"])
    return out


def test_a_table_that_is_cut_gives_what_it_gave():
    for kind in ("float32", "float16", "int8"):
        table = Single().eval()
        table.load_state_dict(
            {"user.anchor": torch.empty(0, 4), "user.ids": torch.from_numpy(KNOWN), "user.rows": ROWS}
        )
        if kind != "float32":
            table.user.narrow_rows(kind)
        ids = torch.from_numpy(np.concatenate([KNOWN, KNOWN + 1, [0, 2**63 - 1, -(2**63)]])).reshape(-1, 1)
        before, facts = table(ids), table.user.describe_table()
        table.user.split_rows(100 * table.user.rows[:1].nbytes)
        assert len(table.user._list_parts()) >= 10
        assert torch.equal(table(ids), before)
        assert table.user.describe_table() == facts


@pytest.mark.long
def test_a_large_table_lies_in_several_files_of_safetensors_that_one_index_names(tmp_path, monkeypatch):
    out = capture_sharded(tmp_path, ROWS, monkeypatch)
    bundle = open_bundle(out)
    shards = json.loads((out / "programs" / "model.onnx.tables.json").read_bytes())["tables"]["user"]
    sizes = [one["arrays"]["rows"][0] for one in shards]
    assert len(sizes) == 3
    assert all(328 < size <= 375 for size in sizes[:2])
    files = [safetensors.numpy.load_file(out / "programs" / one["file"]) for one in shards]
    np.testing.assert_array_equal(np.concatenate([one["ids"] for one in files]), KNOWN)
    np.testing.assert_array_equal(np.concatenate([one["rows"] for one in files]), ROWS.numpy())
    unknown = np.setdiff1d(np.concatenate([KNOWN - 1, [2**63 - 1, -(2**63)]]), KNOWN)
    (answer,) = open_program(bundle, "onnx").run({"user": np.concatenate([KNOWN, unknown])}).values()
    np.testing.assert_array_equal(answer[: len(KNOWN)], ROWS.numpy())
    assert not answer[len(KNOWN) :].any()
    assert bundle.lineage()["tables"][0]["rows"] == len(KNOWN)
    assert all(one.file or one.size < 100 for one in find_tensors(out / "programs" / "model.onnx"))  # nothing twice
    shard = out / "programs" / shards[1]["file"]
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"torn")
    with pytest.raises(BundleError, match=r"user-2\.safetensors"):
        open_bundle(out)
    shard.unlink()
    with pytest.raises(BundleError, match=r"user-2\.safetensors"):
        open_bundle(out)


@pytest.mark.long
def test_a_delta_of_sharded_tables_has_the_rows_that_changed(tmp_path, monkeypatch):
    later = ROWS.clone()
    later[[3, 400, 999]] += 1.0
    bundles = []
    for name, rows in (("before", ROWS), ("after", later)):
        (tmp_path / name).mkdir()
        bundles.append(open_bundle(capture_sharded(tmp_path / name, rows, monkeypatch)))
    manifest = make_delta(*bundles, tmp_path / "2.delta")
    assert manifest.made["programs/model.onnx.user-1.safetensors"].how == "pieces"
    assert manifest.sizes["changes.safetensors"] < 5000  # of 16,000 bytes
    applied = apply_delta(bundles[0], tmp_path / "2.delta", tmp_path / "applied.bundle")
    assert applied.digest == bundles[1].digest
    (answer,) = open_program(applied, "onnx").run({"user": KNOWN}).values()
    np.testing.assert_array_equal(answer, later.numpy())


def test_narrow_rows_are_refused_for_what_float16_does_not_have_and_for_models_without_tables(tmp_path):
    for rows in (torch.full((len(KNOWN), 4), 1e6), ROWS):
        table = Single()
        table.load_state_dict(
            {"user.anchor": torch.empty(0, 4), "user.ids": torch.from_numpy(KNOWN), "user.rows": rows}
        )
        if rows is ROWS:
            table.user.narrow_rows("float16")
        else:
            with pytest.raises(UsageError, match="numbers beyond float16, up to 1e"):
                table.user.narrow_rows("float16")
    recipe = untrained(lambda: nn.Linear(2, 1), examples=lambda: torch.zeros(1, 2))
    with pytest.raises(UsageError, match="the model has no table"):
        capture(recipe, None, tmp_path / "none.bundle", table_rows="int8")


def test_the_longest_rows_are_named():
    table = Single()
    rows = torch.zeros(len(KNOWN), 4)
    rows[7], rows[3] = 2.0, 1.0
    table.load_state_dict({"user.anchor": torch.empty(0, 4), "user.ids": torch.from_numpy(KNOWN), "user.rows": rows})
    assert table.user.describe_table()["longest_rows"].startswith(f"{KNOWN[7]}, {KNOWN[3]}, ")


def test_the_ids_that_records_look_up_most_are_named_with_their_shares():
    recipe = load_recipe(Path(__file__).parent / "recipes" / "served.py")
    module = recipe.model().eval()
    assert count_table_lookups(recipe, module) == 640
    ids = recipe.source("training").read(np.arange(640)).inputs.reshape(-1).numpy()
    values, counts = np.unique(ids, return_counts=True)
    most = int(values[counts.argmax()])
    first, *_ = module.items.describe_table()["most_frequent_ids"].split(", ")
    assert first == f"{most} ({100 * counts.max() / len(ids):.3g} %)"


def test_a_model_whose_records_make_no_batch_is_captured_without_frequent_ids():
    recipe = untrained(Single, examples=lambda: {"user": torch.from_numpy(KNOWN[:6])})
    module = Single().eval()
    assert count_table_lookups(recipe, module) == 0
    assert "most_frequent_ids" not in module.user.describe_table()
