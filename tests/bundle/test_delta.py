"""A delta turns its parent into the next bundle, to the byte, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trueline.bundle import Bundle, open_bundle
from trueline.bundle.delta import (
    CHANGES,
    MANIFEST,
    MadeFile,
    Piece,
    apply_delta,
    read_delta,
    with_digest,
    write_manifest,
)
from trueline.capture.deltas import make_delta
from trueline.errors import BundleError, StorageError
from worlds import bundles

RANDOM = np.random.default_rng(5)
IDS = np.unique(RANDOM.integers(-(2**63), 2**63 - 1, 4000))
ROWS = RANDOM.normal(size=(len(IDS), 16)).astype(np.float32)


def trained(gone: int = 10, new: int = 20, changed: int = 30) -> tuple[Any, Any]:
    """The table some steps later."""
    kept = np.ones(len(IDS), bool)
    kept[RANDOM.choice(len(IDS), gone, replace=False)] = False
    fresh = np.setdiff1d(RANDOM.integers(-(2**63), 2**63 - 1, new), IDS)
    ids = np.concatenate((IDS[kept], fresh))
    rows = np.concatenate((ROWS[kept], RANDOM.normal(size=(len(fresh), 16)).astype(np.float32)))
    rows[RANDOM.choice(int(kept.sum()), changed, replace=False)] += 1
    order = np.argsort(ids)
    return ids[order], rows[order]


@pytest.fixture
def parent(tmp_path: Path) -> Bundle:
    return bundles.tabled(tmp_path / "1.bundle", IDS, ROWS)


@pytest.fixture
def delta(tmp_path: Path, parent: Bundle) -> Path:
    make_delta(parent, bundles.tabled(tmp_path / "there.bundle", *trained(), scale=2.0), tmp_path / "2.delta")
    return tmp_path / "2.delta"


@pytest.mark.parametrize("counts", [(10, 20, 30), (0, 0, 3), (0, 5, 0), (5, 0, 0), (3990, 0, 0), (0, 9000, 0)])
def test_a_delta_makes_the_next_bundle_to_the_byte_whatever_rows_came_went_and_changed(tmp_path, parent, counts):
    there = bundles.tabled(tmp_path / "there.bundle", *trained(*counts), scale=1.5)
    make_delta(parent, there, tmp_path / "2.delta")
    here = apply_delta(parent, tmp_path / "2.delta", tmp_path / "2.bundle")
    assert here.digest == there.digest == open_bundle(tmp_path / "2.bundle").digest
    for name in there.manifest.files:
        assert (here.path / name).read_bytes() == (there.path / name).read_bytes()


def test_a_delta_has_the_rows_that_changed_and_not_the_table(delta: Path) -> None:
    found = read_delta(delta)
    assert (found.facts["ids"]["changed"], found.facts["rows"]["changed"]) == (20, 50)
    assert found.facts["rows"]["bytes"] == 50 * 64
    assert sum(found.sizes.values()) < ROWS.nbytes / 10


def test_two_bundles_of_other_graphs_make_a_delta_too(tmp_path: Path, parent: Bundle) -> None:
    other = bundles.scaled(tmp_path / "other.bundle")
    make_delta(parent, other, tmp_path / "2.delta")
    assert apply_delta(parent, tmp_path / "2.delta", tmp_path / "2.bundle").digest == other.digest


def test_another_parent_is_refused_with_both_names(tmp_path: Path, delta: Path) -> None:
    other = bundles.tabled(tmp_path / "other.bundle", IDS, ROWS + 1)
    with pytest.raises(BundleError, match=rf"is for the bundle \w+, and .*other.bundle is {other.digest[:12]}"):
        apply_delta(other, delta, tmp_path / "2.bundle")
    assert not (tmp_path / "2.bundle").exists()


def tear(folder: Path, name: str, how: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:-8])
    else:
        data[-9] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "short", "changed"])
@pytest.mark.parametrize("name", [MANIFEST, CHANGES, "files/golden/outputs.safetensors"])
def test_a_torn_delta_is_refused_and_leaves_nothing(tmp_path: Path, parent: Bundle, delta: Path, name: str, how: str):
    tear(delta, name, how)
    with pytest.raises(BundleError, match=r"torn|missing|changed after|does not make|no delta"):
        apply_delta(parent, delta, tmp_path / "2.bundle")
    assert not list(tmp_path.glob("2.bundle")) + list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "piece",
    [
        Piece(kind="zeros", size=2**60), Piece(kind="parent", size=64, start=2**40),
        Piece(kind="new", size=64, data="?"), Piece(kind="rows", size=64, width=0, before=1),
        Piece(kind="rows", size=64, width=8, before=2**50),
        Piece(kind="rows", size=64, width=8, before=8, start=-64), Piece(kind="zeros", size=-64),
    ],
    ids=lambda piece: f"{piece.kind} {piece.size} {piece.start} {piece.before}",
)  # fmt: skip
def test_pieces_of_a_stranger_take_no_memory_and_read_nothing_else(tmp_path, parent, delta, piece):
    found = read_delta(delta)
    name = "programs/model.onnx"
    made = found.made | {name: MadeFile(how="pieces", pieces=(piece, *found.made[name].pieces))}
    write_manifest(delta, with_digest(msgspec.structs.replace(found, made=made)))
    with pytest.raises(BundleError, match="is torn"):
        apply_delta(parent, delta, tmp_path / "2.bundle")
    assert not (tmp_path / "2.bundle").exists()


def test_the_same_bundle_has_no_delta_and_nothing_is_replaced(tmp_path: Path, parent: Bundle, delta: Path) -> None:
    with pytest.raises(BundleError, match="the same bundle"):
        make_delta(parent, parent, tmp_path / "3.delta")
    shutil.copytree(parent.path, tmp_path / "2.bundle")
    with pytest.raises(StorageError, match="exists already"):
        apply_delta(parent, delta, tmp_path / "2.bundle")
