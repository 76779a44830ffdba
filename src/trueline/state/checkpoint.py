"""A checkpoint: model, optimizer, scheduler, ledger and progress in one folder that is whole or absent.

    step-00000120/
      checkpoint.json      schema, recipe, progress, skeleton of the state, SHA-256 of the file beside it
      state.safetensors    every tensor of the state, named 0, 1, 2, ...

No pickle: reading one runs no code. A torn or edited file is an error that names it, and the reader of a job
folder then takes the next older one and says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from trueline import clock, events, files
from trueline.errors import CheckpointError
from trueline.state import tree

if TYPE_CHECKING:
    import torch

    from trueline.recipe.contract import Recipe

SCHEMA = 1
MANIFEST = "checkpoint.json"
TENSORS = "state.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint. `state` holds the sections model, optimizer, scheduler and ledger."""

    path: Path
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


def write(folder: Path, *, step: int, state: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Writes `state` as `folder/step-N`, atomically; returns the path. `facts` go into the manifest as they are.

    Raises StorageError, and then nothing is left behind. An equal step is replaced: it is the same state.
    """
    skeleton, tensors = tree.encode(state)
    path = folder / folder_name(step)
    with files.atomic_dir(path, replace=True) as partial:
        named = {str(i): tensor.contiguous().clone() for i, tensor in enumerate(tensors)}
        try:
            safetensors.torch.save_file(named, partial / TENSORS)
        except safetensors.SafetensorError as error:
            raise OSError(_errno_of(error), str(error)) from error
        body = {
            "schema": SCHEMA,
            "created": clock.utc_now(),
            "step": step,
            **facts,
            "files": {TENSORS: files.sha256_file(partial / TENSORS)},
            "state": skeleton,
        }
        text = json.dumps(body, indent=1)
        (partial / MANIFEST).write_text(json.dumps({"digest": files.sha256_bytes(text.encode()), "body": text}))
    return path


def _errno_of(error: Exception) -> int:
    import errno

    return errno.ENOSPC if "No space left" in str(error) else errno.EIO


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest without the state: schema, step, recipe, progress, certificates, digests; and `digest`, its own."""
    body = _read_body(Path(path))
    return {key: value for key, value in body.items() if key != "state"}


def _read_body(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        envelope = json.loads(file.read_text())
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


def read(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint. Raises CheckpointError that names the file at fault."""
    path = Path(path)
    body = _read_body(path)
    for name, digest in body["files"].items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing")
        if files.sha256_file(path / name) != digest:
            raise CheckpointError(
                f"{path / name} was changed or torn: its SHA-256 is not the one in {MANIFEST}",
                hint="use another checkpoint of the job",
            )
    try:
        named = safetensors.torch.load_file(path / TENSORS)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path / TENSORS} cannot be read: {error}") from error
    state = tree.decode(body.pop("state"), [named[str(i)] for i in range(len(named))])
    return Checkpoint(path=path, manifest=body, state=state)


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in `folder` that verifies; older ones are tried when it does not, and that is reported."""
    for path in sorted(Path(folder).glob("step-*"), reverse=True):
        try:
            return read(path)
        except CheckpointError as error:
            events.emit("checkpoint.refused", path=str(path), why=error.message)
    return None


def load_model(recipe: Recipe, checkpoint: Path | None) -> torch.nn.Module:
    """The recipe's model in evaluation mode with the checkpoint's parameters (None: as the recipe makes it).

    Raises CheckpointError when the parameters are not those of this recipe's model.
    """
    model = recipe.model()
    if checkpoint is not None:
        found = read(Path(checkpoint))
        try:
            model.load_state_dict(found.state["model"])
        except (RuntimeError, KeyError) as error:
            name = found.manifest.get("recipe", {}).get("name", "another recipe")
            raise CheckpointError(
                f"{checkpoint} is of recipe '{name}' and does not fit the model of recipe '{recipe.name}': {error}",
                hint="pass the recipe that the checkpoint was trained with",
            ) from error
    return model.eval()
