"""The model store: the folder of bundles and archives that clients may load by name.

`NAME.bundle` and `NAME.tlb` are version 1 of NAME, `NAME/VERSION.bundle` is another version; archives have the names of
their manifests. Clients name entries, never paths: `..`, absolute paths and links that leave the store are rejected
(compare CVE-2024-35198).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trueline.errors import NotFound, RequestError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MANIFEST = "bundle.json"


class NotInStore(NotFound):
    pass


@dataclass(frozen=True, slots=True)
class Entry:
    """A bundle or an archive; clients name it by `source`."""

    model: str
    version: str
    source: str
    path: Path


def check_name(what: str, name: str) -> str:
    """`name`, if it is a valid name of a model or a version. Raises RequestError."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"{what} '{name[:64]}' is no name here: letters, digits and . _ - go, at most 128, not a dot first"
        )
    return name


class Store:
    def __init__(self, folder: Path, name_of: Callable[[Path], tuple[str, str] | None] = lambda _: None) -> None:
        """`name_of`: model and version of an archive; None for other files."""
        self.folder = folder.resolve()
        self._name_of = name_of

    def find(self, source: str) -> Path:
        """The path of the entry `source`. Raises NotFound for a path outside the store, NotInStore."""
        parts = source.split("/")
        named = len(parts) <= 2 and all(map(NAME.fullmatch, parts))
        path = (self.folder / source).resolve() if named else None
        if path is None or not path.is_relative_to(self.folder):
            raise NotFound(f"Relative path is not allowed in url: {source[:128]}")
        if not path.exists():
            raise NotInStore(f"Model not found at: {source[:128]}")
        return path

    def entries(self) -> list[Entry]:
        """All bundles and archives."""
        found: list[Entry] = []
        for path in sorted(self._visible(self.folder)):
            if _is_bundle(path):
                found.append(Entry(_stem(path), "1", path.name, path))
            elif (name := self._name_of(path)) is not None:
                found.append(Entry(*name, path.name, path))
            elif path.is_dir():
                inner = sorted(self._visible(path))
                found += [
                    Entry(path.name, _stem(one), f"{path.name}/{one.name}", one) for one in inner if _is_bundle(one)
                ]
                named = [(self._name_of(one), one) for one in inner]
                found += [Entry(*name, f"{path.name}/{one.name}", one) for name, one in named if name is not None]
        return found

    def of(self, model: str) -> list[Entry]:
        """The versions of one model, the newest last: by number if all are numbers, else by name."""
        found = [entry for entry in self.entries() if entry.model == model]
        numbered = all(entry.version.isdecimal() for entry in found)
        return sorted(found, key=lambda entry: int(entry.version) if numbered else entry.version)

    def _visible(self, folder: Path) -> list[Path]:
        return [
            path
            for path in folder.iterdir()
            if NAME.fullmatch(path.name) and path.resolve().is_relative_to(self.folder)
        ]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".tlb").removesuffix(".bundle")


def _is_bundle(path: Path) -> bool:
    """A sealed folder, or a packed file."""
    return (path / MANIFEST).is_file() if path.is_dir() else path.name.endswith((".bundle", ".tlb"))
