"""Parameters in a file that Trueline did not write: a state_dict of torch.save, or safetensors.

Nothing but tensors is unpickled (`weights_only`). Names, shapes and dtypes have to be those of the model, all of them;
what wrappers of a training script add (`module.`, an outer `state_dict`) is taken off.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from trueline import files
from trueline.errors import CheckpointError, closest, first_line, join_names
from trueline.storage.location import Location

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SAFE = ".safetensors"
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the model's part of what they save."""
PREFIXES = ("module.", "_orig_mod.")
"""Of DistributedDataParallel and torch.compile."""
SHOWN = 5


def is_weights_file(path: Location) -> bool:
    """Whether `path` is a file with the suffix of weights, and no checkpoint of a job."""
    return isinstance(path, Path) and path.suffix.lower() in (*PICKLED, SAFE) and path.is_file()


def describe_file(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest would say of it."""
    return {"digest": files.sha256_file(path), "file": path.name}


def load_into(model: torch.nn.Module, path: Path, *, recipe: str) -> None:
    """Gives `model` the parameters and buffers of the file. Raises CheckpointError with what is missing, unexpected or
    of another shape or dtype, and for a file that holds more than tensors."""
    found = _unprefix(_read(path), model)
    own = model.state_dict()
    tied = {name for name, value in own.items() if _is_shared(name, value, own, found)}
    missing = sorted(own.keys() - found.keys() - tied)
    unexpected = sorted(found.keys() - own.keys())
    wrong = [_misfit(name, own[name], found[name]) for name in own if name in found]
    problems = [
        *([f"missing: {_list(missing, unexpected)}"] if missing else []),
        *([f"not in the model: {_list(unexpected, [])}"] if unexpected else []),
        *[text for text in wrong if text][:SHOWN],
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {path} are not those of the model of recipe '{recipe}': {'; '.join(problems)}",
            hint="model() has to build the model that they were saved from, with the same sizes and names",
        )
    model.load_state_dict(found, strict=False)  # what is missing shares its memory with what is there


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix.lower() == SAFE:
            return dict(safetensors.torch.load_file(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        more = "weights only" in str(error).lower()
        raise CheckpointError(
            f"{path} holds more than tensors, and nothing of it was unpickled"
            if more
            else f"{path} cannot be read as weights: {type(error).__name__}: {first_line(error)}",
            hint="save model.state_dict() where you trust the file: torch.save(model.state_dict(), 'model.pt')",
        ) from error
    return _tensors(loaded, path)


def _tensors(loaded: object, path: Path) -> dict[str, torch.Tensor]:
    """The state_dict in what was loaded, which may be inside of a dict of other things."""
    for key in ("", *WRAPPERS):
        inner = loaded if not key else loaded.get(key) if isinstance(loaded, Mapping) else None
        if isinstance(inner, Mapping) and inner and all(isinstance(one, torch.Tensor) for one in inner.values()):
            return {str(name): value for name, value in inner.items()}
    what = f"a dict of {join_names(map(str, loaded))}" if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
    raise CheckpointError(
        f"{path} holds {what}, and no state_dict: a dict of nothing but tensors, by itself or under one of "
        f"{join_names(WRAPPERS)}",
        hint="torch.save(model.state_dict(), 'model.pt') writes one",
    )


def _unprefix(found: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    own = model.state_dict().keys()
    for prefix in PREFIXES:
        if found and all(name.startswith(prefix) for name in found) and not any(n.startswith(prefix) for n in own):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _is_shared(name: str, value: torch.Tensor, own: Mapping[str, torch.Tensor], found: Mapping[str, Any]) -> bool:
    """Whether a name that the file leaves out is another name of a tensor that it has: safetensors keeps one."""
    return name not in found and any(
        other in found and one.data_ptr() == value.data_ptr() and one.shape == value.shape and value.numel()
        for other, one in own.items()
        if other != name
    )


def _misfit(name: str, own: torch.Tensor, found: torch.Tensor) -> str:
    if own.shape != found.shape:
        return f"{name} has shape {list(found.shape)}, the model's has {list(own.shape)}"
    if torch.promote_types(own.dtype, found.dtype) != own.dtype:
        return f"{name} is {found.dtype}, which the model's {own.dtype} cannot hold exactly"
    return ""


def _list(names: list[str], others: list[str]) -> str:
    shown = [f"{name} (there is {near})" if (near := closest(name, others)) else name for name in names[:SHOWN]]
    return join_names(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
