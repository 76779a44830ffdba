"""A checkpoint: model, optimizer, scheduler, ledger and progress in one folder that is whole or absent.

    step-00000120/
      checkpoint.json      schema, recipe, progress, skeleton of the state, SHA-256 of the file beside it
      state.safetensors    every tensor of the state, named 0, 1, 2, ...

The folder is on a disk or in an object store (`storage/checkpoint_store.py`). No pickle: reading one runs no code. A
torn or edited file is an error that names it; the reader of a job's checkpoints then uses the next older one and
reports it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from xxhash import xxh3_128

from trueline import clock, files
from trueline.checkpoint import tree, weights_file
from trueline.checkpoint.manifest import MANIFEST as MANIFEST
from trueline.checkpoint.manifest import SCHEMA, first_whole, open_place, open_tensors, read_body
from trueline.checkpoint.manifest import TENSORS as TENSORS
from trueline.checkpoint.manifest import best as best
from trueline.checkpoint.manifest import best_step as best_step
from trueline.checkpoint.manifest import folder_name as folder_name
from trueline.checkpoint.manifest import prune as prune
from trueline.checkpoint.manifest import select_removed as select_removed
from trueline.checkpoint.manifest import steps as steps
from trueline.checkpoint.manifest import sweep as sweep
from trueline.checkpoint.snapshot import Snapshot, as_bytes
from trueline.columns import fitted as columns
from trueline.errors import CheckpointError, RecipeError, name_type
from trueline.storage.checkpoint_store import Parts
from trueline.storage.direct_file import Fill
from trueline.storage.location import Location, join_location, local_path, split_location

if TYPE_CHECKING:
    from trueline.recipe.contract import Recipe

PIECE_BYTES = 8 << 20
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


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


def write(
    folder: Location,
    *,
    step: int,
    state: dict[str, Any] | Snapshot,
    facts: dict[str, Any],
    sealing: Callable[[], None] = lambda: None,
) -> Location:
    """Writes `state` as `folder/step-N`, whole or not at all; returns where. `facts` go into the manifest as they are.

    `folder` is a path or a URL. A state that changes while it is written is passed as a Snapshot. `sealing` is called
    after the tensors and before the manifest is written. An equal step is replaced: it is the same state. Raises
    StorageError, and then nothing is left behind.
    """
    name = folder_name(step)
    open_place(folder).write(name, _parts(step, state, facts, sealing))
    return join_location(folder, name)


def _parts(step: int, state: dict[str, Any] | Snapshot, facts: dict[str, Any], sealing: Callable[[], None]) -> Parts:
    digest = xxh3_128()
    if isinstance(state, Snapshot):
        skeleton = state.skeleton
        yield TENSORS, _fill_from(state, digest)
    else:
        skeleton, tensors = tree.encode(state)
        yield TENSORS, _hash_pieces(tensor_pieces(tensors), digest)
    sealing()
    made = {"schema": SCHEMA, "created": clock.utc_now(), "step": step}
    text = json.dumps({**made, **facts, "files": {TENSORS: digest.hexdigest()}, "state": skeleton})
    yield MANIFEST, [json.dumps({"digest": files.sha256_bytes(text.encode()), "body": text}).encode()]


def _hash_pieces(pieces: Iterable[bytes | memoryview], digest: xxh3_128) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        digest.update(piece)
        yield piece


def _fill_from(snapshot: Snapshot, digest: xxh3_128) -> Fill:
    """The safetensors file of a snapshot: its bytes are copied once, to where they are hashed and written from."""
    header, order = _safetensors_header(snapshot.layout)
    pending = [(snapshot.layout[i].nbytes, partial(snapshot.read_into, i)) for i in reversed(order)]
    start = -len(header)

    def fill(room: memoryview) -> int:
        nonlocal start
        at = 0
        if start < 0:
            at = min(-start, len(room))
            room[:at] = header[start:][:at]
            start += at
        while pending and at < len(room):
            size, read_into = pending[-1]
            count = read_into(start, room[at:])
            at, start = at + count, start + count
            if start == size:
                pending.pop()
                start = 0
        digest.update(room[:at])
        return at

    return fill


def tensor_pieces(
    tensors: Sequence[torch.Tensor], *, names: Sequence[str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file that holds `tensors` under `names`, else 0, 1, 2, ... Raises CheckpointError
    for a dtype without a name.

    The library's own writer copies every tensor and needs a local file. These pieces are views of the tensors' memory,
    hashed and sent to a store while they are written, without the interpreter's lock and without more memory. Source:
    the format section of safetensors' README.
    """
    header, order = _safetensors_header(tensors, names)
    yield header
    for i in order:
        yield from _views(tensors[i])


def _safetensors_header(tensors: Sequence[torch.Tensor], names: Sequence[str] | None = None) -> tuple[bytes, list[int]]:
    """The begin of the file, and the order in which the tensors follow."""
    # Large items first: each tensor then begins at a multiple of its item size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if names else {}  # transformers asks for it
    at = 0
    for i in order:
        size = tensors[i].numel() * tensors[i].element_size()
        dtype, shape = _name(tensors[i], i), list(tensors[i].shape)
        header[names[i] if names else str(i)] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def expect_holdable(state: Any, where: str = "state") -> None:
    """Raises CheckpointError for a state that no checkpoint could hold: before a job trains it."""
    if isinstance(state, torch.Tensor):
        _name(state, where.removeprefix("state."))
    elif isinstance(state, dict):
        for key, value in state.items():
            expect_holdable(value, f"{where}.{key}")
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            expect_holdable(value, f"{where}[{at}]")
    if where == "state":
        tree.encode(state)


def _name(tensor: torch.Tensor, i: int | str) -> str:
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"tensor {i} of the state is {tensor.dtype} {tensor.layout}, which safetensors cannot hold",
            hint=f"keep dense tensors of {', '.join(sorted(_DTYPES.values()))} in state_dict()",
        )
    return _DTYPES[tensor.dtype]


def _views(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        flat = as_bytes(tensor.detach().cpu().contiguous()).numpy().data
        for start in range(0, len(flat), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]


def read_manifest(path: Location) -> dict[str, Any]:
    """The manifest without the state: schema, step, recipe, progress, certificates, digests; and `digest`, its own.
    Of a file of weights, its digest and name."""
    if weights_file.is_weights_file(path):
        return weights_file.describe_file(local_path(path))
    return {key: value for key, value in read_body(path).items() if key != "state"}


def exists(path: Location) -> bool:
    """Whether `path` has a manifest, or is a file of weights."""
    if weights_file.is_weights_file(path):
        return True
    folder, name = split_location(path)
    try:
        with open_place(folder).fetch(name, MANIFEST):
            return True
    except FileNotFoundError:
        return False


def read(path: Location) -> Checkpoint:
    """Reads and verifies a checkpoint. Raises CheckpointError that names the file at fault, StorageError."""
    body = read_body(path)
    named = _tensors(path, body["files"].get(TENSORS, ""))
    state = tree.decode(body.pop("state"), [named[str(i)] for i in range(len(named))])
    return Checkpoint(path=path, manifest=body, state=state)


def _tensors(path: Location, digest: str) -> dict[str, torch.Tensor]:
    with open_tensors(path, digest) as local:
        try:
            return safetensors.torch.load_file(local)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{join_location(path, TENSORS)} cannot be read: {error}") from error


def latest(folder: Location) -> Checkpoint | None:
    """The newest checkpoint in `folder` that verifies; one that does not is reported.

    Raises StorageError when a store does not answer, which does not mean that it has no checkpoint.
    """
    return first_whole(folder, read)


def bind_columns(recipe: Recipe, checkpoint: Location | None) -> Recipe:
    """The recipe with the columns that `checkpoint` was trained with; without one, fitted to the training records.

    Raises RecipeError for columns of another declaration, CheckpointError, DataError.
    """
    if recipe.columns is None or recipe.fitted is not None:
        return recipe
    found = read_manifest(checkpoint).get("columns") if checkpoint is not None else None
    if found is None:
        return recipe.with_columns()
    return recipe.with_columns(columns.decode(json.dumps(found).encode(), str(checkpoint)))


def load_model(recipe: Recipe, checkpoint: Location | None) -> torch.nn.Module:
    """The recipe's model in evaluation mode with the checkpoint's parameters (None: as the recipe makes it).

    The checkpoint may be a file of weights, a state_dict or safetensors, which has to fit in every name and shape.
    Loads the moving average (`state["ema"]`) where the job kept one. Raises CheckpointError when the parameters are not
    those of this recipe's model, RecipeError when `model()` returns no model.
    """
    model: object = bind_columns(recipe, checkpoint).make_model()
    if not isinstance(model, torch.nn.Module):
        made = f"the class {model.__name__}" if isinstance(model, type) else name_type(model)
        raise RecipeError(
            f"recipe '{recipe.name}': model() returned {made}, expected a torch.nn.Module",
            hint=f"return an instance: return {model.__name__}(...)" if isinstance(model, type) else "return the model",
        )
    if checkpoint is not None and weights_file.is_weights_file(checkpoint):
        weights_file.load_into(model, local_path(checkpoint), recipe=recipe.name)
    elif checkpoint is not None:
        saved = read(checkpoint)
        try:
            model.load_state_dict({**saved.state["model"], **(saved.state.get("ema") or {})})
        except (RuntimeError, KeyError) as error:
            name = saved.manifest.get("recipe", {}).get("name", "another recipe")
            raise CheckpointError(
                f"{checkpoint} is of recipe '{name}' and does not fit the model of recipe '{recipe.name}': {error}",
                hint="pass the recipe that the checkpoint was trained with",
            ) from error
    return model.eval()
