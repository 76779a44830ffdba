"""Workarounds for defects of torch, onnxscript and ONNX Runtime, one in each module. `make patches` lists them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """When a workaround can be deleted. `tests/capture/patches/test_expiry.py` runs its reproducer."""

    issue: str
    """owner/repository#number; "none found" where a search found none."""
    versions: str
    """Releases that have the defect; the expiry test decides for later ones."""
    cost: str
    """Of each export, or of the programs that need it."""
    helps: tuple[str, ...]
    """Models, of the benchmark's zoo and of other libraries, that are refused, slow or bound to fewer sizes without it;
    ("all",) for every export. One that helps fewer than two models is deleted."""


@contextmanager
def enter_at_calls(module: torch.nn.Module, mode: Any) -> Iterator[None]:
    """In the block, each call of `module` enters `mode`, and leaves it also after an error.

    The mode that was entered last sees a function first, and the exporter enters its own before it calls the module.
    """
    hooks = (
        module.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
        module.register_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def keep_weights(module: torch.nn.Module) -> Iterator[None]:
    """After the block the parameters hold what they held: `weight.data *= mask` leaves there a tensor of the trace,
    which has no numbers."""
    kept = [(one, one.detach()) for one in module.parameters() if not is_lazy(one)]
    try:
        yield
    finally:
        for one, before in kept:
            if one.device != before.device:
                one.data = before
