"""`doctor`: what keeps a recipe's model from being captured, line by line, and the rewrites that were proven.

Knows the order of the steps. Nothing of a bundle is run: the code that is imported, and run again as edited,
is the recipe's own. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trueline import events
from trueline.doctor.diagnosis import Diagnosis
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.capture.model.eager import EagerSession
    from trueline.doctor.recorded_calls import RecordedCall
    from trueline.recipe.contract import Recipe
    from trueline.storage.location import Location

Free = Mapping[str, Sequence[int]]
"""Input -> its dimensions whose size varies from request to request, beside those that `capture` takes for free."""


def doctor(
    recipe: str | Path | Recipe,
    checkpoint: Location | None = None,
    *,
    dynamic: Free | None = None,
    apply: str | Path | None = None,
    html: str | Path | None = None,
    keep: bool = True,
    onnx: bool = True,
) -> Diagnosis:
    """Examines every submodule of the recipe's model and looks for proven rewrites of those that cannot be captured.

    `dynamic` names dimensions that vary, e.g. `{"x": [1]}`, beside the batch, what the recipe declares and what differs
    between its examples. `apply` is a folder that gets a
    copy of the recipe with the rewrites, `html` a file for the report. With `keep`, how far the model is is kept
    beside the recipe (`NAME.doctor.json`), for the next run to compare with. `onnx` tries each rewrite in ONNX
    Runtime too. Raises RecipeError, CaptureError, CheckpointError, DataError, UsageError, StorageError.
    """
    from trueline.capture import subject
    from trueline.doctor import onnx_proof, progress
    from trueline.doctor.survey import survey
    from trueline.recipe.load import load_recipe

    recipe = load_recipe(recipe)
    if apply is not None and (recipe.path is None or Path(apply).exists()):
        what = f"{apply} exists already" if recipe.path is not None else "the recipe is no file"
        raise UsageError(f"the rewrites cannot be applied: {what}", hint="name a folder that is not there yet")
    events.emit("doctor.started", recipe=recipe.name)
    declared = {name: {axis: f"{name}.{axis}" for axis in axes} for name, axes in (dynamic or {}).items()}
    model = subject.prepare(recipe, checkpoint, dynamic_shapes=declared)
    calls = calls_of(model.eager)
    base = recipe.path.parent if recipe.path is not None else Path.cwd()
    done = survey(model.module, calls, onnx=onnx_proof.right_as_onnx if onnx else None, base=base)
    before = progress.earlier(recipe)
    diagnosis = Diagnosis(recipe=recipe.name, rows=tuple(done.rows.values()), before=before)
    if keep:
        progress.keep(recipe, diagnosis)
    if apply is not None and recipe.path is not None:
        from trueline.doctor.apply import apply_to

        apply_to(recipe.path, done.texts, Path(apply))
    if html is not None:
        from trueline import files
        from trueline.doctor.html import page

        files.write_atomic(Path(html), page(diagnosis).encode())
    return diagnosis


def calls_of(eager: EagerSession) -> list[RecordedCall]:
    """Two sets of probes of the whole model as calls, at other sizes of whatever is free in it.

    Values that are no numbers are left out: a submodule is asked what a request may ask it.
    """
    from trueline.capture.model.signature import BATCH, Slot
    from trueline.capture.proof.probes import make_probes, resize
    from trueline.doctor.recorded_calls import RecordedCall
    from trueline.runtime.tensors import to_tensors

    calling = eager.calling
    leaves = tuple(... if isinstance(leaf, Slot) else leaf for leaf in calling.leaves)
    probes = [probe for seed in (0, 1) for probe in make_probes(eager.example, signature=calling.presumed, seed=seed)]
    asked = [probe.inputs for probe in probes if not probe.wild]
    sizes = {symbol: size for symbol, size in calling.presumed.sizes(eager.example).items() if symbol != BATCH}
    if sizes:  # what takes multiples only is asked another one, of all sizes at once
        asked.append(resize(eager.example, calling.presumed, {symbol: 2 * size for symbol, size in sizes.items()}))
    return [
        RecordedCall(tensors=to_tensors(eager.signature, inputs), leaves=leaves, spec=calling.spec) for inputs in asked
    ]
