"""Does a model change itself when it is first called? One that takes its scale from its first batch does.

Whoever captures has to call it, so the change is seen once and never again: what the model was before is compared with
what the first call left. Layers that are made on the first call (torch's lazy modules) and buffers that appear are how
a model is built, and no change of it.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Mapping
from itertools import chain

import torch

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import Place

Marks = Mapping[str, int]


def marks(module: torch.nn.Module) -> Marks:
    """A checksum of every parameter and buffer, by name; of what lies in this machine's memory in one piece."""
    named = chain(module.named_parameters(), module.named_buffers())
    return {name: _mark(value.detach()) for name, value in named if _plain(value)}


def _plain(value: torch.Tensor) -> bool:
    lazy = torch.nn.parameter.is_lazy(value)
    return not lazy and value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized


def _mark(value: torch.Tensor) -> int:
    return zlib.crc32(value.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def changed(before: Marks, module: torch.nn.Module) -> tuple[str, ...]:
    """The names that hold something else than `before`."""
    after = marks(module)
    return tuple(name for name, mark in before.items() if after.get(name, mark) != mark)


def writing_line(module: torch.nn.Module, names: tuple[str, ...]) -> Place | None:
    """The first line of the user's class that writes one of `names`, outside of `__init__`."""
    for name in names:
        owner, _, last = name.rpartition(".")
        written = re.compile(rf"\.{re.escape(last)}\b(\.data)?(\.\w+_\(|\[.*\]\s*=|\s*[-+*/]?=(?!=))")
        for kind in type(module.get_submodule(owner)).__mro__:
            for method in vars(kind).values():
                code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
                if code is None or not code_paths.is_users(code.co_filename) or code.co_name == "__init__":
                    continue
                for number in range(code.co_firstlineno, max(line or 0 for *_, line in code.co_lines()) + 1):
                    place = Place(file=code.co_filename, line=number)
                    if written.search(place.source):
                        return place
    return None
