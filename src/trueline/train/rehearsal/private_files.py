"""Gives a process that pretends to be another one files of its own: what it writes, renames and removes stays unseen.

Under the name of another worker a loss may open that worker's log, or its lock. So a file that is opened for writing is
a copy, which later reads of its path find, as far as Python code names the path: `open`, `pathlib`, `os.open`,
`numpy.save`, `torch.save`. What a library writes by itself in C (`sqlite3`) is not among it, and a listing of a folder
does not have them.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trueline.files import TemporaryFolder
from trueline.train.rehearsal.entropy import Replacement

MOST_BYTES = 64 << 20
"""Of a file that is copied; the copy of a larger one begins empty."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@contextmanager
def keep_apart() -> Iterator[list[tuple[Any, Any]]]:
    """In this block nothing that Python code writes reaches a file of others; folders that it made are gone after it,
    unless another process has put something there. Yields functions, each with what is called instead."""
    with TemporaryFolder("trial") as folder:
        files = _PrivateFiles(folder)
        replaced = files.list_replacements()
        usual = [(room, name, getattr(room, name)) for room, name, _ in replaced]
        try:
            for room, name, other in replaced:
                setattr(room, name, other)
            yield [(plain, other) for (_, _, plain), (_, _, other) in zip(usual, replaced, strict=True)]
        finally:
            for room, name, plain in usual:
                setattr(room, name, plain)
            files.remove_folders()


class _PrivateFiles:
    """Each has a path and, in `folder`, its copy; without one it is removed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, builtins.open
        self._copies: dict[str, str | None] = {}
        self._made: list[str] = []
        self._number = 0

    def list_replacements(self) -> list[Replacement]:
        opener = self._replace_open(self._open)
        renames = [(os, name, self._replace_rename(getattr(os, name))) for name in ("rename", "replace")]
        removes = [(os, name, self._replace_remove(getattr(os, name))) for name in ("remove", "unlink")]
        changes = [(os, name, self._replace_change(getattr(os, name))) for name in ("utime", "chmod", "truncate")]
        reads = [(os, name, self._replace_read(getattr(os, name))) for name in ("stat", "lstat", "access")]
        return [(builtins, "open", opener), (io, "open", opener), (os, "open", self._replace_os_open(os.open)),
                (torch, "save", self._replace_save(torch.save)), (os, "mkdir", self._replace_mkdir(os.mkdir)),
                *renames, *removes, *changes, *reads]  # fmt: skip

    def remove_folders(self) -> None:
        for path in reversed(self._made):
            if os.path.isdir(path) and not os.listdir(path):
                os.rmdir(path)

    def _find(self, path: Any) -> Any:
        """Where `path` is read."""
        copy = self._copies.get(key, "") if (key := _make_key(path)) else ""
        return copy or path

    def _copy(self, path: Any, *, empty: bool = False) -> Any:
        """Where `path` is written: a device, a folder and what cannot be written stay what they are."""
        key = _make_key(path)
        if not key:
            return path
        if self._copies.get(key) is None:
            removed, parent = key in self._copies, os.path.dirname(key)
            there = os.path.lexists(key) and not removed
            if (there and not (os.path.isfile(key) and os.access(key, os.W_OK))) or not os.access(parent, os.W_OK):
                return path
            full = there and not empty and os.path.getsize(key) <= MOST_BYTES
            self._copies[key] = self._make_copy(key if full else os.devnull) if there else self._name_copy()
        return self._copies[key]

    def _make_copy(self, key: str) -> str:
        copy = self._name_copy()
        with self._open(key, "rb") as source, self._open(copy, "wb") as target:
            shutil.copyfileobj(source, target)
        return copy

    def _name_copy(self) -> str:
        self._number += 1
        return str(self._folder / str(self._number))

    def _is_there(self, path: Any) -> bool:
        key = _make_key(path)
        return bool(key) and (self._copies[key] is not None if key in self._copies else os.path.lexists(key))

    def _expect_there(self, path: Any) -> None:
        if _make_key(path) in self._copies and not self._is_there(path):
            raise FileNotFoundError(2, os.strerror(2), os.fspath(path))

    def _choose(self, path: Any, *, writes: bool, empty: bool, makes: bool, new: bool) -> Any:
        if not makes:
            self._expect_there(path)
        there = self._is_there(path)
        if not writes or (new and there) or not (makes or there):  # the last two are errors of the system's
            return self._find(path)
        return self._copy(path, empty=empty)

    def _replace_open(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def open_private(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
            chosen = self._choose(
                file, writes=bool(set("wax+") & set(mode)), empty="w" in mode, makes="r" not in mode, new="x" in mode
            )
            return plain(chosen, mode, *given, **named)

        return open_private

    def _replace_os_open(self, plain: Callable[..., int]) -> Callable[..., int]:
        def open_private(path: Any, flags: int, *given: Any, **named: Any) -> int:
            if named.get("dir_fd") is not None:
                return plain(path, flags, *given, **named)
            makes, empty = bool(flags & os.O_CREAT), bool(flags & os.O_TRUNC)
            chosen = self._choose(
                path, writes=bool(flags & _WRITES), empty=empty, makes=makes, new=makes and bool(flags & os.O_EXCL)
            )
            return plain(chosen, flags, *given, **named)

        return open_private

    def _replace_save(self, plain: Callable[..., None]) -> Callable[..., None]:
        def save_private(value: Any, f: Any, *given: Any, **named: Any) -> None:
            plain(value, self._copy(f, empty=True), *given, **named)

        return save_private

    def _replace_mkdir(self, plain: Callable[..., None]) -> Callable[..., None]:
        def make_folder(path: Any, *given: Any, **named: Any) -> None:
            plain(path, *given, **named)
            if key := _make_key(path):
                self._made.append(key)

        return make_folder

    def _replace_remove(self, plain: Callable[..., None]) -> Callable[..., None]:
        def remove_private(path: Any, *given: Any, **named: Any) -> None:
            self._expect_there(path)
            key = _make_key(path)
            if not key or named.get("dir_fd") is not None or (key not in self._copies and not os.path.isfile(key)):
                plain(path, *given, **named)
            else:
                self._copies[key] = None

        return remove_private

    def _replace_read(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read_private(path: Any, *given: Any, **named: Any) -> Any:
            key = _make_key(path) if named.get("dir_fd") is None else ""
            if key in self._copies:
                path = self._copies[key] or str(self._folder / "removed")
            return plain(path, *given, **named)

        return read_private

    def _replace_change(self, plain: Callable[..., None]) -> Callable[..., None]:
        def change_private(path: Any, *given: Any, **named: Any) -> None:
            self._expect_there(path)
            plain(self._copy(path) if os.path.isfile(path) else path, *given, **named)

        return change_private

    def _replace_rename(self, plain: Callable[..., None]) -> Callable[..., None]:
        def rename_private(source: Any, target: Any, *given: Any, **named: Any) -> None:
            self._expect_there(source)
            old, new = _make_key(source), _make_key(target)
            if old not in self._copies:
                if not os.path.isfile(old):
                    plain(source, target, *given, **named)
                    self._move_all(old, new)
                    return
                self._copies[old] = self._make_copy(old)
            self._copies[new], self._copies[old] = self._copies[old], None

        return rename_private

    def _move_all(self, old: str, new: str) -> None:
        """After a folder was renamed."""

        def move(path: str) -> str:
            return new + path[len(old) :] if path == old or path.startswith(f"{old}{os.sep}") else path

        self._copies = {move(path): copy for path, copy in self._copies.items()}
        self._made = [move(path) for path in self._made]


def _make_key(path: Any) -> str:
    """Empty: of a descriptor, or of entropy."""
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    return os.path.abspath(os.fsdecode(path))
