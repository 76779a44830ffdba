"""A job's model in the form that other tools read, and the weights that a training starts from.

    checkpoints/model/model.safetensors   the trained model with its own names; config.json beside it if it has one
    JOB/weights.safetensors               a copy of the weights that were given, so that later workers find them too

Both directions of a Hugging Face folder: transformers loads `checkpoints/model`, and such a folder starts a training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from trueline import files
from trueline.checkpoint import checkpoint, weights_file
from trueline.storage.checkpoint_store import Parts, open_checkpoint_store
from trueline.storage.location import Location, join_location, local_path

FOLDER = "model"
TENSORS = "model.safetensors"
CONFIG = "config.json"


def write_model(folder: Location, module: torch.nn.Module, values: Mapping[str, Any]) -> Location:
    """Writes `values`, a state_dict of `module`, as `folder/model`, whole or not at all; returns where.

    Of tied tensors one name is kept, as safetensors and transformers do. Raises StorageError, and CheckpointError for a
    dtype that safetensors lacks.
    """
    open_checkpoint_store(folder, seal=TENSORS).write(FOLDER, _parts(module, values))
    return join_location(folder, FOLDER)


def _parts(module: torch.nn.Module, values: Mapping[str, Any]) -> Parts:
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_string"):  # a transformers.PretrainedConfig
        content = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [type(module).__name__]}
        yield CONFIG, [json.dumps(content, indent=1).encode()]
    tied = tied_names(module)
    tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor) and name not in tied}
    yield TENSORS, _pieces(tensors)


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    return checkpoint.tensor_pieces([*tensors.values()], names=[*tensors])


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Names of the state_dict that share their memory with an earlier name, and that name."""
    seen: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor) and value.numel():
            memory = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if seen.setdefault(memory, name) != name:
                tied[name] = seen[memory]
    return tied


def store_weights(
    model: torch.nn.Module, source: Location, file: Path, *, recipe: str, new_layers: Sequence[str] = ()
) -> dict[str, Any]:
    """Copies the weights at `source` (a file, a Hugging Face folder, a checkpoint) into `file` under the names of
    `model`, which receives them. Returns digest and name of the source, and which layers are new.

    Raises CheckpointError for weights that do not fit, StorageError.
    """
    if weights_file.is_weights_file(source):
        given = local_path(source)
        tensors, facts = weights_file.read_tensors(given), weights_file.describe_file(given)
    else:
        saved = checkpoint.read(source)
        tensors = {**saved.state["model"], **(saved.state.get("ema") or {})}
        facts = {"digest": checkpoint.read_manifest(source)["digest"], "file": str(source)}
    fit = weights_file.fit_into(model, tensors, where=str(source), recipe=recipe, new_layers=new_layers)
    left = {*fit.new, *tied_names(model)}
    own = {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor) and name not in left}
    with files.atomic_file(file) as out:
        for piece in _pieces(own):
            out.write(piece)
    return {**facts, **fit.as_facts()}


def load_stored(model: torch.nn.Module, file: Path) -> None:
    """Gives `model` the weights in `file`, which `store_weights` wrote for such a model."""
    model.load_state_dict(safetensors.torch.load_file(file), strict=False)  # new layers are not in it
