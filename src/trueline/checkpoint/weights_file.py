"""Parameters in files that Trueline did not write: a state_dict of torch.save, safetensors, a Hugging Face folder.

Nothing but tensors is unpickled (`weights_only`). Names, shapes and dtypes have to be those of the model, all of them
but the layers that are named as new; what wrappers of a training script add (`module.`, an outer `state_dict`) is taken
off.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from trueline import files
from trueline.errors import CheckpointError, closest, first_line, join_names
from trueline.storage.location import Location, is_remote, local_path

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SAFE = ".safetensors"
IN_FOLDERS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""How transformers calls the weights of a folder, the first that is there counts. Source: transformers 5,
`utils/__init__.py`."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the model's part of what they save."""
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """How weights of a file were given to a model."""

    loaded: int
    """Tensors of the model that the file has set."""
    new: tuple[str, ...] = ()
    """Names that keep the values of `model()`."""
    unused: tuple[str, ...] = ()
    """Names in the file that were left out."""

    def as_facts(self) -> dict[str, Any]:
        return {"loaded": self.loaded, "new": list(self.new), "unused": list(self.unused)}


def is_weights_file(path: Location) -> bool:
    """Whether `path` is a file with the suffix of weights or a Hugging Face folder, and no checkpoint of a job."""
    if is_remote(path):
        return False
    local = local_path(path)
    return (local.suffix.lower() in (*PICKLED, SAFE) and local.is_file()) or _in_folder(local) is not None


def describe_file(path: Path) -> dict[str, Any]:
    """What a checkpoint's manifest would say of it. Of several files the digest is that of their digests."""
    digests = [files.sha256_file(one) for one in _files(path)]
    digest = digests[0] if len(digests) == 1 else files.sha256_bytes("".join(digests).encode())
    return {"digest": digest, "file": path.resolve().name}


def load_into(model: torch.nn.Module, path: Path, *, recipe: str) -> None:
    """Gives `model` the parameters and buffers of the file. Raises CheckpointError with what is missing, unexpected or
    of another shape or dtype, and for a file that holds more than tensors."""
    fit_into(model, read_tensors(path), where=str(path), recipe=recipe)


def fit_into(
    model: torch.nn.Module,
    found: Mapping[str, torch.Tensor],
    *,
    where: str,
    recipe: str,
    new_layers: Sequence[str] = (),
) -> Fit:
    """Gives `model` the tensors in `found`, which come from `where`, except those of `new_layers`: names, or what they
    begin with up to a dot. Raises CheckpointError as `load_into` does, and for a layer that is nowhere."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    found = _unprefix(found, own)
    for layer in new_layers:
        if not any(_is_of(name, layer) for name in (*own, *found)):
            raise CheckpointError(
                f"there is no layer '{layer}', neither in the model of recipe '{recipe}' nor in {where}",
                hint=f"the model has {join_names(dict.fromkeys(name.partition('.')[0] for name in own))}",
            )
    new = {name for name in own if any(_is_of(name, layer) for layer in new_layers)}
    unused = tuple(sorted(name for name in found if any(_is_of(name, layer) for layer in new_layers)))
    kept = {name: value for name, value in found.items() if name not in unused}
    tied = {name for name, value in own.items() if _is_shared(name, value, own, kept)}
    missing = {name: own[name] for name in sorted(own.keys() - kept.keys() - tied - new)}
    unexpected = {name: kept[name] for name in sorted(kept.keys() - own.keys())}
    problems = [
        *([f"missing: {_list(missing, unexpected)}"] if missing else []),
        *([f"not in the model: {_list(unexpected, missing)}"] if unexpected else []),
        *[text for text in (_misfit(name, own[name], kept[name]) for name in own if name in kept) if text][:SHOWN],
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {where} are not those of the model of recipe '{recipe}': {'; '.join(problems)}",
            hint="model() has to build the model that they were saved from, with the same sizes and names; a training "
            "may leave layers out, as a new head: --new-layers NAME,...",
        )
    model.load_state_dict(kept, strict=False)  # what is missing shares its memory with what is there, or is new
    return Fit(len(own) - len(new - tied), tuple(sorted(new - tied)), unused)


def _is_of(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer.removesuffix('.')}.")


def _in_folder(path: Path) -> Path | None:
    return next((path / name for name in IN_FOLDERS if (path / name).is_file()), None) if path.is_dir() else None


def _files(path: Path) -> list[Path]:
    """The files of weights at `path`. Raises CheckpointError for an index that cannot be read."""
    first = _in_folder(path) or path
    if first.suffix != ".json":
        return [first]
    try:
        names = sorted(set(json.loads(first.read_bytes())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files of other folders")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{first} is not an index of weights: {first_line(error)}") from error
    return [path / name for name in names]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file or folder of weights by name, on the CPU. Raises CheckpointError."""
    return {name: value for file in _files(path) for name, value in _read(file).items()}


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


def _unprefix(found: Mapping[str, torch.Tensor], own: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """`found` without what stands before all of its names and before none of the model's: `module.` of
    DistributedDataParallel, `_orig_mod.` of torch.compile, the attribute under which a wrapper keeps the model."""
    found = dict(found)
    while found and not found.keys() & own.keys():
        heads = {name.partition(".")[0] for name in found}
        prefix = f"{heads.pop()}."
        if heads or any(name.startswith(prefix) for name in own) or not all(name.startswith(prefix) for name in found):
            break
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


def _list(names: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> str:
    """The first names with their shapes and the nearest of `others`, preferably one of the same shape."""

    def text(name: str) -> str:
        shape = list(names[name].shape)
        alike = [other for other, value in others.items() if list(value.shape) == shape]
        near = closest(name, alike) or closest(name, others)
        there = f" (there is {near} {list(others[near].shape)})" if near else ""
        return f"{name} {shape}{there}"

    shown = [text(name) for name in list(names)[:SHOWN]]
    return join_names(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
