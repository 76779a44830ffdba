"""A checkpoint: model, optimizer, scheduler, ledger and progress in one folder that is whole or absent.

    step-00000120/
      checkpoint.json      schema, recipe, progress, skeleton of the state, SHA-256 of the file beside it
      state.safetensors    every tensor of the state, named 0, 1, 2, ...

The folder lies on a disk or in an object store (`storage/checkpoint_store.py`). No pickle: reading one runs no code. A
torn or edited file is an error that names it, and the reader of a job's checkpoints then takes the next older one and
says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from trueline import clock, events, files
from trueline.checkpoint import tensor_file, tree
from trueline.errors import CheckpointError, RecipeError
from trueline.storage.checkpoint_store import CheckpointStore, Parts, open_checkpoint_store
from trueline.storage.location import Location, join_location, split_location

if TYPE_CHECKING:
    import torch

    from trueline.recipe.contract import Recipe

SCHEMA = 1
MANIFEST = "checkpoint.json"
TENSORS = "state.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint. `state` holds the sections model, optimizer, scheduler, ledger and perhaps others."""

    path: Location
    manifest: dict[str, Any]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps applied so far in the job."""
        return int(self.manifest["step"])


def folder_name(step: int) -> str:
    """
    >>> folder_name(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def write(
    folder: Location,
    *,
    step: int,
    state: dict[str, Any],
    facts: dict[str, Any],
    sealing: Callable[[], None] = lambda: None,
) -> Location:
    """Writes `state` as `folder/step-N`, whole or not at all; returns where. `facts` go into the manifest as they are.

    `folder` is a path or a URL. The tensors are read while it writes, so nobody may change them meanwhile.
    `sealing` is called when the tensors are written and the manifest is not.
    Raises StorageError, and then nothing is left behind. An equal step is replaced: it is the same state.
    """
    name = folder_name(step)
    _place(folder).write(name, _parts(step, state, facts, sealing))
    return join_location(folder, name)


def _place(folder: Location) -> CheckpointStore:
    return open_checkpoint_store(folder, seal=MANIFEST)


def _parts(step: int, state: dict[str, Any], facts: dict[str, Any], sealing: Callable[[], None]) -> Parts:
    skeleton, tensors = tree.encode(state)
    digest = hashlib.sha256()
    yield TENSORS, _hashed(tensor_file.pieces(tensors), digest)
    sealing()
    made = {"schema": SCHEMA, "created": clock.utc_now(), "step": step}
    text = json.dumps({**made, **facts, "files": {TENSORS: digest.hexdigest()}, "state": skeleton})
    yield MANIFEST, [json.dumps({"digest": files.sha256_bytes(text.encode()), "body": text}).encode()]


def _hashed(pieces: Iterable[bytes | memoryview], digest: hashlib._Hash) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        digest.update(piece)
        yield piece


def read_manifest(path: Location) -> dict[str, Any]:
    """The manifest without the state: schema, step, recipe, progress, certificates, digests; and `digest`, its own."""
    body = _read_body(path)
    return {key: value for key, value in body.items() if key != "state"}


def exists(path: Location) -> bool:
    """True when there is something at `path` that calls itself a checkpoint."""
    folder, name = split_location(path)
    try:
        with _place(folder).fetch(name, MANIFEST):
            return True
    except FileNotFoundError:
        return False


def _read_body(path: Location) -> dict[str, Any]:
    file = join_location(path, MANIFEST)
    folder, name = split_location(path)
    try:
        with _place(folder).fetch(name, MANIFEST) as found:
            envelope = json.loads(found.read_text())
        text, digest = envelope["body"], envelope["digest"]
        if files.sha256_bytes(text.encode()) != digest:
            raise CheckpointError(f"{file} was changed after it was written", hint="use another checkpoint of the job")
        body: dict[str, Any] = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {MANIFEST}",
            hint="a checkpoint is a folder like JOB/checkpoints/step-00000276",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is torn or not a checkpoint's: {error}") from error
    if body.get("schema") != SCHEMA:
        raise CheckpointError(f"{file} has schema {body.get('schema')}, this version reads {SCHEMA}")
    return {**body, "digest": digest}


def read(path: Location) -> Checkpoint:
    """Reads and verifies a checkpoint. Raises CheckpointError that names the file at fault, StorageError."""
    body = _read_body(path)
    named = _tensors(path, body["files"].get(TENSORS, ""))
    state = tree.decode(body.pop("state"), [named[str(i)] for i in range(len(named))])
    return Checkpoint(path=path, manifest=body, state=state)


def _tensors(path: Location, digest: str) -> dict[str, torch.Tensor]:
    file = join_location(path, TENSORS)
    folder, name = split_location(path)
    try:
        with _place(folder).fetch(name, TENSORS) as found:
            if files.sha256_file(found) != digest:
                raise CheckpointError(
                    f"{file} was changed or torn: its SHA-256 is not the one in {MANIFEST}",
                    hint="use another checkpoint of the job",
                )
            return safetensors.torch.load_file(found)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing", hint="use another checkpoint of the job") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def latest(folder: Location) -> Checkpoint | None:
    """The newest checkpoint in `folder` that verifies; older ones are tried when it does not, and that is reported.

    Raises StorageError when a store does not answer: that is not the same as having no checkpoint.
    """
    for step in reversed(steps(folder)):
        path = join_location(folder, folder_name(step))
        try:
            return read(path)
        except CheckpointError as error:
            events.emit("checkpoint.refused", path=str(path), why=error.message)
    return None


def steps(folder: Location) -> list[int]:
    """The steps that have a checkpoint in `folder`, oldest first; whether they verify is not looked at."""
    return _steps(_place(folder).names())


def _steps(names: Sequence[str]) -> list[int]:
    """
    >>> _steps(["step-00000120", "notes"])
    [120]
    """
    return [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]


def best(folder: Location) -> Location | None:
    """The checkpoint of the best evaluation so far that still lies in `folder`; None before the first evaluation.

    Which one that is says the newest manifest: `evaluations`, a list of {step, loss, metrics, best}.
    """
    there = steps(folder)
    for step in reversed(there):
        try:
            evaluations = read_manifest(join_location(folder, folder_name(step))).get("evaluations") or []
        except CheckpointError as error:
            events.emit("checkpoint.refused", path=str(join_location(folder, folder_name(step))), why=error.message)
            continue
        kept = [found["step"] for found in evaluations if found["best"] and found["step"] in there]
        return join_location(folder, folder_name(kept[-1])) if kept else None
    return None


def best_step(evaluations: Sequence[dict[str, Any]]) -> int | None:
    """The step of the last evaluation that was the best until then.

    >>> best_step([{"step": 8, "best": True}, {"step": 16, "best": True}, {"step": 24, "best": False}])
    16
    """
    return next((found["step"] for found in reversed(evaluations) if found["best"]), None)


def doomed(steps: Sequence[int], *, newest: int, keep: int, best: int | None) -> list[int]:
    """Which of `steps` go when `newest` has been written: all but the `keep` last ones up to it, and the best.

    Later steps stay and do not count: they are damaged ones that a job went back behind, or another writer's.

    >>> doomed([10, 20, 30, 40, 90], newest=40, keep=2, best=10)
    [20]
    """
    past = [step for step in sorted(steps) if step <= newest]
    return [step for step in past[: -max(keep, 1)] if step != best]


def prune(folder: Location, *, newest: int, keep: int, best: int | None = None) -> None:
    """Removes the checkpoints in `folder` that are `doomed`, and older parts that dead writers left in a store."""
    place = _place(folder)
    for step in doomed(_steps(place.names()), newest=newest, keep=keep, best=best):
        place.remove(folder_name(step))
    for step in _steps(place.names(unfinished=True)):
        if step < newest:
            place.remove(folder_name(step))


def sweep(folder: Location) -> int:
    """Removes everything unfinished in `folder`; returns how much. Call it only where no writer can be at work."""
    place = _place(folder)
    leftovers = place.names(unfinished=True)
    for name in leftovers:
        place.remove(name)
    return len(leftovers)


def _check_made(recipe: Recipe, model: object) -> None:
    """Raises RecipeError for what is no model."""
    import torch

    if isinstance(model, torch.nn.Module):
        return
    found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    raise RecipeError(
        f"recipe '{recipe.name}': model() returned {found}, expected a torch.nn.Module",
        hint=f"make one of it: return {model.__name__}(...)" if isinstance(model, type) else "return the model",
    )


def load_model(recipe: Recipe, checkpoint: Location | None) -> torch.nn.Module:
    """The recipe's model in evaluation mode with the checkpoint's parameters (None: as the recipe makes it).

    Where the job kept a moving average (`state["ema"]`), that is what is loaded. Raises CheckpointError when the
    parameters are not those of this recipe's model, RecipeError when it makes none.
    """
    model = recipe.model()
    _check_made(recipe, model)
    if checkpoint is not None:
        found = read(checkpoint)
        try:
            model.load_state_dict({**found.state["model"], **(found.state.get("ema") or {})})
        except (RuntimeError, KeyError) as error:
            name = found.manifest.get("recipe", {}).get("name", "another recipe")
            raise CheckpointError(
                f"{checkpoint} is of recipe '{name}' and does not fit the model of recipe '{recipe.name}': {error}",
                hint="pass the recipe that the checkpoint was trained with",
            ) from error
    return model.eval()
