"""One file for a bundle: a plain zip, nothing compressed, names sorted, no clock inside."""

from __future__ import annotations

import shutil
import stat
import zipfile
from pathlib import Path
from typing import BinaryIO

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
    with files.atomic_file(out) as file:
        _pack(folder, [schema.MANIFEST, *sorted(bundle.manifest.files)], file)
    return out


def _pack(folder: Path, names: list[str], file: BinaryIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            member = zipfile.ZipInfo(name, _EPOCH)
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            member.file_size = (folder / name).stat().st_size
            with (folder / name).open("rb") as source, archive.open(member, "w") as target:
                shutil.copyfileobj(source, target, _PIECE)
