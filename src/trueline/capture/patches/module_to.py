"""`self.head.to(self.dtype)` inside `forward` leaves a part alone that already is so.

torch replaces every weight by its conversion, and torch.export cannot follow a replaced weight. In a trace, a
conversion that changes nothing returns the part; one that would change a weight is refused, because a program's weights
are fixed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.nn import Module

from trueline.capture.patches import Patch

PATCH = Patch(issue="none found", versions="torch 2.13", cost="under 0.1 ms", helps=("switch_transformers", "nllb_moe"))

_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_DEVICES = ("cpu", "cuda")


@contextmanager
def skip_conversions() -> Iterator[None]:
    """In the block, parts are not converted; RuntimeError where that would matter."""
    originals = {name: getattr(Module, name) for name in ("to", *_DTYPES, *_DEVICES)}
    for name, method in originals.items():
        setattr(Module, name, _check_instead(name, method))
    try:
        yield
    finally:
        for name, method in originals.items():
            setattr(Module, name, method)


def _check_instead(name: str, method: Callable[..., Module]) -> Callable[..., Module]:
    def check(self: Module, *args: Any, **kwargs: Any) -> Module:
        device, dtype, layout = _target(name, args, kwargs)
        for label, tensor in chain(self.named_parameters(), self.named_buffers()):
            skip_dtype = tensor.is_complex() and name in _DTYPES
            change = _difference(tensor, device, None if skip_dtype else dtype, layout)
            if change:
                raise RuntimeError(
                    f"`{type(self).__name__}.{name}` changes '{label}' from {change} while the model is called: "
                    "a program's weights stay as they are, so convert the part where the model is made"
                )
        return self

    check.__doc__, check.__name__ = method.__doc__, name
    return check


def _target(name: str, args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, Any]:
    """Device, dtype and memory format of a conversion; None for what it leaves as it is."""
    if name == "to":
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        return device, dtype, layout
    if name in _DTYPES:
        return None, _DTYPES[name], None
    number = args[0] if args else kwargs.get("device")
    return torch.device(name, number) if isinstance(number, int) else torch.device(number or name), None, None


def _difference(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None, layout: Any) -> str:
    """What a conversion would change of `tensor`: its value and the new one. Empty for no change."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    if dtype is not None and floats and tensor.dtype != dtype:
        return f"{tensor.dtype} to {dtype}"
    other_index = device is not None and device.index is not None and device.index != tensor.device.index
    if device is not None and (device.type != tensor.device.type or other_index):
        return f"{tensor.device} to {device}"
    if layout is not None and tensor.dim() in (4, 5) and not tensor.is_contiguous(memory_format=layout):
        return f"its order in memory to {layout}"
    return ""
