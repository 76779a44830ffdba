"""Records from a folder of images with one folder for each class, as in torchvision's ImageFolder.

    train/cat/1.png  train/dog/7.jpg     ->     image (the file's bytes), label (0: cat, 1: dog), path ('cat/1.png')

Classes are numbered in the order of their names, images sorted by path. Nothing is decoded here.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from trueline.data.source import split_units
from trueline.errors import DataError
from trueline.storage.listing import is_visible
from trueline.storage.location import LocalFile

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
UNIT_RECORDS = 256
SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int64()), ("path", pa.string())])


def is_image_folder(folder: Path) -> bool:
    """Whether some sub-folder begins with images."""
    return any(child.is_dir() and is_visible(child.name) and next(_images(child), None) for child in folder.iterdir())


class ImageRecords:
    """With `named`, labels are the names of the folders, which are the same in every folder of images."""

    ranged = forks = True

    def __init__(self, folder: Path, *, named: bool = False) -> None:
        self._folder, self._named = folder, named
        self.schema = SCHEMA.set(1, pa.field("label", pa.string())) if named else SCHEMA
        self.classes = sorted(child.name for child in folder.iterdir() if child.is_dir() and is_visible(child.name))
        stray = next((file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES), None)
        if stray is not None:
            raise DataError(f"{stray} lies in no folder of a class", hint=f"classes are the folders in {folder}")
        self._files: list[tuple[LocalFile, int]] = []
        for label, name in enumerate(self.classes):
            paths = sorted(_images(folder / name))
            if not paths:
                raise DataError(f"{folder / name} has no images", hint="remove the folder, or add images of its class")
            self._files += [(LocalFile.at(path), label) for path in paths]
        self.units = split_units(str(folder), len(self._files), UNIT_RECORDS)

    def load(self, number: int, start: int, stop: int) -> pa.Table:
        offset = self.units[number].offset
        chosen = self._files[offset + start : offset + stop]
        images = [_read(file) for file, _ in chosen]
        labels = [self.classes[label] if self._named else label for _, label in chosen]
        paths = [file.path.relative_to(self._folder).as_posix() for file, _ in chosen]
        return pa.table({"image": images, "label": labels, "path": paths}, schema=self.schema)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file, label in self._files:
            digest.update(f"{file.path.relative_to(self._folder)}:{label}:{file.stamp};".encode())
        return digest.hexdigest()


def _images(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        paths = (Path(root, name) for name in sorted(names))
        yield from (path for path in paths if path.suffix.lower() in SUFFIXES and is_visible(path.name))


def _read(file: LocalFile) -> bytes:
    file.check()
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {error.strerror}") from error
