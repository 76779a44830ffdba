"""How far a recipe was at the last run, in `NAME.doctor.json` beside it. A file that is torn or of another form counts
as none: it is a memory, not a proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trueline import events, files
from trueline.errors import StorageError

if TYPE_CHECKING:
    from trueline.doctor.diagnosis import Diagnosis
    from trueline.recipe.contract import Recipe


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    schema: int = 1
    recipe_sha256: str
    submodules: int
    ready: int
    healed: int


def place(recipe: Recipe) -> Path | None:
    """The file for `recipe`; None for one that has no file itself."""
    return None if recipe.path is None else recipe.path.with_suffix(".doctor.json")


def earlier(recipe: Recipe) -> int | None:
    """Submodules that were ready at the last run."""
    path = place(recipe)
    try:
        return None if path is None else msgspec.json.decode(path.read_bytes(), type=Progress).ready
    except (OSError, msgspec.DecodeError):
        return None


def keep(recipe: Recipe, diagnosis: Diagnosis) -> None:
    """Remembers `diagnosis`. A folder that cannot be written is an event, not an error."""
    path = place(recipe)
    if path is None:
        return
    now = Progress(
        recipe_sha256=recipe.digest, submodules=len(diagnosis.rows), ready=diagnosis.ready, healed=diagnosis.healed
    )
    try:
        files.write_atomic(path, msgspec.json.encode(now) + b"\n")
    except StorageError as error:
        events.emit("doctor.progress_not_kept", why=error.message)
