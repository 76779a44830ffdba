"""Opens a bundle: it is what was sealed, to the byte, or an error names the file at fault. Runs nothing of it.

Every file is digested on open; after that only the names in the manifest are read. A packed bundle (one file) is
unpacked first, into a folder that lives as long as the Bundle does, or into `cache`, where the next process finds it.

Unpacking reads the manifest first (bounded), and writes only the files that its table names, each no longer than the
table says. So neither a path that leads outside, nor a link, nor a zip bomb reaches the disk.
"""

import os
import stat
import weakref
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec

from trueline import files
from trueline.bundle import golden as golden_files
from trueline.bundle import schema
from trueline.bundle.golden import Golden
from trueline.bundle.schema import BundleManifest, Evidence, ProgramEntry
from trueline.bundle.signature import Signature
from trueline.columns.fitted import FittedColumns
from trueline.columns.fitted import decode as decode_columns
from trueline.errors import BundleError, StorageError, join_names

MAX_BYTES = 64 * 2**30
"""No packed bundle unpacks to more."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Bundle:
    """A verified bundle on disk."""

    path: Path
    manifest: BundleManifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def signature(self) -> Signature:
        return self.manifest.signature

    def _repr_html_(self) -> str:
        """What a notebook shows. `trueline bundle report` writes the whole page."""
        sides = (("input", self.signature.inputs), ("output", self.signature.outputs))
        rows = [("bundle", self.name), ("digest", self.digest)]
        for side, specs in sides:
            rows += [(side, f"{one.name} {one.datatype} [{', '.join(map(str, one.shape))}]") for one in specs]
        for one in self.manifest.programs:
            served = ", served" if one.format == self.manifest.serve else ""
            rows.append((one.format, f"{'proven' if one.proven else 'not proven'} on {one.probes} probes{served}"))
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
        return f"<table>{cells}</table>"

    def program(self, format: str | None = None) -> ProgramEntry:
        """The program in `format`, or the one to serve. Raises BundleError that lists the formats."""
        format = format or self.manifest.serve
        for entry in self.manifest.programs:
            if entry.format == format:
                return entry
        formats = join_names(entry.format for entry in self.manifest.programs)
        raise BundleError(f"bundle {self.path} has no program in format '{format}' (has: {formats})")

    def signature_of(self, format: str | None = None) -> Signature:
        """The signature, with the needs of `program(format)`."""
        entry = self.program(format)
        signature = self.signature.with_rows(entry.rows) if entry.rows else self.signature
        return signature.with_values(entry.values) if entry.values else signature

    def program_path(self, format: str | None = None) -> Path:
        """The file of `program(format)`."""
        return self.path / self.program(format).file

    def golden(self) -> tuple[Golden, ...]:
        """The golden records as numpy arrays."""
        inputs = (self.path / schema.GOLDEN_INPUTS).read_bytes()
        outputs = (self.path / schema.GOLDEN_OUTPUTS).read_bytes()
        known = schema.GOLDEN_BOUNDS in self.manifest.files
        bounds = (self.path / schema.GOLDEN_BOUNDS).read_bytes() if known else None
        return golden_files.decode(self.manifest.golden, inputs, outputs, str(self.path), bounds)

    def columns(self) -> FittedColumns | None:
        """How records become inputs, and outputs class names; None without columns. Raises BundleError."""
        path = self.path / schema.COLUMNS
        return decode_columns(path.read_bytes(), str(path)) if schema.COLUMNS in self.manifest.files else None

    def golden_records(self) -> list[dict[str, Any]]:
        """The records of the golden case RECORDS_CASE. Raises BundleError."""
        path = self.path / schema.GOLDEN_RECORDS
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        except msgspec.DecodeError as error:
            raise BundleError(f"{path} holds no records: {error}") from error

    def evidence(self) -> Iterator[Evidence]:
        """Every comparison, in order."""
        path = self.path / schema.EVIDENCE
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield msgspec.json.decode(line, type=Evidence)
                except msgspec.DecodeError as error:
                    raise BundleError(f"{path} line {number} is no evidence: {error}") from error

    def lineage(self) -> dict[str, Any]:
        """Recipe, data, checkpoint, certificates, versions, parent."""
        path = self.path / schema.LINEAGE
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BundleError(f"{path} is no lineage: {error}") from error


def open_bundle(path: Path, *, cache: Path | None = None) -> Bundle:
    """Opens and verifies the bundle at `path`, a folder or a packed file. Raises BundleError, StorageError."""
    path = Path(path)
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise BundleError(f"there is no bundle at {path}", hint="`trueline capture` makes one")
    if cache is not None:
        return open_folder(unpack_once(path, Path(cache)))
    place = files.TemporaryFolder("bundle")
    try:
        bundle = open_folder(unpack(path, place.path / "bundle"))
    except BaseException:
        place.remove()
        raise
    weakref.finalize(bundle, place.remove)
    return bundle


def open_folder(folder: Path) -> Bundle:
    """Opens and verifies a bundle that is a folder. Raises BundleError."""
    manifest = schema.decode(_read_manifest(folder), str(folder / schema.MANIFEST))
    found = _walk(folder)
    for name in sorted(found - manifest.files.keys()):
        raise BundleError(f"{folder / name} does not belong to the bundle", hint="remove it, or copy the bundle again")
    for name, entry in manifest.files.items():
        if name not in found:
            raise BundleError(f"{folder / name} is missing from the bundle", hint=schema.AGAIN)
        path, size = folder / name, (folder / name).stat().st_size
        if size != entry.size:
            raise BundleError(f"{path} has {size} bytes, sealed were {entry.size}: it is torn", hint=schema.AGAIN)
        if files.sha256_file(path) != entry.sha256:
            raise BundleError(f"{path} was changed after it was sealed: its SHA-256 does not match", hint=schema.AGAIN)
    return Bundle(path=folder, manifest=manifest)


def _read_manifest(folder: Path) -> bytes:
    path = folder / schema.MANIFEST
    try:
        found = path.lstat()
    except FileNotFoundError as error:
        raise BundleError(f"{folder} is no bundle: it has no {schema.MANIFEST}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > schema.MANIFEST_BYTES:
        raise BundleError(f"{path} is not a regular file of at most {schema.MANIFEST_BYTES} bytes")
    return path.read_bytes()


def _walk(folder: Path) -> set[str]:
    """Names of all files but the manifest. A link or device is an error: it may lead outside."""
    found = set()
    for root, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(root, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise BundleError(f"{path} is a link or a device; a bundle holds plain files only")
            if stat.S_ISREG(mode):
                found.add(path.relative_to(folder).as_posix())
    return found - {schema.MANIFEST}


def unpack(file: Path, folder: Path) -> Path:
    """Unpacks the packed bundle `file` as `folder`, atomically. Raises BundleError, StorageError."""
    file = Path(file)
    try:
        with zipfile.ZipFile(file) as archive, files.atomic_dir(folder) as partial:
            _extract(archive, partial, file)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise BundleError(f"{file} is torn or no packed bundle: {error}", hint=schema.AGAIN) from error
    return folder


def unpack_once(file: Path, cache: Path) -> Path:
    """Unpacks `file` into `cache` under its SHA-256, unless it is there already."""
    folder = cache / files.sha256_file(file)
    if folder.exists():
        return folder
    try:
        return unpack(file, folder)
    except StorageError:
        if (folder / schema.MANIFEST).exists():  # another process was faster
            return folder
        raise


def _extract(archive: zipfile.ZipFile, partial: Path, file: Path) -> None:
    try:
        with archive.open(schema.MANIFEST) as member:
            text = member.read(schema.MANIFEST_BYTES + 1)
    except (KeyError, RuntimeError) as error:
        raise BundleError(f"{file} is no packed bundle: it has no readable {schema.MANIFEST}") from error
    if len(text) > schema.MANIFEST_BYTES:
        raise BundleError(f"{file}:{schema.MANIFEST} has more than {schema.MANIFEST_BYTES} bytes")
    manifest = schema.decode(text, f"{file}:{schema.MANIFEST}")
    if sum(entry.size for entry in manifest.files.values()) > MAX_BYTES:
        raise BundleError(f"{file} would unpack to more than {MAX_BYTES} bytes")
    _check_members(archive, {schema.MANIFEST, *manifest.files}, file)
    (partial / schema.MANIFEST).write_bytes(text)
    for name, entry in manifest.files.items():
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, target.open("xb") as sink:
            if _copy(source, sink, entry.size) != entry.size or source.read(1):
                raise BundleError(f"{file}:{name} does not have the {entry.size} bytes that were sealed: it is torn")


def _check_members(archive: zipfile.ZipFile, expected: set[str], file: Path) -> None:
    found = [member.filename for member in archive.infolist()]
    for member in archive.infolist():
        kind = stat.S_IFMT(member.external_attr >> 16)
        if member.filename not in expected or kind not in (0, stat.S_IFREG) or member.flag_bits & 1:
            raise BundleError(
                f"{file} holds {member.filename!r}, which is no plain file of the bundle",
                hint="do not use this bundle: it was not made by Trueline",
            )
    if len(found) != len(set(found)):
        raise BundleError(f"{file} holds a name twice")
    for name in sorted(expected - set(found)):
        raise BundleError(f"{file}:{name} is missing from the bundle", hint=schema.AGAIN)


def _copy(source: IO[bytes], sink: BinaryIO, size: int) -> int:
    copied = 0
    while piece := source.read(min(2**20, size - copied)):
        copied += sink.write(piece)
    return copied
