"""A mode of torch that is on while a module is called, and not while an exporter works around it.

An exporter's own modes are entered before the module is; a mode that was on before them would be asked after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def within(module: torch.nn.Module, mode: Any) -> Iterator[None]:
    """In the block `mode` is entered at each call of `module` and left after it, also after one that raises."""
    hooks = (
        module.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
        module.register_forward_hook(lambda *_: mode.__exit__(None, None, None), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
