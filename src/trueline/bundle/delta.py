"""Deltas: what turns one bundle into the next one, to the byte. No torch, and nothing of a delta is run.

    2.delta/
      delta.json            parent's digest, the next bundle's manifest, how each of its files is made
      changes.safetensors   rows and pieces that the parent lacks, and the places where they belong
      files/...             files that are new as a whole: the graph, golden examples, evidence, lineage

A delta states the manifest of its result. Applying it copies the parent, changes what the delta has, and opens the
result with every check: a wrong parent, a torn delta or a mistake in it gives an error and no bundle. Files of weights
are made of pieces: a table that got, changed and lost rows costs those rows, wherever the others have moved.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from trueline import files
from trueline.bundle import schema
from trueline.bundle.read import Bundle, open_folder
from trueline.bundle.schema import BundleManifest
from trueline.errors import BundleError

MANIFEST = "delta.json"
CHANGES = "changes.safetensors"
WHOLE = "files"
SUFFIX = ".delta"
SCHEMA = 1
CHUNK = 32 << 20
Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The next `size` bytes of a file.

    `parent`: as they lie in the parent's file from `start` on. `new`: the array `data` of the changes. `rows`: of the
    `before` rows of `width` bytes that the parent has from `start` on, all but those at `gone`, in their order, between
    the rows `data`, which come to the places `at`.
    """

    kind: Literal["parent", "new", "zeros", "rows"]
    size: int
    start: int = 0
    data: str = ""
    width: int = 0
    before: int = 0
    gone: str = ""
    at: str = ""


class MadeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a file of the result is made: of the pieces from the parent's file of that name, or whole."""

    how: Literal["parent", "whole", "pieces"]
    pieces: tuple[Piece, ...] = ()


class DeltaManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`delta.json`. `facts`: what a person wants to know of it, by table."""

    schema: int
    parent: str
    result: BundleManifest
    made: dict[str, MadeFile]
    sizes: dict[str, int]
    """Bytes of each file of the delta."""
    facts: dict[str, Any]
    digest: str = ""


def with_digest(manifest: DeltaManifest) -> DeltaManifest:
    body = msgspec.json.encode(msgspec.structs.replace(manifest, digest=""), order="sorted")
    return msgspec.structs.replace(manifest, digest=files.sha256_bytes(body))


def read_delta(folder: Path) -> DeltaManifest:
    """The delta in `folder`. Raises BundleError for a torn or edited one, StorageError for what cannot be read."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > schema.MANIFEST_BYTES:
            raise BundleError(f"{path} is larger than {schema.MANIFEST_BYTES} bytes")
        manifest = msgspec.json.decode(path.read_bytes(), type=DeltaManifest)
    except FileNotFoundError as error:
        raise BundleError(f"{folder} is no delta: it has no {MANIFEST}") from error
    except OSError as error:
        raise files.storage_error(error, path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path} is torn or no delta: {error}", hint=AGAIN) from error
    if manifest.schema != SCHEMA:
        raise BundleError(f"{path} follows schema {manifest.schema}, this Trueline reads {SCHEMA}")
    if with_digest(manifest).digest != manifest.digest:
        raise BundleError(f"{path} was changed after it was written: its digest does not match", hint=AGAIN)
    schema.decode(schema.encode(manifest.result), f"{path}: result")
    for name, size in manifest.sizes.items():
        schema.check_name(name, str(path))
        part = folder / name
        if not part.is_file() or part.is_symlink() or part.stat().st_size != size:
            raise BundleError(f"{part} is torn or missing: the delta has {size} bytes there", hint=AGAIN)
    if manifest.made.keys() != manifest.result.files.keys():
        raise BundleError(f"{path} does not say how each file of its bundle is made", hint=AGAIN)
    return manifest


def write_manifest(folder: Path, manifest: DeltaManifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


AGAIN = "copy the delta again from where it was written"


def apply_delta(parent: Bundle, delta: Path, out: Path) -> Bundle:
    """Writes the bundle that `delta` makes of `parent` to `out`, whole or not at all, and opens it with every check.

    Raises BundleError for another parent and for a torn delta, StorageError.
    """
    manifest = read_delta(delta)
    if parent.digest != manifest.parent:
        raise BundleError(
            f"{delta} is for the bundle {manifest.parent[:12]}, and {parent.path} is {parent.digest[:12]}",
            hint="apply the deltas before it first, in their order, or copy the whole bundle",
        )
    with files.atomic_dir(out) as partial:
        try:
            _write(parent.path, delta, manifest, partial)
        except (safetensors.SafetensorError, LookupError, ValueError, TypeError) as error:
            raise BundleError(f"{delta} is torn: {error}", hint=AGAIN) from error
        (partial / schema.MANIFEST).write_bytes(schema.encode(manifest.result))
        try:
            open_folder(partial)
        except BundleError as error:
            raise BundleError(
                f"{delta} does not make the bundle that it states: {error.message}", hint=AGAIN
            ) from error
    return Bundle(path=out, manifest=manifest.result)


def _write(parent: Path, delta: Path, manifest: DeltaManifest, partial: Path) -> None:
    changes = safetensors.numpy.load_file(delta / CHANGES) if CHANGES in manifest.sizes else {}
    for name, made in manifest.made.items():
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if made.how == "parent":
            _share(parent / name, target)
        elif made.how == "whole":
            shutil.copyfile(delta / WHOLE / name, target)
        else:
            before = np.memmap(parent / name, np.uint8, "r")
            _check_pieces(made.pieces, manifest.result.files[name].size, len(before))
            with target.open("xb") as sink:
                for piece in made.pieces:
                    for part in _make(piece, before, changes):
                        sink.write(part.data)


def _share(source: Path, target: Path) -> None:
    """The same file under a second name where the disk can; files of bundles do not change."""
    try:
        target.hardlink_to(source)
    except OSError:
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise files.storage_error(error, target) from error


def _check_pieces(pieces: Sequence[Piece], size: int, before: int) -> None:
    """Raises ValueError for pieces that are not those of a file of `size` bytes, or lie beyond the parent's file."""
    if min((one.size for one in pieces), default=0) < 0 or sum(one.size for one in pieces) != size:
        raise ValueError(f"its pieces are not those of {size} bytes")
    for one in pieces:
        width, rows = (one.width, one.before) if one.kind == "rows" else (1, one.size if one.kind == "parent" else 0)
        if width < 1 or min(one.start, rows) < 0 or one.size % width or one.start + rows * width > before:
            raise ValueError(f"a piece lies beyond the {before} bytes of the parent")


def _make(piece: Piece, before: Bytes, changes: Mapping[str, npt.NDArray[Any]]) -> Iterator[Bytes]:
    """Raises KeyError, IndexError and ValueError for a piece that does not fit."""
    if piece.kind == "new":
        yield changes[piece.data].reshape(-1).view(np.uint8)
    elif piece.kind == "zeros":
        for start in range(0, piece.size, CHUNK):
            yield np.zeros(min(CHUNK, piece.size - start), np.uint8)
    elif piece.kind == "parent":
        yield before[piece.start : piece.start + piece.size]
    else:
        yield from _merge(piece, before, changes[piece.gone], changes[piece.at], changes[piece.data])


def _merge(piece: Piece, before: Bytes, gone: Places, at: Places, data: Bytes) -> Iterator[Bytes]:
    """The rows of the parent that stay, in their order, with `data` at `at`; some megabytes at a time."""
    parents = before[piece.start : piece.start + piece.before * piece.width].reshape(piece.before, piece.width)
    stays = np.ones(piece.before, bool)
    stays[gone] = False
    kept, count = np.flatnonzero(stays), piece.size // piece.width
    if len(kept) + len(at) != count:
        raise ValueError(f"{len(kept)} rows of the parent and {len(at)} new ones are not {count}")
    step = max(1, CHUNK // piece.width)
    for first in range(0, count, step):
        last = min(first + step, count)
        low, high = np.searchsorted(at, (first, last))
        fresh = np.zeros(last - first, bool)
        fresh[at[low:high] - first] = True
        rows = np.empty((last - first, piece.width), np.uint8)
        rows[fresh] = data[low:high]
        rows[~fresh] = parents[kept[first - low : last - high]]
        yield rows.reshape(-1)
