"""A layer that quantization ruins is named, and left out."""

from __future__ import annotations

from pathlib import Path

import pytest

import trueline
from trueline.compress import search as searching
from worlds import compressible


def test_an_accuracy_that_falls_to_chance_names_the_layers_to_blame_and_leaves_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "QUICK_S", 0.02)
    monkeypatch.setattr(searching, "FULL_S", 0.05)
    made = compressible.make(tmp_path)
    first, second = made.module[0], made.module[2]
    first.weight.data[0] *= 20_000  # one channel is so large that 8 bits for all have no room for the others
    first.bias.data[0] *= 20_000
    second.weight.data[:, 0] /= 20_000
    sealed = compressible.seal(made.module, tmp_path / "ruined.bundle", made.bundle.manifest.lineage.recipe_digest)
    found = trueline.compress(
        sealed.path, budget="accuracy=3%", quantize=["static"], target="size", out=tmp_path / "small.bundle"
    )
    rows = {row.name: row for row in found.rows}
    ruined = rows["static:u8s8,minmax"]
    assert ruined.verdict == "over budget"
    assert ruined.loss is not None
    assert ruined.loss > 0.5
    assert "first" in ruined.why.partition("change the answers most:")[2]
    assert found.row.exclude
    assert set(found.row.exclude) <= {"first", "second"}
    assert found.row.quantized < 3
