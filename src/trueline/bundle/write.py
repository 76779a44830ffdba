"""Sealing: everything a bundle holds goes to the disk whole, or nothing does.

The caller has emitted and proven; this module copies, counts, digests and renames. It knows no torch and
does not judge the proofs: it refuses only what could not be opened again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trueline import clock, files
from trueline.bundle import golden as golden_files
from trueline.bundle import schema
from trueline.bundle.golden import Golden
from trueline.bundle.read import Bundle, open_folder
from trueline.bundle.schema import BundleManifest, Evidence, FileEntry, ProgramEntry, Summary
from trueline.bundle.signature import Signature
from trueline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What goes into a bundle.

    `programs` pairs each entry with the folder that holds its file under the same name.
    """

    name: str
    signature: Signature
    programs: Sequence[tuple[ProgramEntry, Path]]
    serve: str
    golden: Sequence[Golden]
    evidence: Sequence[Evidence]
    lineage: Mapping[str, Any]
    """JSON values; goes into `lineage.json` as it is."""
    summary: Summary


def seal(out: Path, contents: Contents, *, overwrite: bool = False) -> Bundle:
    """Writes the bundle to `out`, atomically, and opens it with every check. Raises StorageError, UsageError.

    The folder of a program may hold further files beside it (external weights): all of them go along.
    """
    out = Path(out)
    if not contents.golden:
        raise UsageError("a bundle needs at least one golden example; give the recipe records or examples()")
    if out.exists() and overwrite and not (out / schema.MANIFEST).is_file():
        raise UsageError(f"{out} exists and is no bundle; it is not replaced", hint="choose another name")
    with files.atomic_dir(out, replace=overwrite) as partial:
        _write_files(partial, contents)
        manifest = schema.with_digest(_manifest(contents, _table(partial)))
        schema.decode(schema.encode(manifest), schema.MANIFEST)
        (partial / schema.MANIFEST).write_bytes(schema.encode(manifest))
    return open_folder(out)


def _write_files(partial: Path, contents: Contents) -> None:
    for _, folder in contents.programs:
        for source in sorted(path for path in folder.rglob("*") if path.is_file()):
            target = partial / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    (partial / "golden").mkdir()
    inputs, outputs = golden_files.encode(contents.golden)
    (partial / schema.GOLDEN_INPUTS).write_bytes(inputs)
    (partial / schema.GOLDEN_OUTPUTS).write_bytes(outputs)
    (partial / schema.EVIDENCE).write_bytes(_lines(contents.evidence))
    lineage = msgspec.json.encode(contents.lineage, order="sorted")
    (partial / schema.LINEAGE).write_bytes(msgspec.json.format(lineage, indent=1) + b"\n")


def _lines(evidence: Iterable[Evidence]) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in evidence)


def _table(folder: Path) -> dict[str, FileEntry]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileEntry(sha256=files.sha256_file(path), size=path.stat().st_size)
        for path in found
    }


def _manifest(contents: Contents, table: dict[str, FileEntry]) -> BundleManifest:
    return BundleManifest(
        schema=schema.SCHEMA,
        name=contents.name,
        created=clock.utc_now(),
        signature=contents.signature,
        programs=tuple(entry for entry, _ in contents.programs),
        serve=contents.serve,
        golden=tuple(golden.case for golden in contents.golden),
        files=table,
        lineage=contents.summary,
    )
