"""`self.head.to(self.dtype)` in a `forward`: a part that is so already is left as it is.

torch's own conversion replaces every weight by what comes of it, which an exporter that follows stand-ins of them
cannot. While a model is traced here, a conversion that would change nothing gives the part back, and one that would
change something is refused: a program's weights are what they were when it was made. Source: the documentation of
torch.nn.Module.to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.nn import Module

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("switch_transformers", "nllb_moe"),
)

_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_DEVICES = ("cpu", "cuda")


@contextmanager
def left_alone() -> Iterator[None]:
    """While a model is traced in the block, its parts are not converted; RuntimeError where that would matter."""
    before = {name: getattr(Module, name) for name in ("to", *_DTYPES, *_DEVICES)}
    for name, method in before.items():
        setattr(Module, name, _unchanged(name, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Module, name, method)


def _unchanged(name: str, method: Callable[..., Module]) -> Callable[..., Module]:
    def converted(self: Module, *args: Any, **kwargs: Any) -> Module:
        device, dtype, layout = _wanted(name, args, kwargs)
        for label, tensor in chain(self.named_parameters(), self.named_buffers()):
            kept = tensor.is_complex() and name in _DTYPES
            other = _difference(tensor, device, None if kept else dtype, layout)
            if other:
                raise RuntimeError(
                    f"`{type(self).__name__}.{name}` changes '{label}' from {other} while the model is called: "
                    "a program's weights stay as they are, so convert the part where the model is made"
                )
        return self

    converted.__doc__, converted.__name__ = method.__doc__, name
    return converted


def _wanted(name: str, args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, Any]:
    """Device, dtype and memory format that a conversion asks for; None where it asks for none."""
    if name == "to":
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        return device, dtype, layout
    if name in _DTYPES:
        return None, _DTYPES[name], None
    number = args[0] if args else kwargs.get("device")
    return torch.device(name, number) if isinstance(number, int) else torch.device(number or name), None, None


def _difference(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None, layout: Any) -> str:
    """What a conversion would change of `tensor`, as it is and as it would be; empty where that is nothing."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    if dtype is not None and floats and tensor.dtype != dtype:
        return f"{tensor.dtype} to {dtype}"
    index = device is not None and device.index is not None and device.index != tensor.device.index
    if device is not None and (device.type != tensor.device.type or index):
        return f"{tensor.device} to {device}"
    if layout is not None and tensor.dim() in (4, 5) and not tensor.is_contiguous(memory_format=layout):
        return f"its order in memory to {layout}"
    return ""
