"""Makes the delta that turns one bundle into a later one of the same model. No torch.

Files of weights of ONNX programs are compared tensor by tensor. A table is an array of ascending ids with the arrays of
as many rows beside it: rows of the same id are compared, wherever they lie. What fits nothing is taken whole, so a
delta is at worst as large as the bundle. It is never wrong: when it is made, it is applied, and has to give the later
bundle to the byte.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from trueline import files
from trueline.bundle import delta as deltas
from trueline.bundle.delta import CHANGES, WHOLE, DeltaManifest, MadeFile, Piece, Places
from trueline.bundle.external_data import INT64, StoredTensor, find_tensors
from trueline.bundle.read import Bundle
from trueline.errors import BundleError

Array = npt.NDArray[Any]


class Tensor(NamedTuple):
    """A tensor of a program that lies in a file beside it."""

    name: str
    start: int
    array: Array
    """[rows, bytes of a row] uint8; ids of a table, and all other vectors of int64: [rows] int64."""

    @property
    def kind(self) -> tuple[str, int]:
        return self.array.dtype.str, self.array.nbytes // max(1, len(self.array))


class Changes(NamedTuple):
    """Places of the new rows, and those of the parent's rows that are gone or changed."""

    at: Places
    gone: Places


@dataclass(slots=True)
class _Made:
    """A file of weights in the making."""

    pieces: list[Piece] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def make_delta(parent: Bundle, result: Bundle, out: Path) -> DeltaManifest:
    """Writes the delta from `parent` to `result` to `out`, whole or not at all. Raises BundleError, StorageError."""
    if parent.digest == result.digest:
        raise BundleError(f"{parent.path} and {result.path} are the same bundle", hint="there is nothing to publish")
    places = _find_weights(result)
    before = {name: found for name, found in _find_weights(parent).items() if name in places}
    made, facts, arrays = dict[str, MadeFile](), dict[str, Any](), dict[str, Array]()
    for name, entry in result.manifest.files.items():
        if parent.manifest.files.get(name) == entry:
            made[name] = MadeFile(how="parent")
        elif name in before:
            found = _compare(parent.path / name, result.path / name, before[name], places[name], str(len(made)))
            made[name] = MadeFile(how="pieces", pieces=tuple(found.pieces))
            arrays |= found.arrays
            facts |= found.facts
        else:
            made[name] = MadeFile(how="whole")
    with files.atomic_dir(out) as partial:
        for name, one in made.items():
            if one.how == "whole":
                target = partial / WHOLE / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(result.path / name, target)
        if arrays:
            safetensors.numpy.save_file(arrays, partial / CHANGES)
        sizes = {
            one.relative_to(partial).as_posix(): one.stat().st_size
            for one in sorted(partial.rglob("*"))
            if one.is_file()
        }
        manifest = deltas.with_digest(DeltaManifest(
            schema=deltas.SCHEMA, parent=parent.digest, result=result.manifest, made=made, sizes=sizes, facts=facts,
        ))  # fmt: skip
        deltas.write_manifest(partial, manifest)
        with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=out.parent) as trial:
            deltas.apply_delta(parent, partial, Path(trial) / "bundle")
    return manifest


def _find_weights(bundle: Bundle) -> dict[str, list[Tensor]]:
    """The tensors in each file of weights of the bundle's ONNX programs, in the order of the file."""
    found: dict[str, list[Tensor]] = {}
    for entry in bundle.manifest.programs:
        if entry.format != "onnx":
            continue
        for one in find_tensors(bundle.path / entry.file):
            name = (Path(entry.file).parent / one.file).as_posix() if one.file else entry.file
            if name in bundle.manifest.files:
                found.setdefault(name, []).append(_read(bundle.path / name, one))
    return {name: sorted(some, key=lambda one: one.start) for name, some in found.items()}


def _read(path: Path, tensor: StoredTensor) -> Tensor:
    raw = np.memmap(path, np.uint8, "r", offset=tensor.start, shape=(tensor.size,))
    if tensor.datatype == INT64 and len(tensor.dims) == 1:
        return Tensor(tensor.name, tensor.start, raw.view(np.int64))
    rows = tensor.dims[0] if tensor.dims and not tensor.size % max(1, tensor.dims[0]) else 1
    return Tensor(tensor.name, tensor.start, raw.reshape(rows, -1))


def _compare(before: Path, after: Path, old: Sequence[Tensor], new: Sequence[Tensor], prefix: str) -> _Made:
    made, pairs, at = _Made(), _pair(old, new), 0
    tables = [
        (one, pairs[one.name]) for one in new if one.name in pairs and _are_ids(one) and _are_ids(pairs[one.name])
    ]
    aligned = {ids.name: _align(was.array, ids.array) for ids, was in tables}
    for tensor in new:
        if tensor.start < at:
            raise BundleError(f"{after} has tensors that overlap, of which no delta is made")
        _add_gap(made, before, after, at, tensor.start, f"{prefix}.gap{at}")
        at = tensor.start + tensor.array.nbytes
        _add_tensor(made, tensor, pairs.get(tensor.name), aligned, f"{prefix}.{len(made.pieces)}")
    _add_gap(made, before, after, at, after.stat().st_size, f"{prefix}.gap{at}")
    return made


def _pair(old: Sequence[Tensor], new: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensor of the parent that each new one goes back to, by name: the one of its name, or the next of its kind;
    exporters number tensors, and the numbers shift."""
    pairs = dict[str, Tensor]()
    for kind in dict.fromkeys(one.kind for one in new):
        ours, theirs = ([one for one in some if one.kind == kind] for some in (new, old))
        names = {one.name: one for one in theirs}
        if len(ours) == len(theirs):
            pairs |= {one.name: other for one, other in zip(ours, theirs, strict=True)}
        else:
            pairs |= {one.name: names[one.name] for one in ours if one.name in names}
    return pairs


def _are_ids(tensor: Tensor) -> bool:
    ids = tensor.array
    return ids.dtype == np.int64 and len(ids) > 1 and bool((ids[1:] > ids[:-1]).all())


class _Aligned(NamedTuple):
    """Rows of a table that both have: their places before and now. `ids`: how the ids themselves changed."""

    before: Places
    now: Places
    counts: tuple[int, int]
    ids: Changes


def _align(before: Array, now: Array) -> _Aligned:
    places = np.searchsorted(before, now)
    places[places == len(before)] = 0
    known = before[places] == now
    old = places[known]
    gone = np.ones(len(before), bool)
    gone[old] = False
    changes = Changes(np.flatnonzero(~known), np.flatnonzero(gone))
    return _Aligned(old, np.flatnonzero(known), (len(before), len(now)), changes)


def _add_gap(made: _Made, before: Path, after: Path, start: int, stop: int, name: str) -> None:
    if stop <= start:
        return
    gap, earlier = (np.fromfile(path, np.uint8, stop - start, offset=start) for path in (after, before))
    if np.array_equal(gap, earlier):
        made.pieces.append(Piece(kind="parent", size=len(gap), start=start))
    elif gap.any():
        made.arrays[name] = gap
        made.pieces.append(Piece(kind="new", size=len(gap), data=name))
    else:
        made.pieces.append(Piece(kind="zeros", size=len(gap)))


def _add_tensor(made: _Made, tensor: Tensor, before: Tensor | None, aligned: dict[str, _Aligned], name: str) -> None:
    array, size = tensor.array, tensor.array.nbytes
    if not size:
        return
    changes = None if before is None else _find_changes(tensor, before, aligned)
    if before is not None and changes is not None and not len(changes.at) and not len(changes.gone):
        made.pieces.append(Piece(kind="parent", size=size, start=before.start))
        return
    width = size // len(array)
    if before is None or changes is None or len(changes.at) * (width + 8) + 8 * len(changes.gone) >= size:
        made.arrays[name] = np.ascontiguousarray(array)
        made.pieces.append(Piece(kind="new", size=size, data=name))
        made.facts[tensor.name] = {"bytes": size}
        return
    rows = array.view(np.uint8).reshape(len(array), width)[changes.at]
    made.arrays |= {f"{name}.at": changes.at, f"{name}.gone": changes.gone, f"{name}.rows": rows}
    made.pieces.append(Piece(
        kind="rows", size=size, start=before.start, width=width, before=len(before.array), data=f"{name}.rows",
        at=f"{name}.at", gone=f"{name}.gone",
    ))  # fmt: skip
    made.facts[tensor.name] = {
        "rows": len(array), "changed": len(changes.at), "before": len(before.array), "bytes": rows.nbytes,
    }  # fmt: skip


def _find_changes(tensor: Tensor, before: Tensor, aligned: dict[str, _Aligned]) -> Changes | None:
    """The fewest rows that turn `before` into `tensor`; None: they do not fit."""
    if tensor.name in aligned:
        return aligned[tensor.name].ids
    counts = len(before.array), len(tensor.array)
    options = [one for one in aligned.values() if one.counts == counts]
    found = [_changed_rows(tensor.array, before.array, one) for one in options]
    if counts[0] == counts[1]:
        everywhere = np.arange(counts[0])
        none = np.empty(0, np.int64)
        found.append(
            _changed_rows(tensor.array, before.array, _Aligned(everywhere, everywhere, counts, Changes(none, none)))
        )
    return min(found, key=lambda one: len(one.at), default=None)


def _changed_rows(now: Array, before: Array, one: _Aligned) -> Changes:
    differs = np.concatenate([
        (now[one.now[part]] != before[one.before[part]]).reshape(len(one.now[part]), -1).any(axis=1)
        for part in _slices(len(one.now))
    ] or [np.empty(0, bool)])  # fmt: skip
    at = np.union1d(one.ids.at, one.now[differs])
    gone = np.union1d(one.ids.gone, one.before[differs])
    return Changes(at.astype(np.int64), gone.astype(np.int64))


def _slices(count: int) -> Iterator[slice]:
    return (slice(first, first + (1 << 18)) for first in range(0, count, 1 << 18))
