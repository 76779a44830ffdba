"""Refuses a GradScaler that the user's code calls: with a scaled loss a job would train silently to something else.

`job.step` and a recipe's loss take the plain loss, and the job scales it where its precision is fp16. What a scaler
returns is a tensor as any other, so its methods are replaced while the trial before the first step runs that code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler

from trueline.errors import TruelineError

_METHODS = ("scale", "unscale_", "step", "update")


@contextmanager
def refuse_scalers(error: type[TruelineError], where: str, setting: str) -> Iterator[list[TruelineError]]:
    """In this block `scale` raises `error`, unless the scaler is made with `enabled=False`; the other methods, which
    may follow a step that was applied, do nothing. Yields what was refused. `where` names the code, and `setting` what
    to write instead."""
    refused: list[TruelineError] = []
    kinds = [GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    plain = [(kind, name, vars(kind)[name]) for kind in kinds for name in _METHODS if name in vars(kind)]
    hint = f"leave the scaler out, or make it with enabled=False, and set {setting}: the job then scales and unscales"

    def replace(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(scaler: GradScaler, *given: Any, **named: Any) -> Any:
            if not scaler.is_enabled():
                return method(scaler, *given, **named)
            what = f"{where} calls {name}() of a torch.amp.GradScaler, and the job takes the plain loss: "
            refused.append(error(f"{what}it would train with one that is larger by the scale", hint=hint))
            if name == "scale":
                raise refused[0]
            return None

        return refuse

    try:
        for kind, name, method in plain:
            setattr(kind, name, replace(name, method))
        yield refused
    finally:
        for kind, name, method in plain:
            setattr(kind, name, method)
