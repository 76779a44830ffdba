"""Finds the recipe that a bundle was captured from, by the digest in its lineage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from trueline import files
from trueline.bundle import Bundle
from trueline.errors import UsageError

_DEPTH = ("*.py", "*/*.py", "*/*/*.py")
_MOST = 2000
"""Files that are looked at."""


def find_recipe(bundle: Bundle, given: Path) -> str:
    """The recipe: of the job whose folder holds the bundle, of a job in ./runs, or a file near the bundle or here with
    the digest that the lineage names. `given`: the bundle's folder or packed file. Raises UsageError."""
    digest, changed = bundle.manifest.lineage.recipe_digest, ""
    for job in _jobs(given):
        recipe = str(job["recipe"])
        if job.get("recipe_digest") != digest:
            continue
        if ":" in recipe or _has_digest(Path(recipe), digest):
            return recipe
        changed = recipe if Path(recipe).is_file() else changed
    for number, path in enumerate(_files(given)):
        if number >= _MOST:
            break
        if _has_digest(path, digest):
            return str(path)
    if changed:
        raise UsageError(
            f"the recipe of bundle '{bundle.name}', {changed}, has changed since the bundle was captured",
            hint=f"if its records and metrics are as they were: --recipe {changed}",
        )
    raise UsageError(
        f"the recipe of bundle '{bundle.name}' is not found: no file here or beside the bundle has the digest "
        f"{digest[:12]} that its lineage names",
        hint="say where it is: --recipe recipe.py; its evaluation records judge what is lost",
    )


def _has_digest(file: Path, digest: str) -> bool:
    """Whether the file is as it was: one that was changed since may have other records."""
    return file.is_file() and files.sha256_file(file) == digest


def _jobs(bundle: Path) -> Iterator[dict[str, object]]:
    folders = [
        bundle.absolute().parent,
        *sorted(Path("runs").glob("*")),
        *sorted(bundle.absolute().parent.glob("runs/*")),
    ]
    for folder in folders:
        try:
            found = msgspec.json.decode((folder / "job.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            continue
        if isinstance(found, dict) and "recipe" in found:
            yield found


def _files(bundle: Path) -> Iterator[Path]:
    for folder in dict.fromkeys((Path.cwd(), bundle.absolute().parent)):
        for pattern in _DEPTH:
            yield from sorted(folder.glob(pattern))
