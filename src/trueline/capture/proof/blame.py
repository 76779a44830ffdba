"""Which part of the model a program gets wrong: the first submodule whose output it does not have.

    eager      forward hooks note what each call of a submodule returned, in the order in which the calls end
    program    every node of a graph says in which submodules it stands: its value is noted for each of them

Calls end from the inside outwards, so the first one that no value of the program agrees with is the innermost. A
submodule that left no node (an identity, or what nobody uses) is not held against the program, and one with several
outputs agrees when any of them does: a program leaves out what is not used. Knows no format but the two graphs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from trueline.capture.export.exported import Exported
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import users_own
from trueline.capture.model.signature import as_trained
from trueline.capture.onnx import emit
from trueline.runtime import compare
from trueline.runtime.tensors import to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

Values = Mapping[str, Sequence["Array"]]
"""Qualified name of a submodule, "" for the model -> the values that were computed in it."""

OWN = "the model itself, and none of its submodules"
_AGAIN = re.compile(r"@\d+")
"""torch marks a second call of the same submodule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submodule:
    """A part of the user's model."""

    name: str
    """Qualified; empty for the model itself."""
    kind: str
    place: str
    """`file:line` of its class; empty where there is no source."""

    def __str__(self) -> str:
        return f"'{self.name}' ({self.kind})" if self.name else f"{OWN} ({self.kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a submodule that ended, with the tensors that it returned."""

    name: str
    outputs: tuple[Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Where a program parts from the model."""

    stage: str
    """In words, when it is not the export that is at fault; else empty."""
    submodule: Submodule | None


NOBODY = Blame(stage="", submodule=None)


def blame(format: str, exported: Exported, eager: EagerSession, inputs: Mapping[str, Array]) -> Blame:
    """Where the program in `format`, made from `exported`, parts from the eager model on `inputs`.

    The exported program is asked first: if it agrees, the fault lies in what was made of it.
    """
    calls = called(eager, inputs)
    guilty = first_difference(calls, _exported_values(exported, inputs))
    if guilty is not None or format == "torch_export":
        return Blame(stage="", submodule=_described(eager, guilty))
    if format not in ("onnx", "openvino"):
        return Blame(stage="the exported program agrees, what was compiled from it does not", submodule=None)
    guilty = first_difference(calls, emit.values(exported, inputs))
    if guilty is None and format == "openvino":
        return Blame(stage="the ONNX program agrees in ONNX Runtime, and not in OpenVINO", submodule=None)
    return Blame(
        stage="the exported program agrees, its translation to ONNX does not", submodule=_described(eager, guilty)
    )


def _described(eager: EagerSession, name: str | None) -> Submodule | None:
    if name is None:
        return None
    kind = type(users_own(eager.module).get_submodule(name))
    return Submodule(name=name, kind=kind.__name__, place=_place(kind))


def _place(kind: type) -> str:
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return ""  # a class that was made without source


def called(eager: EagerSession, inputs: Mapping[str, Array]) -> list[Call]:
    """What each call of a submodule returns on `inputs`, in the order in which the calls end."""
    found: list[Call] = []
    users = users_own(eager.module)
    names = {id(part): name for name, part in users.named_modules()}

    def note(part: torch.nn.Module, args: Any, output: Any) -> None:
        found.append(Call(name=names[id(part)], outputs=tuple(_arrays(output))))

    hooks = [part.register_forward_hook(note) for part in users.modules()]
    try:
        eager.run(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def first_difference(calls: Sequence[Call], values: Values) -> str | None:
    """The submodule of the first call that `values` do not agree with; None when all do."""
    for call in calls:
        known = values.get(call.name, ())
        comparable = [(want, [got for got in known if _alike(want, got)]) for want in call.outputs]
        asked = [(want, candidates) for want, candidates in comparable if candidates]
        if asked and not any(_agrees(want, got) for want, candidates in asked for got in candidates):
            return call.name
    return None


def _alike(want: Array, got: Array) -> bool:
    return want.shape == got.shape and want.dtype == got.dtype


def _agrees(want: Array, got: Array) -> bool:
    return compare.compare({"": want}, {"": got}).agrees


class _Noting(torch.fx.Interpreter):
    """Runs a graph and keeps the value of every node, by the submodules in which the node stands."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, list[Array]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        arrays = list(_arrays(value))
        stack = n.meta.get("nn_module_stack") or {}
        for name in {emit.users_name(_AGAIN.sub("", path)) for path, _ in stack.values()} - {None}:
            self.values.setdefault(str(name), []).extend(arrays)
        return value


def _exported_values(exported: Exported, inputs: Mapping[str, Array]) -> Values:
    noting = _Noting(exported.program.module(check_guards=False))
    with torch.no_grad(), as_trained():
        found = noting.run(*to_tensors(exported.signature, inputs), enable_io_processing=True)
    noting.values.setdefault("", []).extend(_arrays(found))
    return noting.values


def _arrays(value: Any) -> list[Array]:
    """Copies of the tensors in `value` that numpy knows."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.dtype != torch.bfloat16 and not leaf.is_complex():
            found.append(leaf.detach().numpy().copy())
    return found
