"""torch.export: the program that the other formats are made from, and a format of its own.

The exported program knows for which sizes it holds (`range_constraints` and its guards); they go into the
signature and are enforced there, for every format. What the exporter assumes (it treats 0 and 1 as special)
is no finding: `claims` holds signatures from the widest to the strictest, for the prover to choose from.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import torch
from torch.export.passes import move_to_device_pass
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils._pytree import tree_leaves

from trueline import files
from trueline.bundle.signature import Check, Dim, Signature, TensorSpec
from trueline.capture.export import buffer_writes, custom_ops, divisible_dims, fallbacks, guard_ranges, specialization
from trueline.capture.export.silence import quiet
from trueline.capture.model import code_paths
from trueline.capture.model.dynamic_dims import Place, resized
from trueline.capture.model.eager import to_arrays, to_tensors
from trueline.capture.model.signature import BATCH, Calling, Flat, as_trained
from trueline.capture.patches import (
    causal_mask,
    einsum_order,
    lru_cache,
    module_to,
    packed_sequence,
    recurrent,
    rounding,
    symbolic_sizes,
)
from trueline.capture.patches.decomposition_cache import looked_up_once
from trueline.errors import BundleError, CaptureError, RequestError, TruelineError, join_names
from trueline.runtime import torch_export_archive, torch_settings, torch_weights
from trueline.runtime.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

FILE = "programs/model.pt2"
STATE_HINT = (
    "`trueline capture --state explicit` makes it an input and an output that the caller hands on; or return the new "
    "value yourself, or write only `if self.training`"
)
_UNITS = re.compile(r"(\d+)\*([A-Za-z_]\w*)$")
_CONSTANT = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but .* be a constant \((\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported program with the signature that it claims."""

    program: torch.export.ExportedProgram
    signature: Signature
    symbols: dict[str, str]
    """torch's name of a symbol -> its name in the signature."""
    claims: tuple[Signature, ...]
    """From the widest to the strictest; `signature` is one of them."""
    boundaries: Mapping[str, tuple[int, ...]]
    """Sizes of each symbol at which a guard or a range changes its answer: worth probing, on both sides."""
    weight_bytes: int
    how: str = ""
    """What there is to say of how the model was traced."""
    opset: int | None = None
    """Of its ONNX program; None leaves it to the exporter."""


class Fixed(CaptureError):
    """A free dimension became a constant."""

    def __init__(self, message: str, *, hint: str, symbol: str, size: int) -> None:
        super().__init__(message, hint=hint)
        self.symbol, self.size = symbol, size


def export(module: torch.nn.Module, calling: Calling) -> Exported:
    """Exports `module` with its free dimensions, some of them in multiples where the model takes no others, or traced
    otherwise (`retraced`) where torch.export does not follow it.

    Raises CaptureError that names the user's line, where one is.
    """
    flat = Flat(module, calling)
    try:
        return _export(flat, calling, {})
    except CaptureError as error:
        exported = None
        if isinstance(error, Fixed):
            exported = divisible_dims.tried(error, lambda steps: _export(flat, calling, steps))
        exported = exported or fallbacks.tried(error, module, calling, lambda flat: _export(flat, calling, {}))
        if exported is None:
            raise
        return exported


def _export(flat: torch.nn.Module, calling: Calling, steps: Mapping[str, int]) -> Exported:
    """`steps`: symbols whose sizes are taken to be multiples of a number."""
    axes = _free_axes(calling)
    example = tuple(_tiled(tensor, free) for tensor, free in zip(calling.example, axes, strict=True))
    fixed: Mapping[int, code_paths.Place] = {}
    try:
        with tracing(), lru_cache.uncached(flat), specialization.watched() as fixed:
            program = torch.export.export(flat, example, dynamic_shapes=(_dynamic(calling, axes, steps),), strict=False)
            mutated = _mutated(program)
            program = custom_ops.as_aten(program)
    except Exception as error:
        _refuse_constant(error, calling, fixed)
        place = code_paths.users_line(error)
        raise CaptureError(
            f"torch.export cannot follow the model: {_reason(error)}", hint=f"{place}" if place else ""
        ) from error
    if mutated:
        names = join_names(name.removeprefix("module.").removeprefix("_users.") for name in mutated.values())
        raise CaptureError(
            f"the model writes into its own buffers when it is called ({names})",
            hint=f"a served program has no memory. {STATE_HINT}",
        )
    return _described(program, calling, fixed)


def _mutated(program: torch.export.ExportedProgram) -> Mapping[str, str]:
    """The buffers that `program` writes. They are listed only once the graph is functional, which takes its time."""
    if not buffer_writes.may_write_buffers(program):
        return {}
    found: Mapping[str, str] = program.run_decompositions({}).graph_signature.buffers_to_mutate
    return found


def single(flat: torch.nn.Module, calling: Calling) -> torch.export.ExportedProgram:
    """What torch.export makes of `flat` for one record, in functional form. Raises what it raises."""
    axes = [[axis for axis in one if axis] for one in _free_axes(calling)]
    tensors = [resized(tensor, {0: 1}) for tensor in calling.example]
    example = tuple(_tiled(tensor, free) for tensor, free in zip(tensors, axes, strict=True))
    with tracing(), lru_cache.uncached(flat):
        program = torch.export.export(flat, example, dynamic_shapes=(_dynamic(calling, axes, {}),), strict=False)
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    return functional


@contextmanager
def followable() -> Iterator[None]:
    """Parts of torch that its own exporter fixes or refuses are such as it can follow."""
    with ExitStack() as held:
        for way in (
            recurrent.whole,
            packed_sequence.padded,
            causal_mask.masks_as_given,
            symbolic_sizes.free_sizes,
            module_to.left_alone,
            einsum_order.ordered_by_example,
        ):
            held.enter_context(way())
        yield


@contextmanager
def tracing() -> Iterator[None]:
    """What holds while torch.export follows a model."""
    before = len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), as_trained(), quiet(), looked_up_once(), followable():
            yield
    finally:
        # torch.export leaves its own mode behind when it fails while another is on (torch 2.13), and all that is traced
        # in this process afterwards would go through it
        while len(_get_current_function_mode_stack()) > before:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]


def _free_axes(calling: Calling) -> list[list[int]]:
    return [
        [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)] for spec in calling.signature.inputs
    ]


def _dynamic(calling: Calling, axes: Sequence[Sequence[int]], steps: Mapping[str, int]) -> tuple[dict[int, Any], ...]:
    """What torch.export is told of the free axes of each input."""
    units = {symbol: torch.export.Dim(f"units_of_{_bare(symbol)}") for symbol in steps}
    free: list[dict[int, Any]] = [dict.fromkeys(one, torch.export.Dim.DYNAMIC) for one in axes]
    for spec, one in zip(calling.presumed.inputs, free, strict=True):
        for axis in one:
            symbol = spec.shape[axis]
            if isinstance(symbol, str) and symbol in steps:
                one[axis] = steps[symbol] * units[symbol]
    return tuple(free)


def _tiled(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """At least 2 of what is free: a dimension of size 1 would be taken for a constant."""
    return resized(tensor, {axis: max(2, tensor.shape[axis]) for axis in axes})


def _refuse_constant(error: Exception, calling: Calling, fixed: Mapping[int, code_paths.Place]) -> None:
    """Raises CaptureError with the input's own name when torch says that a free dimension became a constant."""
    found = _CONSTANT.search(str(error))
    if found is None:
        return
    index, axis, size = map(int, found.groups())
    raise _fixed(calling.presumed.inputs[index], axis, size, fixed) from error


def _fixed(spec: TensorSpec, axis: int, size: int, fixed: Mapping[int, code_paths.Place]) -> Fixed:
    symbol = str(spec.shape[axis])
    what = "batches" if symbol == BATCH else f"a '{symbol}'"
    why = f"the model works for {what} of {size} only (dimension {axis} of input '{spec.name}')"
    act = "leave that dimension out of dynamic_shapes(), or write the model without the number"
    place = fixed.get(size)
    if place is None:
        return Fixed(why, hint=act, symbol=symbol, size=size)
    return Fixed(f"{why}: {act}", hint=f"{place}", symbol=symbol, size=size)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _described(
    program: torch.export.ExportedProgram, calling: Calling, fixed: Mapping[int, code_paths.Place]
) -> Exported:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    shapes = [values[name].shape for name in program.graph_signature.user_inputs if isinstance(name, str)]
    symbols = _symbols(shapes, calling, fixed)
    inputs = tuple(
        msgspec.structs.replace(spec, shape=_sized(shape, symbols))
        for spec, shape in zip(calling.signature.inputs, shapes, strict=True)
    )
    made = _claims(program, shapes, symbols, calling)
    least = _least(calling, inputs)
    dims = dict.fromkeys(made[0].dims, Dim())
    outputs = []
    for spec, name in zip(calling.signature.outputs, program.graph_signature.user_outputs, strict=True):
        shape = values[name].shape if isinstance(name, str) else torch.Size()
        outputs.append(_output(spec, shape, symbols, dims))
    claims = tuple(
        Signature(
            inputs=inputs,
            outputs=tuple(outputs),
            dims=dims
            | {
                name: _from(_narrowed(dim, calling.free.bounds.get(name)), least.get(name))
                for name, dim in claim.dims.items()
            },
            guards=claim.guards,
        )
        for claim in made
    )
    borders = {name: (*range(least.get(name, 1), 1), *sizes) for name, sizes in guard_ranges.borders(made).items()}
    weights = [*program.state_dict.values(), *program.constants.values()]
    return Exported(
        program=program,
        signature=claims[0],
        symbols=symbols,
        claims=claims,
        boundaries=borders,
        weight_bytes=sum(w.numel() * w.element_size() for w in weights if isinstance(w, torch.Tensor)),
    )


def _symbols(shapes: Sequence[Any], calling: Calling, fixed: Mapping[int, code_paths.Place]) -> dict[str, str]:
    """torch's symbols -> the signature's. Raises CaptureError for a free dimension that became a constant."""
    same: dict[Place, str] = {}
    for spec, shape in zip(calling.presumed.inputs, shapes, strict=True):
        for axis, wanted in enumerate(spec.shape):
            if isinstance(wanted, str) and isinstance(shape[axis], int):
                raise _fixed(spec, axis, shape[axis], fixed)
            if isinstance(wanted, str):
                same[spec.name, axis] = str(shape[axis])
    groups = calling.free.grouped(same)
    return {
        same[place]: name for group, name in zip(groups, calling.free.named(groups), strict=True) for place in group
    }


def _least(calling: Calling, inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """The symbols of what grows, and how small each begins. torch traces no dimension that is empty; the proof asks."""
    sizes = {(spec.name, axis): size for spec in inputs for axis, size in enumerate(spec.shape)}
    return {str(sizes[place]): start for place, start in calling.free.grows.items()}


def _from(dim: Dim, start: int | None) -> Dim:
    """`dim` from `start`, where nothing but the exporter's habit of taking 0 and 1 for special speaks for more."""
    return dim if start is None or dim.min > 1 else msgspec.structs.replace(dim, min=min(start, dim.min))


def _sized(shape: Any, symbols: Mapping[str, str]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else symbols[str(size)] for size in shape)


def _claims(
    program: torch.export.ExportedProgram, shapes: Sequence[Any], symbols: Mapping[str, str], calling: Calling
) -> tuple[guard_ranges.Claim, ...]:
    free = calling.free
    constraints = {str(symbol): span for symbol, span in program.range_constraints.items()}
    spans: dict[str, Dim] = {}
    for theirs, ours in symbols.items():
        spans[ours] = _narrowed(_narrowed(Dim(min=2), free.bounds.get(ours)), _span(constraints.get(theirs)))
    units = {found[2]: (ours, int(found[1])) for theirs, ours in symbols.items() if (found := _UNITS.match(theirs))}
    for unit, (ours, step) in units.items():
        spans[ours] = divisible_dims.of(spans[ours], _span(constraints.get(unit)), step)
    codes = list(getattr(program, "_guards_code", []))
    codes += [f"({theirs}) == {_bare(ours)}" for theirs, ours in symbols.items() if not theirs.isidentifier()]
    places = {(i, axis): size for i, shape in enumerate(shapes) for axis, size in enumerate(_sized(shape, symbols))}
    names = {theirs: ours for theirs, ours in symbols.items() if theirs.isidentifier()}
    names |= {_bare(ours): ours for ours in spans}
    given = zip(calling.example, _free_axes(calling), strict=True)
    example = [_tiled(tensor, axes).shape for tensor, axes in given]
    sizes = {name: example[i][axis] for (i, axis), name in places.items() if isinstance(name, str)}
    read = guard_ranges.Found(codes=codes, spans=spans, places=places, names=names, units=units, example=sizes)
    try:
        return guard_ranges.claims(read, batch=BATCH)
    except ValueError as error:
        raise CaptureError(
            f"the exported program holds under a condition between sizes that cannot be said: {error}",
            hint="compute sizes in whole numbers (//) in the model",
        ) from error


def _bare(name: str) -> str:
    """`name` as an identifier that no symbol of torch has."""
    return "ours_" + "".join(c if c.isalnum() else "_" for c in name)


def _span(span: Any) -> Dim | None:
    """What torch says of a symbol. sympy says infinity as int_oo or oo."""
    if span is None:
        return None
    lower, upper = (int(bound) if str(bound).isdigit() else None for bound in (span.lower, span.upper))
    return Dim(min=lower or 1, max=upper)


def _narrowed(dim: Dim, other: Dim | None) -> Dim:
    if other is None:
        return dim
    bounds = [bound for bound in (dim.max, other.max) if bound is not None]
    return msgspec.structs.replace(dim, min=max(dim.min, other.min), max=min(bounds, default=None))


def _output(spec: TensorSpec, shape: Any, symbols: Mapping[str, str], dims: dict[str, Dim]) -> TensorSpec:
    found: list[int | str] = []
    for axis, size in enumerate(shape):
        if isinstance(size, int):
            found.append(size)
            continue
        symbol = symbols.get(str(size), f"{spec.name}.{axis}")
        dims.setdefault(symbol, Dim(min=0))
        found.append(symbol)
    return msgspec.structs.replace(spec, shape=tuple(found))


def emit(exported: Exported, folder: Path) -> Path:
    """Writes `folder/programs/model.pt2`, free of pickles, paths and stack traces; returns its path."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    save(exported.program, path)
    return path


def save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes `path`, free of pickles, paths and stack traces. Raises CaptureError, StorageError."""
    example, program._example_inputs = program.example_inputs, None
    try:
        raw = io.BytesIO()  # not a file: torch's writer aborts the process when the disk is full
        with rounding.storable(program):
            torch.export.save(program, raw)
        torch_export_archive.clean(raw, path)
    except BundleError as error:
        place = custom_ops.line_of(program, error.message)
        raise CaptureError(
            f"the exported program cannot go into a bundle: {error.message}", hint=f"{place}" if place else ""
        ) from error
    except OSError as error:
        raise files.storage_error(error, path) from error
    except Exception as error:
        raise CaptureError(f"torch cannot save the exported program: {_reason(error)}") from error
    finally:
        program._example_inputs = example


def load(path: Path) -> torch.export.ExportedProgram:
    """The program at `path`, after its archive was checked. Raises BundleError."""
    torch_export_archive.check(path)
    try:
        return torch.export.load(path)
    except Exception as error:
        raise BundleError(f"{path} is no program that this torch can open: {_reason(error)}") from error


@final
class LoadedProgram:
    """An exported program that is still in memory: asked which claim holds, before anything is written."""

    format = "torch_export"

    def __init__(self, exported: Exported) -> None:
        self.signature = exported.signature
        self._module = exported.program.module(check_guards=False)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.signature.check(inputs)
        with torch.no_grad():
            return to_arrays(self.signature, self._module(*to_tensors(self.signature, inputs)))


@final
class ExportSession:
    """A torch.export program, on the CPU unless `settings` names a CUDA device; bf16 and fp16 are torch's autocast.

    Thread-safe. Threads above 0 set torch's intra-op threads for the whole process.
    """

    format = "torch_export"

    def __init__(self, path: Path, signature: Signature, *, settings: Settings = DEFAULTS) -> None:
        self._device = torch_settings.device(settings)
        self._settings = settings
        torch_settings.autocast(settings, self._device)  # refuses a precision before anything is loaded
        program = load(path)
        if self._device.type != "cpu":
            program = move_to_device_pass(program, self._device)
        self._module = program.module(check_guards=False)
        torch_weights.share(self._module, settings)
        if len(program.graph_signature.user_inputs) != len(signature.inputs):
            raise BundleError(f"{path} takes {len(program.graph_signature.user_inputs)} inputs, not as its signature")
        self.signature = signature
        self._check = Check(signature)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name. Raises RequestError for inputs outside the signature or ids beyond a table."""
        self._check(inputs)
        try:
            with torch.no_grad(), torch_settings.autocast(self._settings, self._device):
                found = tuple(tree_leaves(self._module(*to_tensors(self.signature, inputs, self._device))))
        except IndexError as error:
            raise RequestError(f"the program refuses these values: {_reason(error)}") from error
        except Exception as error:
            raise TruelineError(f"the program failed on a request that it accepted: {_reason(error)}") from error
        return to_arrays(self.signature, found, cast=torch_settings.casts(self._settings))
