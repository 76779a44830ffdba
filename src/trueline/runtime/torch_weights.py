"""The weights of a module that torch runs, mapped from one file by every process that runs it.

Each process loads the module first and then replaces its own copy, tensor by tensor, where the file has the same bytes.
Pages are mapped private (`torch.from_file`): a program that writes into a buffer writes into its own copy.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from trueline import events
from trueline.errors import StorageError
from trueline.runtime import shared_weights as shared
from trueline.runtime.session import SessionSettings

_FILE = "weights"
_ALIGNED = 64
_WORTH_BYTES = 2**16
"""A smaller tensor stays where it is."""


def share(module: torch.nn.Module, settings: SessionSettings) -> None:
    """Maps the weights of `module` from `settings.place`, if it is set, as long as the module lives; on the CPU only.

    Without room there, each process keeps its own copy, and emits the event `weights.private`.
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
                start = at // tensor.element_size() + tensor.storage_offset()
                empty = torch.empty(0, dtype=tensor.dtype)
                with torch.no_grad():
                    tensor.data = empty.set_(file.untyped_storage(), start, tensor.size(), tensor.stride())
        at += len(raw) + -len(raw) % _ALIGNED
    events.emit("weights.shared", mapped_bytes=mapped, own_bytes=num_bytes - mapped)


def find_addresses(module: torch.nn.Module) -> frozenset[int]:
    """Of the storages that `module` keeps."""
    strided = (one for one in _tensors(module) if one.layout is torch.strided)
    return frozenset(one.untyped_storage().data_ptr() for one in strided)


def _storages(module: torch.nn.Module) -> dict[int, tuple[torch.Tensor, list[torch.Tensor]]]:
    """By address, in the order of the module: the bytes of a storage, and its tensors."""
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
