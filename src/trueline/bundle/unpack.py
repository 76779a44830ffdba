"""Unpacking trusts nothing.

The manifest is read first (bounded), and only the files that its table names are written, each no longer
than the table says. So neither a path that leads outside, nor a link, nor a bomb gets to the disk. The
digests are then checked by `open_bundle` like those of any bundle.
"""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path
from typing import IO, BinaryIO

from trueline import files
from trueline.bundle import schema
from trueline.errors import BundleError, StorageError

MAX_BYTES = 64 * 2**30
"""No packed bundle unpacks to more."""
_PIECE = 2**20


def unpack(file: Path, folder: Path) -> Path:
    """Unpacks the packed bundle `file` as `folder`, atomically. Raises BundleError, StorageError."""
    file = Path(file)
    try:
        with zipfile.ZipFile(file) as archive, files.atomic_dir(folder) as partial:
            _unpack(archive, partial, file)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise BundleError(f"{file} is torn or no packed bundle: {error}", hint=schema.AGAIN) from error
    return folder


def unpack_once(file: Path, cache: Path) -> Path:
    """Unpacks `file` into `cache` under its SHA-256, unless it lies there already."""
    folder = cache / files.sha256_file(file)
    if folder.exists():
        return folder
    try:
        return unpack(file, folder)
    except StorageError:
        if (folder / schema.MANIFEST).exists():  # another process was faster
            return folder
        raise


def _unpack(archive: zipfile.ZipFile, partial: Path, file: Path) -> None:
    text = _manifest_bytes(archive, file)
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


def _manifest_bytes(archive: zipfile.ZipFile, file: Path) -> bytes:
    try:
        with archive.open(schema.MANIFEST) as member:
            text = member.read(schema.MANIFEST_BYTES + 1)
    except (KeyError, RuntimeError) as error:
        raise BundleError(f"{file} is no packed bundle: it has no readable {schema.MANIFEST}") from error
    if len(text) > schema.MANIFEST_BYTES:
        raise BundleError(f"{file}:{schema.MANIFEST} has more than {schema.MANIFEST_BYTES} bytes")
    return text


def _check_members(archive: zipfile.ZipFile, wanted: set[str], file: Path) -> None:
    found = [member.filename for member in archive.infolist()]
    for member in archive.infolist():
        kind = stat.S_IFMT(member.external_attr >> 16)
        if member.filename not in wanted or kind not in (0, stat.S_IFREG) or member.flag_bits & 1:
            raise BundleError(
                f"{file} holds {member.filename!r}, which is no plain file of the bundle",
                hint="do not use this bundle: it was not made by Trueline",
            )
    if len(found) != len(set(found)):
        raise BundleError(f"{file} holds a name twice")
    for name in sorted(wanted - set(found)):
        raise BundleError(f"{file}:{name} is missing from the bundle", hint=schema.AGAIN)


def _copy(source: IO[bytes], sink: BinaryIO, size: int) -> int:
    done = 0
    while done < size:
        piece = source.read(min(_PIECE, size - done))
        if not piece:
            break
        done += sink.write(piece)
    return done
