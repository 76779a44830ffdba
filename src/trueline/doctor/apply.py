"""A copy of the recipe and of the modules beside it, with the rewrites in it. The user's own files stay."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from trueline import events, files


def apply_to(recipe: Path, texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Copies the Python files of the recipe's folder to `folder`, edited by `texts` (file -> text); returns the edited
    ones. A rewrite of a file elsewhere is left out, and said. Raises StorageError; `folder` is then not there."""
    home = recipe.resolve().parent
    written: list[Path] = []
    with files.atomic_dir(folder) as partial:
        for source in _sources(home, recipe.resolve(), texts):
            target = partial / source.relative_to(home)
            target.parent.mkdir(parents=True, exist_ok=True)
            if str(source) in texts:
                target.write_text(texts[str(source)])
                written.append(folder / source.relative_to(home))
            else:
                shutil.copyfile(source, target)
    for file in texts:
        if not Path(file).is_relative_to(home):
            events.emit("doctor.not_applied", file=file, why="it is not in the recipe's folder")
    events.emit("doctor.applied", folder=str(folder), files=len(written))
    return written


def _sources(home: Path, recipe: Path, texts: Mapping[str, str]) -> list[Path]:
    """The recipe, what is edited, and the Python files and packages beside it."""
    packages = [one.parent for one in home.glob("*/__init__.py")]
    found = {recipe, *home.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))}
    return sorted(found | {Path(file) for file in texts if Path(file).is_relative_to(home)})
