"""torch.export: the program that the other formats are made from, and a format of its own.

The sizes for which the program holds (`range_constraints` and guards) go into the signature, which enforces them for
every format. Since the exporter assumes much (it treats 0 and 1 as special), `claims` holds signatures from the widest
to the strictest, for the prover to choose from.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec
import torch

from trueline import files
from trueline.bundle.signature import Dim, Signature, TensorSpec
from trueline.capture.export import decided_sizes, fallbacks, guard_ranges, operators, quantized_layers, whole_numbers
from trueline.capture.export.caught_errors import follow
from trueline.capture.export.exported import STATE_HINT, Exported, Fixed, count_weight_bytes, fixed_error
from trueline.capture.export.tracing import tracing, watch_specialization
from trueline.capture.model import code_paths
from trueline.capture.model.dynamic_dims import Place, resize_tensor
from trueline.capture.model.signature import BATCH, Calling, TensorModule
from trueline.capture.patches import keep_weights, rounding, size_keys, whole_division
from trueline.capture.patches.stand_ins import numpy_arrays, size_lengths
from trueline.errors import BundleError, CaptureError, join_names
from trueline.runtime import torch_export_archive
from trueline.runtime.tensors import one_line, to_arrays, to_tensors
from trueline.runtime.torch_export import FILE

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

Claims = tuple[guard_ranges.Claim, ...]
_UNITS = re.compile(r"(\d+)\*([A-Za-z_]\w*)$")
_CONSTANT = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but .* be a constant \((\d+)\)")


def export(module: torch.nn.Module, calling: Calling) -> Exported:
    """Exports `module` with its free dimensions, in multiples or by another way of tracing (`fallbacks`) where
    torch.export fails on it as it is. Raises CaptureError, with the user's line where it is known."""
    with quantized_layers.unpack(module) as only_torch:
        return replace(_export_any_way(module, calling), only_torch=only_torch)


def _export_any_way(module: torch.nn.Module, calling: Calling) -> Exported:
    flat = TensorModule(module, calling)
    try:
        return _export(flat, calling, {})
    except CaptureError as error:
        exported = None
        if isinstance(error, Fixed):
            exported = fallbacks.export_in_units(error, lambda steps: _export(flat, calling, steps))
        exported = exported or fallbacks.retrace(
            error, module, calling, lambda flat: _export(flat, calling, {}), _single
        )
        if exported is None:
            raise
        return exported


def export_at(module: torch.nn.Module, calling: Calling, sizes: Mapping[str, int]) -> Exported:
    """Exports `module` for the example at other `sizes`, with `len` and `int` that leave sizes free. Raises
    CaptureError."""
    specs = calling.presumed.inputs
    free = [{axis: sizes.get(str(size), 0) for axis, size in enumerate(spec.shape)} for spec in specs]
    example = tuple(
        resize_tensor(tensor, {axis: size for axis, size in axes.items() if size})
        for tensor, axes in zip(calling.example, free, strict=True)
    )
    larger = replace(calling, example=example)
    with quantized_layers.unpack(module) as only_torch:
        return replace(_export_free(module, larger), only_torch=only_torch)


def _export_free(module: torch.nn.Module, larger: Calling) -> Exported:
    if not size_lengths.may_help(module) and not size_lengths.makes_slices(module):
        return _export(TensorModule(module, larger), larger, {})
    with size_lengths.keep_lengths_free(module):
        return replace(_export(TensorModule(module, larger), larger, {}), how=fallbacks.LENGTHS)


def _export(flat: torch.nn.Module, calling: Calling, steps: Mapping[str, int]) -> Exported:
    """`steps`: symbols whose sizes are taken to be multiples of a number."""
    axes = _free_axes(calling)
    example = tuple(_at_least_two(tensor, free) for tensor, free in zip(calling.example, axes, strict=True))
    fixed: Mapping[int, code_paths.SourceLine] = {}
    options: Any = {"dynamic_shapes": (_dynamic(calling, axes, steps),), "strict": False}
    try:
        with (
            tracing(),
            keep_weights(flat),
            watch_specialization() as fixed,
            decided_sizes.watch(),
            size_keys.watch() as keyed,
            size_lengths.keep_types(flat),
        ):
            program = follow(flat, example, lambda: torch.export.export(flat, example, **options))
            mutated = operators.written_buffers(program)
            program = operators.as_aten(program)
    except CaptureError:
        raise
    except Exception as error:
        quantized_layers.refuse_packed(error, flat)
        _refuse_constant(error, calling, fixed)
        place = code_paths.users_line(error)
        why = "it decides by a value: " if "data-dependent" in str(error) else ""
        raise CaptureError(
            f"torch.export cannot follow the model: {why}{one_line(error)}", hint=f"{place}" if place else ""
        ) from error
    if mutated:
        names = join_names(name.removeprefix("module.").removeprefix("_users.") for name in mutated.values())
        raise CaptureError(
            f"the model writes into its own buffers when it is called ({names})",
            hint=f"a served program has no memory. {STATE_HINT}",
        )
    found = _describe(program, calling, fixed, getattr(flat, "guards", {}))
    found = replace(whole_numbers.end_claims(found), arrays=frozenset(numpy_arrays.FOLLOWED))
    if not keyed:
        return found
    decided = found.unrolled | size_keys.find_symbols(keyed, found.symbols)
    return replace(found, unrolled=decided, keyed=next(filter(None, keyed.values()), None))


def _single(flat: torch.nn.Module, calling: Calling) -> torch.export.ExportedProgram:
    """The functional program of `flat` for one record. Raises what torch.export raises."""
    axes = [[axis for axis in one if axis] for one in _free_axes(calling)]
    tensors = [resize_tensor(tensor, {0: 1}) for tensor in calling.example]
    example = tuple(_at_least_two(tensor, free) for tensor, free in zip(tensors, axes, strict=True))
    options: Any = {"dynamic_shapes": (_dynamic(calling, axes, {}),), "strict": False}
    with tracing(), keep_weights(flat), decided_sizes.watch():
        program = follow(flat, example, lambda: torch.export.export(flat, example, **options))
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    return functional


def _free_axes(calling: Calling) -> list[list[int]]:
    return [
        [axis for axis, size in enumerate(spec.shape) if isinstance(size, str)] for spec in calling.signature.inputs
    ]


def _dynamic(calling: Calling, axes: Sequence[Sequence[int]], steps: Mapping[str, int]) -> tuple[dict[int, Any], ...]:
    """The dynamic shapes of each input for torch.export."""
    units = {symbol: torch.export.Dim(f"units_of_{_bare(symbol)}") for symbol in steps}
    free: list[dict[int, Any]] = [dict.fromkeys(one, torch.export.Dim.DYNAMIC) for one in axes]
    for spec, one in zip(calling.presumed.inputs, free, strict=True):
        for axis in one:
            symbol = spec.shape[axis]
            if isinstance(symbol, str) and symbol in steps:
                one[axis] = steps[symbol] * units[symbol]
    return tuple(free)


def _at_least_two(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """`tensor` with free sizes of at least 2: torch makes a constant of a size of 1."""
    return resize_tensor(tensor, {axis: max(2, tensor.shape[axis]) for axis in axes})


def _refuse_constant(error: Exception, calling: Calling, fixed: Mapping[int, code_paths.SourceLine]) -> None:
    """Raises CaptureError with the input's name if torch's `error` is that a free dimension became a constant."""
    match = _CONSTANT.search(str(error))
    if match is not None:
        index, axis, size = map(int, match.groups())
        raise fixed_error(calling.presumed.inputs[index], axis, size, fixed) from error


def _describe(
    program: torch.export.ExportedProgram,
    calling: Calling,
    fixed: Mapping[int, code_paths.SourceLine],
    more: Mapping[str, bool],
) -> Exported:
    """`more`: guards of a program that this one holds, which torch does not repeat, and whether the user's code decides
    by each."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    shapes = [values[name].shape for name in program.graph_signature.user_inputs if isinstance(name, str)]
    symbols = _symbols(shapes, calling, fixed)
    inputs = tuple(
        msgspec.structs.replace(spec, shape=_name_sizes(shape, symbols))
        for spec, shape in zip(calling.signature.inputs, shapes, strict=True)
    )
    guards = _guards(program, shapes, symbols, calling, more)
    made, alike = _claims(guards, calling.find_alike(inputs))
    _refuse_fixed_batch(inputs, made[0].dims.get(BATCH, Dim()), fixed)
    # symbols of what grows, and the size each begins at: torch traces no empty dimension, but the proof probes it
    sizes = {(spec.name, axis): size for spec in inputs for axis, size in enumerate(spec.shape)}
    least = {str(sizes[place]): start for place, start in calling.free.grows.items()}
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
                name: fallbacks.start_at(_narrow(dim, calling.free.bounds.get(name)), least.get(name))
                for name, dim in claim.dims.items()
            },
            guards=claim.guards,
        )
        for claim in (*made, *alike)
    )
    borders = {name: (*range(least.get(name, 1), 1), *sizes) for name, sizes in guard_ranges.borders(made).items()}
    return Exported(
        program=program,
        signature=claims[0],
        symbols=symbols,
        claims=claims,
        boundaries=borders,
        together=guard_ranges.list_far_holes(guards, made),
        unrolled=guard_ranges.unread(guards),
        weight_bytes=count_weight_bytes(program),
    )


def _refuse_fixed_batch(inputs: Sequence[TensorSpec], dim: Dim, fixed: Mapping[int, code_paths.SourceLine]) -> None:
    """Raises CaptureError if guards leave one batch, which torch does not say."""
    if dim.max == dim.min > 1:
        spec = next(spec for spec in inputs if BATCH in spec.shape)
        raise fixed_error(spec, spec.shape.index(BATCH), dim.min, fixed)


def _symbols(shapes: Sequence[Any], calling: Calling, fixed: Mapping[int, code_paths.SourceLine]) -> dict[str, str]:
    """torch's symbols -> the signature's. Raises CaptureError for a free dimension that became a constant."""
    same: dict[Place, str] = {}
    for spec, shape in zip(calling.presumed.inputs, shapes, strict=True):
        for axis in (axis for axis, size in enumerate(spec.shape) if isinstance(size, str)):
            if isinstance(shape[axis], int):
                raise fixed_error(spec, axis, shape[axis], fixed)
            same[spec.name, axis] = str(shape[axis])
    groups = calling.free.group(same)
    return {
        same[place]: name
        for group, name in zip(groups, calling.free.name_groups(groups), strict=True)
        for place in group
    }


def _name_sizes(shape: Any, symbols: Mapping[str, str]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else symbols[str(size)] for size in shape)


def _guards(
    program: torch.export.ExportedProgram,
    shapes: Sequence[Any],
    symbols: Mapping[str, str],
    calling: Calling,
    more: Mapping[str, bool],
) -> guard_ranges.ExportedGuards:
    free = calling.free
    constraints = {str(symbol): span for symbol, span in program.range_constraints.items()}
    spans: dict[str, Dim] = {}
    for theirs, ours in symbols.items():
        spans[ours] = _narrow(_narrow(Dim(min=2), free.bounds.get(ours)), _span(constraints.get(theirs)))
    units = {found[2]: (ours, int(found[1])) for theirs, ours in symbols.items() if (found := _UNITS.match(theirs))}
    for unit, (ours, step) in units.items():
        spans[ours] = fallbacks.in_multiples(spans[ours], _span(constraints.get(unit)), step)
    codes = [*getattr(program, "_guards_code", []), *more]
    codes += [f"({theirs}) == {_bare(ours)}" for theirs, ours in symbols.items() if not theirs.isidentifier()]
    places = {
        (i, axis): size for i, shape in enumerate(shapes) for axis, size in enumerate(_name_sizes(shape, symbols))
    }
    names = {theirs: ours for theirs, ours in symbols.items() if theirs.isidentifier()}
    names |= {_bare(ours): ours for ours in spans}
    example = [_at_least_two(*given).shape for given in zip(calling.example, _free_axes(calling), strict=True)]
    sizes = {name: example[i][axis] for (i, axis), name in places.items() if isinstance(name, str)}
    decided = decided_sizes.list_codes(program) | {code for code, users in more.items() if users}
    return guard_ranges.ExportedGuards(
        codes=codes, decided=decided, spans=spans, places=places, names=names, units=units, example=sizes
    )


def _claims(guards: guard_ranges.ExportedGuards, alike: Mapping[str, str]) -> tuple[Claims, Claims]:
    """Of any sizes, and with those equal that are `alike` in all examples."""
    made: Claims = ()
    with suppress(ValueError):
        made = guard_ranges.claims(guards, batch=BATCH)
    try:
        equal = guard_ranges.claim_alike(guards, alike, made, batch=BATCH)
        return (made, equal) if made else (equal or guard_ranges.claims(guards, batch=BATCH), ())
    except ValueError as error:
        raise CaptureError(
            f"the exported program holds under a condition between sizes that cannot be expressed: {error}",
            hint="compute sizes in whole numbers (//) in the model",
        ) from error


def _bare(name: str) -> str:
    """`name` as an identifier that torch does not use."""
    return "ours_" + "".join(c if c.isalnum() else "_" for c in name)


def _span(span: Any) -> Dim | None:
    """torch's range of a symbol. sympy's infinity is int_oo or oo."""
    if span is None:
        return None
    lower, upper = (int(bound) if str(bound).isdigit() else None for bound in (span.lower, span.upper))
    return Dim(min=lower or 1, max=upper)


def _narrow(dim: Dim, other: Dim | None) -> Dim:
    if other is None:
        return dim
    bounds = [bound for bound in (dim.max, other.max) if bound is not None]
    return msgspec.structs.replace(dim, min=max(dim.min, other.min), max=min(bounds, default=None))


def _output(spec: TensorSpec, shape: Any, symbols: Mapping[str, str], dims: dict[str, Dim]) -> TensorSpec:
    sizes = tuple(
        size if isinstance(size, int) else symbols.get(str(size), f"{spec.name}.{axis}")
        for axis, size in enumerate(shape)
    )
    for size in sizes:
        if isinstance(size, str):
            dims.setdefault(size, Dim(min=0))
    return msgspec.structs.replace(spec, shape=sizes)


def emit(exported: Exported, folder: Path) -> Path:
    """Writes `folder/programs/model.pt2`, without pickles, paths and stack traces; returns its path."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    save(exported.program, path)
    return path


def save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes `path`, without pickles, paths and stack traces. Raises CaptureError, StorageError."""
    example, program._example_inputs = program.example_inputs, None
    try:
        with tempfile.TemporaryFile(dir=path.parent) as raw:
            spool = _Spool(raw.fileno(), "w", closefd=False)
            with (
                rounding.round_by_trunc(program),
                whole_division.avoid_overflow(program),
                operators.ranges_from_one(program),
            ):
                torch.export.save(program, spool)
            if spool.error is not None:
                raise spool.error
            raw.seek(0)
            torch_export_archive.clean(raw, path, code_paths.brief)
    except BundleError as error:
        place = operators.line_of(program, error.message)
        raise CaptureError(
            f"the exported program cannot go into a bundle: {error.message}", hint=f"{place}" if place else ""
        ) from error
    except OSError as error:
        raise files.storage_error(error, path) from error
    except Exception as error:
        raise CaptureError(f"torch cannot save the exported program: {one_line(error)}") from error
    finally:
        program._example_inputs = example


class _Spool(io.FileIO):
    """A file for torch's writer, which aborts the process where a write fails, as on a full disk: the error is kept."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        count = len(rest)
        while self.error is None and rest:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.error = error
        return count


@final
class LoadedProgram:
    """An exported program in memory, to find the claim that holds before anything is written."""

    format = "torch_export"

    def __init__(self, exported: Exported) -> None:
        self.signature = exported.signature
        with operators.ranges_from_one(exported.program):
            self._module = exported.program.module(check_guards=False)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.signature.check(inputs)
        with torch.no_grad():
            return to_arrays(self.signature, self._module(*to_tensors(self.signature, inputs)))
