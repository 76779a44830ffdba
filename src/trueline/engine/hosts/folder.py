"""The files of a job that travel to joined hosts: named by their content, and so sent once and checked on arrival.

What `.gitignore` ignores stays, and so do hidden folders, bytecode, virtual environments and folders of jobs. Data is
read where it lies: a folder that is too large is refused with the names of its largest files.
"""

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from trueline import files
from trueline.engine.hosts.messages import TravelledFile
from trueline.errors import StorageError, UsageError

MOST_BYTES = 512 << 20
CODE = "code"
"""The folder of the recipe, in the job's folder on a joined host."""
_SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
_MARKS = ("pyvenv.cfg", "job.json", "submitted.json")
"""Files that mark the folder of a virtual environment, or of a job on this machine or in a store."""
_SPARE = {".pyc", ".pyo"}
_DIGEST = re.compile("[0-9a-f]{64}")


def list_files(folder: Path) -> list[Path]:
    """The files below `folder` that travel, in order."""
    return sorted(_walk(folder, []))


def _walk(folder: Path, ignores: list[tuple[Path, Callable[[str], bool]]]) -> Iterator[Path]:
    import pathspec

    if (folder / ".gitignore").is_file():
        lines = (folder / ".gitignore").read_text(errors="replace").splitlines()
        ignores = [*ignores, (folder, pathspec.GitIgnoreSpec.from_lines(lines).match_file)]
    for entry in sorted(folder.iterdir()):
        shown = "/" if entry.is_dir() else ""
        if any(matches(f"{entry.relative_to(base).as_posix()}{shown}") for base, matches in ignores):
            continue
        if entry.is_dir():
            hidden = entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS or entry.is_symlink()
            if not hidden and not any((entry / mark).exists() for mark in _MARKS):
                yield from _walk(entry, ignores)
        elif entry.is_file() and entry.suffix not in _SPARE:
            yield entry


def pack(sources: Mapping[str, Path], blobs: Path) -> tuple[TravelledFile, ...]:
    """Copies the files `sources` (by their path in the job's folder on a joined host) to `blobs`, named by digest.

    Raises UsageError if they are too large, StorageError.
    """
    sizes = {path: source.stat().st_size for path, source in sources.items()}
    if sum(sizes.values()) > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        named = ", ".join(f"{path} ({sizes[path] >> 20} MiB)" for path in largest)
        raise UsageError(
            f"the files for other hosts are {sum(sizes.values()) >> 20} MiB, {MOST_BYTES >> 20} are allowed",
            hint=f"name data in .gitignore and read it where it lies; the largest are {named}",
        )
    blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    packed = []
    for path, source in sources.items():
        data = source.read_bytes()
        digest = files.sha256_bytes(data)
        if not (blobs / digest).exists():
            files.write_atomic(blobs / digest, data, mode=0o600)
        packed.append(TravelledFile(path, digest, len(data)))
    return tuple(packed)


def code_files(folder: Path) -> dict[str, Path]:
    """The files below `folder` as `pack` takes them."""
    return {f"{CODE}/{path.relative_to(folder).as_posix()}": path for path in list_files(folder)}


async def unpack(
    travelled: tuple[TravelledFile, ...], folder: Path, cache: Path, fetch: Callable[[str], Awaitable[bytes]]
) -> int:
    """Puts the files into `folder`, and fetches those that `cache` does not have; returns how many these were.

    Raises StorageError for a path outside of `folder`, and for content that is not that of its digest.
    """
    fetched = 0
    for one in travelled:
        inside = PurePosixPath(one.path)
        if inside.is_absolute() or ".." in inside.parts or not _DIGEST.fullmatch(one.digest):
            raise StorageError(f"the master sent a file for {one.path}, outside of the job's folder")
        kept = cache / one.digest
        if not kept.exists() or files.sha256_file(kept) != one.digest:
            data = await fetch(one.digest)
            if files.sha256_bytes(data) != one.digest:
                raise StorageError(f"{one.path} arrived with other content than its digest says")
            files.write_atomic(kept, data, mode=0o600)
            fetched += 1
        target = folder / inside
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(kept, target)
        os.chmod(target, 0o600)
    return fetched
