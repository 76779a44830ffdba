"""Seals a bundle, whole or not at all, and packs one into a file.

The caller has emitted and proven the programs; this module does not judge the proofs: it refuses only what could not be
opened again.
"""

import shutil
import stat
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from trueline import clock, files
from trueline.bundle import golden as golden_files
from trueline.bundle import schema
from trueline.bundle.golden import Golden
from trueline.bundle.read import Bundle, open_folder
from trueline.bundle.schema import BundleManifest, Evidence, FileEntry, ProgramEntry, Summary
from trueline.bundle.signature import Signature
from trueline.columns.fitted import FittedColumns
from trueline.columns.fitted import encode as encode_columns
from trueline.errors import StorageError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a bundle. `programs` pairs each entry with the folder that holds its file under the same name."""

    name: str
    signature: Signature
    programs: Sequence[tuple[ProgramEntry, Path]]
    serve: str
    golden: Sequence[Golden]
    evidence: Sequence[Evidence]
    lineage: Mapping[str, Any]
    """JSON values, for `lineage.json`."""
    summary: Summary
    columns: FittedColumns | None = None
    records: Sequence[Mapping[str, Any]] = ()
    """With `columns`: the records of the golden case RECORDS_CASE, as JSON's values."""


def seal(out: Path, contents: Contents, *, overwrite: bool = False) -> Bundle:
    """Writes the bundle to `out`, atomically, and opens it with every check. Raises StorageError, UsageError.

    All files in the folder of a program belong to it (external weights).
    """
    out = Path(out)
    if not contents.golden:
        raise UsageError("a bundle needs at least one golden record; give the recipe records or examples()")
    if out.exists() and overwrite and not (out / schema.MANIFEST).is_file():
        raise UsageError(f"{out} exists and is no bundle; it is not replaced", hint="choose another name")
    with files.atomic_dir(out, replace=overwrite) as partial:
        _write_files(partial, contents)
        manifest = schema.with_digest(_manifest(contents, partial))
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
    inputs, outputs, bounds = golden_files.encode(contents.golden)
    (partial / schema.GOLDEN_INPUTS).write_bytes(inputs)
    (partial / schema.GOLDEN_OUTPUTS).write_bytes(outputs)
    if any(golden.bounds for golden in contents.golden):
        (partial / schema.GOLDEN_BOUNDS).write_bytes(bounds)
    if contents.columns is not None:
        (partial / schema.COLUMNS).write_bytes(encode_columns(contents.columns))
        (partial / schema.GOLDEN_RECORDS).write_bytes(msgspec.json.encode(contents.records))
    (partial / schema.EVIDENCE).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in contents.evidence))
    lineage = msgspec.json.encode(contents.lineage, order="sorted")
    (partial / schema.LINEAGE).write_bytes(msgspec.json.format(lineage, indent=1) + b"\n")


def _manifest(contents: Contents, folder: Path) -> BundleManifest:
    table = {
        path.relative_to(folder).as_posix(): FileEntry(sha256=files.sha256_file(path), size=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return BundleManifest(
        schema=schema.SCHEMA, name=contents.name, created=clock.utc_now(), signature=contents.signature,
        programs=tuple(entry for entry, _ in contents.programs), serve=contents.serve,
        golden=tuple(golden.case for golden in contents.golden), files=table, lineage=contents.summary,
    )  # fmt: skip


def pack(folder: Path, out: Path, *, overwrite: bool = False) -> Path:
    """Packs the bundle in `folder` into the file `out`, atomically; equal bundles give equal bytes.

    The bundle is verified first. Raises BundleError, StorageError.
    """
    folder, out = Path(folder), Path(out)
    bundle = open_folder(folder)
    if out.exists() and not overwrite:
        raise StorageError(f"{out} exists already", hint="choose another name or ask to replace it")
    with files.atomic_file(out) as file:
        write_zip(file, {name: folder / name for name in (schema.MANIFEST, *sorted(bundle.manifest.files))})
    return out


def write_zip(file: BinaryIO, contents: Mapping[str, Path | str]) -> None:
    """Writes files (by Path) and texts by name, uncompressed and without times: equal contents give equal bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            if isinstance(content, str):
                archive.writestr(member, content)
                continue
            member.file_size = content.stat().st_size
            with content.open("rb") as source, archive.open(member, "w") as target:
                shutil.copyfileobj(source, target, 2**20)
