"""The weights of a module that torch runs, mapped from one file by every process that runs it.

torch computes with weights as they lie, so a mapped tensor costs a run nothing. Each process loads the module first and
then lets go of its own copy, tensor by tensor, where the file has the same bytes: what is mapped is what was loaded.
Pages are mapped private (`torch.from_file`), so that a program that writes into a buffer writes into a copy of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from trueline import events
from trueline.errors import StorageError
from trueline.runtime import shared_weights as shared
from trueline.runtime.settings import SessionSettings

_FILE = "weights"
_ALIGNED = 64
_WORTH_BYTES = 2**16
"""A smaller tensor stays where it is."""


def share(module: torch.nn.Module, settings: SessionSettings) -> None:
    """Maps the weights of `module` from `settings.place`, for as long as it lives; on the CPU, and where one is named.

    Without room there, each process keeps its own copy, and the event `weights.private` says so.
    """
    place = settings.place
    found = list(_storages(module).items())
    num_bytes = sum(len(raw) for _, (raw, _) in found)
    if place is None or settings.device not in ("", "cpu") or num_bytes < shared.WORTH_BYTES:
        return

    def write(folder: Path) -> None:
        with (folder / _FILE).open("xb") as file:
            for _, (raw, _) in found:
                file.write(raw.numpy().data)
                file.write(bytes(-len(raw) % _ALIGNED))

    try:
        hold = shared.hold(place.part(f"torch-{torch.__version__}"), write, program_bytes=num_bytes)
    except StorageError as error:
        events.emit("weights.private", why=error.message)
        return
    weakref.finalize(module, hold.release).atexit = False
    at, mapped = 0, 0
    size = (hold.path / _FILE).stat().st_size
    file = torch.from_file(str(hold.path / _FILE), shared=False, size=size, dtype=torch.uint8)
    for _, (raw, tensors) in found:
        if torch.equal(raw, file[at : at + len(raw)]):
            mapped += len(raw)
            for tensor in tensors:
                _move(tensor, file, at)
        at += len(raw) + -len(raw) % _ALIGNED
    events.emit("weights.shared", mapped_bytes=mapped, own_bytes=num_bytes - mapped)


def _storages(module: torch.nn.Module) -> dict[int, tuple[torch.Tensor, list[torch.Tensor]]]:
    """By address, in the order of the module: the bytes of a storage, and the tensors that lie in it."""
    found: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
    for tensor in _tensors(module):
        if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() >= _WORTH_BYTES:
            raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            found.setdefault(storage.data_ptr(), (raw, []))[1].append(tensor)
    return found


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():  # constants of an exported program are plain attributes
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def _move(tensor: torch.Tensor, file: torch.Tensor, at: int) -> None:
    start = at // tensor.element_size() + tensor.storage_offset()
    with torch.no_grad():
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            file.untyped_storage(), start, tensor.size(), tensor.stride()
        )
