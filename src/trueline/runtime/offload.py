"""Partial offload: the largest parts of a program that ONNX Runtime has operators for run there, the rest in torch.

    model.offload.json     the plan: the nodes of the program that each part replaces, its inputs and outputs
    model.offload.pt2      the whole program in torch.export's format
    model.offload-0.onnx   a part

The idea is ONNXIFI's. Opening runs no code, and one Session covers the whole, proven as any other program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import torch

from trueline.bundle.signature import Check, Signature
from trueline.errors import BundleError
from trueline.runtime import onnx, subprogram, tensors, torch_export, torch_weights
from trueline.runtime.refusals import refusal_of
from trueline.runtime.session import DEFAULTS, SessionSettings
from trueline.runtime.tensors import to_arrays, to_tensors

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILE = "programs/model.offload.json"
VERSION = 1


class OffloadedPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part: its file beside the plan, and names of values in the program."""

    file: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class KeptOperator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator that stays in torch, and why the other runtime refused it."""

    operator: str
    why: str


class OffloadPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model.offload.json`."""

    version: int
    program: str
    runtime: str
    parts: tuple[OffloadedPart, ...]
    kept: tuple[KeptOperator, ...]
    operators: int
    """Of the whole program, sizes not counted."""

    def __str__(self) -> str:
        """
        >>> str(OffloadPlan(version=1, program="p.pt2", runtime="onnxruntime", operators=4, parts=(
        ...     OffloadedPart(file="p-0.onnx", nodes=("a", "b", "c"), inputs=("x",), outputs=("c",)),),
        ...     kept=(KeptOperator(operator="aten.cdist.default", why="no translation"),)))
        '3 of 4 operators run in onnxruntime, in 1 part; torch keeps aten.cdist.default (no translation)'
        """
        there = sum(len(part.nodes) for part in self.parts)
        parts = f"{len(self.parts)} part" + ("s" if len(self.parts) != 1 else "")
        kept = "; ".join(f"{one.operator} ({one.why})" for one in self.kept)
        return f"{there} of {self.operators} operators run in {self.runtime}, in {parts}" + (
            f"; torch keeps {kept}" if kept else ""
        )


def read(path: Path) -> OffloadPlan:
    """The plan at `path`. Raises BundleError."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=OffloadPlan)
    except (msgspec.DecodeError, OSError, RecursionError) as error:
        raise BundleError(f"{path} is torn or no offload plan: {error}") from error
    if plan.version != VERSION or plan.runtime != "onnxruntime":
        raise BundleError(
            f"{path} is an offload plan of version {plan.version} for {plan.runtime}, this Trueline reads version "
            f"{VERSION} for onnxruntime"
        )
    for name in (plan.program, *(part.file for part in plan.parts)):
        if Path(name).name != name or not (path.parent / name).is_file():
            raise BundleError(f"{path} names {name!r}, which is no file beside it")
    return plan


@final
class OffloadSession:
    """A program on the CPU that is run by torch and, in parts, by ONNX Runtime.

    Thread-safe. `threads` above 0 holds for each part, and sets torch's intra-op threads for the whole process.
    """

    format = "offload"

    def __init__(self, path: Path, signature: Signature, *, settings: SessionSettings = DEFAULTS) -> None:
        settings.on_cpu("an offloaded program")
        settings.precise("an offloaded program", (), otherwise="open the torch_export program for autocast")
        tensors.device(settings)
        plan = read(path)
        program = torch_export.load(path.parent / plan.program)
        if len(program.graph_signature.user_inputs) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(program.graph_signature.user_inputs)} inputs, not as its signature")
        module: Any = program.module(check_guards=False)
        module.graph.eliminate_dead_code()
        torch_weights.share(module, settings)
        pieces = {}
        for number, part in enumerate(plan.parts):
            place = settings.place and settings.place.part(f"part-{number}")
            module.add_module(f"part_{number}", OnnxPart(path.parent / part.file, part, replace(settings, place=place)))
            pieces[f"part_{number}"] = (part.nodes, part.inputs, part.outputs)
        try:
            self._module = subprogram.woven(module, pieces)
        except (ValueError, KeyError, RuntimeError) as error:
            raise BundleError(f"{path} does not fit {plan.program}: {error}") from error
        self.signature = signature
        self._check = Check(signature)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature or ids beyond a table."""
        self._check(inputs)
        try:
            with torch.no_grad():
                found = self._module(*to_tensors(self.signature, inputs))
        except Exception as error:
            raise refusal_of(error, inputs, blame=isinstance(error, onnx.BAD_INPUT)) from error
        return to_arrays(self.signature, tuple(found))


@final
class OnnxPart(torch.nn.Module):
    """A part as a torch module. Only tensors that are not contiguous are copied."""

    def __init__(self, path: Path, part: OffloadedPart, settings: SessionSettings) -> None:
        super().__init__()
        self._session = onnx.open_model(path, settings)
        self._inputs, self._outputs = part.inputs, list(part.outputs)
        takes = [node.name for node in self._session.get_inputs()]
        gives = {node.name for node in self._session.get_outputs()}
        if set(takes) - set(self._inputs) or gives != set(self._outputs):
            raise BundleError(f"{path} takes {takes} and gives {sorted(gives)}, its plan says otherwise")
        self._taken = frozenset(takes)

    def forward(self, *tensors: torch.Tensor) -> Any:
        feeds = {
            name: tensor.detach().contiguous().numpy()
            for name, tensor in zip(self._inputs, tensors, strict=True)
            if name in self._taken
        }
        found = [torch.from_numpy(array) for array in self._session.run(self._outputs, feeds)]
        return found[0] if len(found) == 1 else tuple(found)
