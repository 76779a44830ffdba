"""`doctor`: which lines keep a recipe's model from being captured, and the rewrites that were proven.

Only the recipe's own code is imported, and run again as edited. Importing this imports no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trueline import events, files
from trueline.doctor import report
from trueline.doctor.report import Diagnosis
from trueline.errors import StorageError, UsageError

if TYPE_CHECKING:
    from trueline.capture.model.eager import EagerSession
    from trueline.doctor.recorded_calls import RecordedCall
    from trueline.recipe.contract import Recipe
    from trueline.storage.location import Location

Free = Mapping[str, Sequence[int]]
"""Input -> its dimensions whose size varies between requests, in addition to those that `capture` takes as free."""


def doctor(
    recipe: str | Path | Recipe,
    checkpoint: Location | None = None,
    *,
    dynamic: Free | None = None,
    apply: str | Path | None = None,
    html: str | Path | None = None,
    keep: bool = True,
    onnx: bool = True,
    minutes: float | None = None,
) -> Diagnosis:
    """Examines every submodule of the recipe's model and looks for proven rewrites of those that cannot be captured.

    `dynamic` names dimensions that vary, e.g. `{"x": [1]}`, in addition to the batch, those that the recipe declares
    and those in which its examples differ. `apply` is a folder for a copy of the recipe with the rewrites, `html` a
    file for the report. `keep` saves the progress beside the recipe (`NAME.doctor.json`), which the next run compares
    with. `onnx` proves each rewrite in ONNX Runtime too. After `minutes` (30, and one for each 50 MB of weights, when
    left out) what was not examined is listed as not tried for want of time. Raises RecipeError, CaptureError (OutOfTime
    where the model itself takes too long), CheckpointError, DataError, UsageError, StorageError.
    """
    from trueline.capture import subject
    from trueline.capture.time_limit import TimeLimit
    from trueline.doctor.examine import prove_onnx
    from trueline.doctor.export import ask_capture
    from trueline.doctor.survey import survey
    from trueline.recipe.contract import ONLY_CALLED
    from trueline.recipe.load import load_recipe

    limit = TimeLimit(minutes)
    recipe = load_recipe(recipe, needs=ONLY_CALLED)
    if apply is not None and (recipe.path is None or Path(apply).exists()):
        why = f"{apply} exists already" if recipe.path is not None else "the recipe has no file"
        raise UsageError(f"the rewrites cannot be applied: {why}", hint="name a folder that does not exist yet")
    events.emit("doctor.started", recipe=recipe.name)
    declared = {name: {axis: f"{name}.{axis}" for axis in axes} for name, axes in (dynamic or {}).items()}
    prepare = partial(subject.prepare, recipe, checkpoint, dynamic_shapes=declared)
    model = limit.run("the model with its example", prepare)
    limit.allow_weights(model.num_bytes)
    base = recipe.path.parent if recipe.path is not None else Path.cwd()
    check = prove_onnx if onnx else None
    refuse = partial(ask_capture, model.eager)
    done = survey(model.module, calls_of(model.eager), onnx=check, base=base, limit=limit, refuse=refuse)
    diagnosis = Diagnosis(recipe=recipe.name, rows=tuple(done.rows.values()), before=read_progress(recipe))
    if keep:
        keep_progress(recipe, diagnosis)
    if apply is not None and recipe.path is not None:
        apply_rewrites(recipe.path, done.texts, Path(apply))
    if html is not None:
        files.write_atomic(Path(html), report.page(diagnosis).encode())
    return diagnosis


def calls_of(eager: EagerSession) -> list[RecordedCall]:
    """Two sets of probes of the whole model as calls, at other sizes of all its free dimensions; without NaN and
    infinity, which requests do not contain."""
    from trueline.capture.model.signature import BATCH, Slot
    from trueline.capture.proof.probes import make_probes, resize
    from trueline.doctor.recorded_calls import RecordedCall
    from trueline.runtime.tensors import to_tensors

    calling = eager.calling
    leaves = tuple(... if isinstance(leaf, Slot) else leaf for leaf in calling.leaves)
    probes = [probe for seed in (0, 1) for probe in make_probes(eager.example, signature=calling.presumed, seed=seed)]
    asked = [*(probe.inputs for probe in probes if not probe.wild), *eager.examples]
    sizes = {symbol: size for symbol, size in calling.presumed.sizes(eager.example).items() if symbol != BATCH}
    if sizes:  # a model that accepts multiples only gets another one, of all sizes at once
        asked.append(resize(eager.example, calling.presumed, {symbol: 2 * size for symbol, size in sizes.items()}))
    return [
        RecordedCall(tensors=to_tensors(eager.signature, inputs), leaves=leaves, spec=calling.spec) for inputs in asked
    ]


def apply_rewrites(recipe: Path, texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Copies the Python files of the recipe's folder to `folder`, edited by `texts` (file -> text); returns the edited
    ones. A rewrite of a file elsewhere is left out and reported. Raises StorageError; `folder` then does not exist."""
    home = recipe.resolve().parent
    packages = [init.parent for init in home.glob("*/__init__.py")]
    sources = {recipe.resolve(), *home.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))}
    sources |= {Path(file) for file in texts if Path(file).is_relative_to(home)}
    written: list[Path] = []
    with files.atomic_dir(folder) as partial:
        for source in sorted(sources):
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


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How many submodules were ready at the last run."""

    schema: int = 1
    recipe_sha256: str
    submodules: int
    ready: int
    healed: int


def progress_file(recipe: Recipe) -> Path | None:
    """`NAME.doctor.json` beside the recipe; None for a recipe without a file."""
    return None if recipe.path is None else recipe.path.with_suffix(".doctor.json")


def read_progress(recipe: Recipe) -> int | None:
    """Submodules that were ready at the last run; None without a readable file, which is a memory and not a proof."""
    path = progress_file(recipe)
    try:
        return None if path is None else msgspec.json.decode(path.read_bytes(), type=Progress).ready
    except (OSError, msgspec.DecodeError):
        return None


def keep_progress(recipe: Recipe, diagnosis: Diagnosis) -> None:
    """Saves the counts of `diagnosis`. A folder that cannot be written is an event, not an error."""
    path = progress_file(recipe)
    if path is None:
        return
    counts = {"submodules": len(diagnosis.rows), "ready": diagnosis.ready, "healed": diagnosis.healed}
    try:
        files.write_atomic(path, msgspec.json.encode(Progress(recipe_sha256=recipe.digest, **counts)) + b"\n")
    except StorageError as error:
        events.emit("doctor.progress_not_kept", why=error.message)
