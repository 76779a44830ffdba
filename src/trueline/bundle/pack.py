"""One file for a bundle: a plain zip, nothing compressed, names sorted, no clock inside."""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
from pathlib import Path

from trueline import files
from trueline.bundle import schema
from trueline.bundle.read import open_folder
from trueline.errors import StorageError

_EPOCH = (1980, 1, 1, 0, 0, 0)
_PIECE = 2**20


def pack(folder: Path, out: Path, *, overwrite: bool = False) -> Path:
    """Packs the bundle in `folder` into the file `out`, atomically; equal bundles give equal bytes.

    The bundle is verified first. Raises BundleError, StorageError.
    """
    folder, out = Path(folder), Path(out)
    bundle = open_folder(folder)
    if out.exists() and not overwrite:
        raise StorageError(f"{out} exists already", hint="choose another name or ask to replace it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _pack(folder, [schema.MANIFEST, *sorted(bundle.manifest.files)], out)
    except OSError as error:
        raise files.storage_error(error, out) from error
    return out


def _pack(folder: Path, names: list[str], out: Path) -> None:
    partial = out.with_name(f"{files.PARTIAL}{os.getpid()}-{out.name}")
    try:
        with partial.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name in names:
                    member = zipfile.ZipInfo(name, _EPOCH)
                    member.external_attr = (stat.S_IFREG | 0o644) << 16
                    member.file_size = (folder / name).stat().st_size
                    with (folder / name).open("rb") as source, archive.open(member, "w") as target:
                        shutil.copyfileobj(source, target, _PIECE)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
