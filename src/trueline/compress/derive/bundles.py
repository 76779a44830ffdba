"""From a plan to a bundle: the derived recipe is trained as a job of its own, captured and proven like a new model.

FOLDER/recipe.py     the derived recipe
FOLDER/job           its training, which survives kills like any other job
FOLDER/NAME.bundle   what was captured; a call that was killed finds it, or continues the job
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trueline import events, files
from trueline.bundle import Bundle, open_bundle
from trueline.capture.api import capture
from trueline.checkpoint import checkpoint as checkpoints
from trueline.checkpoint.checkpoint import load_model
from trueline.compress.derive import masks
from trueline.compress.derive.define import derive_model
from trueline.compress.derive.plan import DerivePlan
from trueline.compress.derive.training import Deadline, train_in_time
from trueline.errors import CheckpointError, UsageError
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.storage.location import Location, parse_location


@dataclass(frozen=True, slots=True)
class Derived:
    """A derived model: its bundle, and the recipe and checkpoint with which the next plan of a chain begins."""

    name: str
    bundle: Bundle
    recipe: Path
    checkpoint: str


def find_derived(folder: Path) -> Derived | None:
    """What was derived in `folder` before; None: nothing, or not to the end."""
    kept, file = folder / "checkpoint", folder / "recipe.py"
    plan, found = DerivePlan.read(file), sorted(folder.glob("*.bundle"))
    if plan is None or not found or not kept.is_file():
        return None
    return Derived(plan.name, open_bundle(found[0]), file, kept.read_text())


def derive(plan: DerivePlan, folder: Path, deadline: Deadline, *, workers: str = "1") -> Derived:
    """The plan's model, in `folder`. Raises OutOfTime for one that is not trained in time, and what train and capture
    raise."""
    recipe, file = load_recipe(plan.recipe), folder / "recipe.py"
    out = folder / f"{recipe.name}.bundle"
    derived = prepare(plan, folder)
    trained: Location | None = None
    if plan.epochs:
        events.emit("derived.training", name=plan.name, epochs=plan.epochs)
        trained = train_in_time(file, folder / "job", deadline, workers)
    trained_at = trained if not isinstance(trained, Path) else trained.absolute()
    files.write_atomic(folder / "checkpoint", str(trained_at or "").encode())
    if plan.kind == "masks":
        trained, derived = _make_permanent(recipe, plan, derived, trained, folder), recipe
    capture(derived, trained, out, formats=["onnx"], minutes=deadline.minutes)
    return Derived(plan.name, open_bundle(out), file, str(trained_at or ""))


def prepare(plan: DerivePlan, folder: Path) -> Recipe:
    """The derived recipe, written to `folder`. Raises before anything is trained, if the model cannot be pruned so."""
    file = folder / "recipe.py"
    files.write_atomic(file, plan.text.encode())
    if plan.kind != "taught":
        derive_model(load_recipe(plan.recipe), plan)
    return load_recipe(file)


def _make_permanent(
    recipe: Recipe, plan: DerivePlan, derived: Recipe, trained: Location | None, folder: Path
) -> Location:
    """A file of the recipe's own weights, with zeros where the masks are."""
    from safetensors.torch import save_file

    if trained is None:
        model = derive_model(recipe, plan)
    else:
        model = masks.make_permanent(load_model(derived, trained))
        masks.mask(model, plan.amounts)  # where the training had fewer steps than the schedule
    path = folder / "masked.safetensors"
    state = {
        name: value.detach().clone().contiguous() for name, value in masks.make_permanent(model).state_dict().items()
    }
    save_file(state, path)
    return path


def find_checkpoint(bundle: Bundle, named: Location | None, given: Path) -> str:
    """The checkpoint that the bundle was captured from: `named`, or by the digest in the lineage, of a job whose folder
    holds the bundle or of one in ./runs. `given`: the bundle's folder or packed file. Raises UsageError."""
    if named is not None:
        return str(named if not isinstance(named, Path) else named.absolute())
    digest = bundle.manifest.lineage.checkpoint_digest
    for path in _checkpoints(given) if digest else ():
        try:
            if checkpoints.read_manifest(path).get("digest") == digest:
                return str(path.absolute())
        except CheckpointError:
            continue
    raise UsageError(
        f"the checkpoint that bundle '{bundle.name}' was captured from is not found here or beside the bundle, and "
        "what is derived from it begins with its parameters",
        hint="name it: --checkpoint runs/digits-1/checkpoints/step-00000276",
    )


def _checkpoints(bundle: Path) -> Iterator[Path]:
    parent = bundle.absolute().parent
    jobs = dict.fromkeys(
        (parent, *sorted(Path("runs").glob("*")), *sorted(parent.glob("runs/*")), *sorted(parent.glob("*")))
    )
    for job in jobs:
        yield from sorted((job / "checkpoints").glob("step-*"), reverse=True)


def check_checkpoint(path: str) -> None:
    """Raises CheckpointError, UsageError unless it is one."""
    place = parse_location(path)
    if isinstance(place, Path) and not place.exists():
        raise UsageError(f"there is no checkpoint {path}", hint="name a checkpoint's folder or a file of weights")
