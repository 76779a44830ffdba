"""torch.export: the program that the other formats are made from, and a format of its own.

The exported program knows for which sizes it holds (`range_constraints`); that range goes into the
signature and is enforced there, for every format. Its lower bound of 2 is an assumption of the exporter
(it treats 0 and 1 as special), not a finding: batch 1 is claimed, and proven by probes or refused.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils._pytree import tree_leaves

from trueline import files
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.errors import BundleError, CaptureError, RequestError, TruelineError, listed
from trueline.runtime import paths, pt2
from trueline.runtime.calling import BATCH, Calling, Flat
from trueline.runtime.eager import to_arrays, to_tensors
from trueline.runtime.quiet import quiet

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILE = "programs/model.pt2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported program with the signature that it claims."""

    program: torch.export.ExportedProgram
    signature: Signature
    symbols: dict[str, str]
    """torch's name of a symbol -> its name in the signature."""
    boundaries: tuple[int, ...]
    """Sizes at which a guard or a range changes its answer: worth probing, on both sides."""
    weight_bytes: int


def export(module: torch.nn.Module, calling: Calling) -> Exported:
    """Exports `module` with a free batch dimension.

    Raises CaptureError that names the user's line, where one is.
    """
    example = tuple(_tiled(tensor) for tensor in calling.example)
    free = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(Flat(module, calling), example, dynamic_shapes=(free,), strict=False)
            # in-place writes are listed only once the graph is functional
            mutated = program.run_decompositions({}).graph_signature.buffers_to_mutate
    except Exception as error:
        place = paths.users_line(error)
        raise CaptureError(
            f"torch.export cannot follow the model: {_reason(error)}", hint=f"{place}" if place else ""
        ) from error
    if mutated:
        names = listed(name.removeprefix("module.") for name in mutated.values())
        raise CaptureError(
            f"the model writes into its own buffers when it is called ({names})",
            hint="a served program has no memory: return the new value, or write only `if self.training`",
        )
    return _described(program, calling.signature)


def _tiled(tensor: torch.Tensor) -> torch.Tensor:
    """At least 2 records: a dimension of size 1 would be taken for a constant."""
    return tensor if tensor.shape[0] > 1 else torch.cat([tensor, tensor])


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _described(program: torch.export.ExportedProgram, seen: Signature) -> Exported:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    sizes = [values[name].shape[0] for name in program.graph_signature.user_inputs if isinstance(name, str)]
    symbols, dim = {}, Dim()
    for spec, size in zip(seen.inputs, sizes, strict=True):
        if isinstance(size, int):
            raise CaptureError(f"the model works for batches of {size} only (input '{spec.name}')")
        symbols[str(size)] = BATCH
        dim = _narrowed(dim, program, size)
    dims, outputs = {BATCH: dim}, []
    for spec, name in zip(seen.outputs, program.graph_signature.user_outputs, strict=True):
        shape = values[name].shape if isinstance(name, str) else torch.Size()
        outputs.append(_output(spec, shape, symbols, dims))
    weights = [*program.state_dict.values(), *program.constants.values()]
    return Exported(
        program=program,
        signature=Signature(inputs=seen.inputs, outputs=tuple(outputs), dims=dims),
        symbols=symbols,
        boundaries=_boundaries(program, dim),
        weight_bytes=sum(w.numel() * w.element_size() for w in weights if isinstance(w, torch.Tensor)),
    )


def _narrowed(dim: Dim, program: torch.export.ExportedProgram, size: Any) -> Dim:
    span = next((span for symbol, span in program.range_constraints.items() if str(symbol) == str(size)), None)
    if span is None:
        return dim
    lower, upper = _bound(span.lower), _bound(span.upper)
    low = dim.min if lower is None or lower <= 2 else max(dim.min, lower)
    bounds = [bound for bound in (dim.max, upper) if bound is not None]
    return Dim(min=low, max=min(bounds, default=None))


def _bound(bound: Any) -> int | None:
    """A bound as a number; None where sympy says infinity, which torch writes as int_oo or oo."""
    return int(bound) if str(bound).isdigit() else None


def _output(spec: TensorSpec, shape: Any, symbols: Mapping[str, str], dims: dict[str, Dim]) -> TensorSpec:
    found: list[int | str] = []
    for axis, size in enumerate(shape):
        if isinstance(size, int):
            found.append(size)
            continue
        symbol = symbols.get(str(size), f"{spec.name}.{axis}")
        dims.setdefault(symbol, Dim(min=0))
        found.append(symbol)
    return TensorSpec(name=spec.name, datatype=spec.datatype, shape=tuple(found))


def _boundaries(program: torch.export.ExportedProgram, dim: Dim) -> tuple[int, ...]:
    guards: list[str] = getattr(program, "_guards_code", [])
    numbers = {int(number) for guard in guards for number in re.findall(r"(?<![\[\w.])\d{1,4}(?![\]\w.])", guard)}
    numbers |= {bound for bound in (dim.min, dim.max) if bound is not None}
    near = {number + step for number in numbers for step in (-1, 0, 1)}
    return tuple(sorted(size for size in near if 1 <= size <= 256))


def emit(exported: Exported, folder: Path) -> Path:
    """Writes `folder/programs/model.pt2`, free of pickles, paths and stack traces; returns its path."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    example, exported.program._example_inputs = exported.program.example_inputs, None
    try:
        raw = io.BytesIO()  # not a file: torch's writer aborts the process when the disk is full
        torch.export.save(exported.program, raw)
        pt2.clean(raw, path)
    except BundleError as error:
        raise CaptureError(f"the exported program cannot go into a bundle: {error.message}") from error
    except OSError as error:
        raise files.storage_error(error, path) from error
    except Exception as error:
        raise CaptureError(f"torch cannot save the exported program: {_reason(error)}") from error
    finally:
        exported.program._example_inputs = example
    return path


def load(path: Path) -> torch.export.ExportedProgram:
    """The program at `path`, after its archive was checked. Raises BundleError."""
    pt2.check(path)
    try:
        return torch.export.load(path)
    except Exception as error:
        raise BundleError(f"{path} is no program that this torch can open: {_reason(error)}") from error


@final
class ExportSession:
    """A torch.export program.

    Thread-safe. `threads` above 0 sets torch's intra-op threads for the whole process.
    """

    format = "torch_export"

    def __init__(self, path: Path, signature: Signature, *, threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        program = load(path)
        self._module = program.module(check_guards=False)
        if len(program.graph_signature.user_inputs) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(program.graph_signature.user_inputs)} inputs, not as its signature")
        self.signature = signature

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature or ids beyond a table."""
        self.signature.check(inputs)
        try:
            with torch.no_grad():
                found = tuple(tree_leaves(self._module(*to_tensors(self.signature, inputs))))
        except IndexError as error:
            raise RequestError(f"the program refuses these values: {_reason(error)}") from error
        except Exception as error:
            raise TruelineError(f"the program failed on a request that it accepted: {_reason(error)}") from error
        return to_arrays(self.signature, found)
