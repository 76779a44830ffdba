"""Other ways to trace a model, each tried only after torch.export failed on it as it is."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import torch
from torch.fx import GraphModule

from trueline import events
from trueline.bundle.schema import BY_RECORD
from trueline.bundle.signature import Dim
from trueline.capture.export import decided_sizes
from trueline.capture.export.exported import Exported, Fixed
from trueline.capture.export.tracing import tracing
from trueline.capture.model.dynamic_dims import resize_tensor
from trueline.capture.model.signature import BATCH, Calling, TensorModule
from trueline.capture.patches import (
    below_python,
    enter_at_calls,
    fake_quantization,
    nonzero_loops,
    parameter_branches,
    per_record,
    scalar_indices,
)
from trueline.capture.patches.stand_ins import size_lengths
from trueline.errors import CaptureError
from trueline.recipe.eager_mode import as_trained
from trueline.runtime import compare
from trueline.runtime.tensors import to_array

BY_RECORDS = f"{BY_RECORD}: `trueline doctor` may show a rewrite that takes a batch at once"
LENGTHS = "lengths stay functions of a size"
MAX_UNIT = 32
"""Vision networks halve a size five times."""
Steps = dict[str, int]
"""Symbol -> the number of which its sizes are multiples."""
Whole = Callable[[torch.nn.Module], Exported]
"""The exporter that failed, of a module of flat tensors."""
Single = Callable[[torch.nn.Module, Calling], torch.export.ExportedProgram]
"""Exports for one record."""


def retrace(
    error: CaptureError, module: torch.nn.Module, calling: Calling, whole: Whole, single: Single
) -> Exported | None:
    """The program of the first way of tracing that works, after torch.export raised `error`; None when none does."""
    flat, message = TensorModule(module, calling), error.message
    exported = None
    slices = isinstance(error, Fixed) and size_lengths.makes_slices(module)
    if slices or ((isinstance(error, Fixed) or size_lengths.is_cause(message)) and size_lengths.may_help(module)):
        with size_lengths.keep_lengths_free(module):
            exported = _attempt("lengths", LENGTHS, lambda: whole(flat))
    if exported is None and scalar_indices.may_help(message):
        how = "a position that a tensor holds is an index"
        exported = _attempt("positions", how, lambda: _index_by_tensors(flat, whole))
    if calling.signature.state:
        return exported
    if exported is None and parameter_branches.may_help(message):
        how = "what its parameters and buffers decide is decided"
        exported = _attempt("choices", how, lambda: _decide_branches(flat, whole))
    if exported is None and fake_quantization.may_help(message):
        with fake_quantization.keep_values():
            exported = _attempt("steps", "quantized values are computed in floats", lambda: whole(flat))
    loops = exported is None and nonzero_loops.may_help(module, message)
    if loops and nonzero_loops.leave_places_out(flat, _small_calls(calling)):
        how = "a loop over places that values choose has a step for each place"
        with nonzero_loops.trace_all_places(flat):
            exported = _attempt("places", how, lambda: _without_guards(whole(flat)))
    if exported is None and below_python.may_help(module, message):
        how = "traced below Python, as the operators that it calls"
        exported = _attempt("operators", how, lambda: _without_guards(whole(_trace_operators(flat, calling))))
    if exported is None and all(spec.shape[:1] == (BATCH,) for spec in calling.signature.inputs):
        with size_lengths.keep_lengths_free(module):
            exported = _attempt("records", BY_RECORDS, lambda: _map_records(flat, calling, whole, single))
    return exported


def _attempt(by: str, how: str, export: Callable[[], Exported | None]) -> Exported | None:
    """What `export` returns; None when it raises, because what torch.export said of the model as it is counts."""
    try:
        exported = export()
    except Exception as error:  # noqa: BLE001 - whatever the tracer raises
        why = error.message if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        events.emit("program.unfollowed", by=by, why=why)
        return None
    if exported is not None:
        events.emit("program.retraced", how=how)
    return exported


def _index_by_tensors(flat: TensorModule, whole: Whole) -> Exported | None:
    positions = scalar_indices.TensorPositions()
    with enter_at_calls(flat, positions):
        exported = whole(flat)
    return exported if positions.replaced else None


def _decide_branches(flat: TensorModule, whole: Whole) -> Exported | None:
    with parameter_branches.ParameterReads(flat) as reads:
        exported = whole(flat)
    return exported if reads.reads else None


def _trace_operators(flat: TensorModule, calling: Calling) -> torch.nn.Module:
    with tracing():
        return below_python.trace_operators(flat, calling)


def _map_records(flat: TensorModule, calling: Calling, whole: Whole, single: Single) -> Exported | None:
    """A program that maps over records, if it answers the example, and one record more, as the model does."""
    program = single(per_record.SingleRecord(flat), calling)
    mapped = per_record.MappedRecords(program, decided_sizes.list_codes(program))
    if not _draws(mapped.program[0]) and not all(_agree(mapped, flat, calling, more) for more in (0, 1)):
        return None  # torch.export's message says more than the prover would
    exported = whole(mapped)
    return replace(exported, how=BY_RECORDS, unrolled=exported.unrolled | {BATCH})


def _without_guards(exported: Exported) -> Exported:
    """`exported`, whose guards do not tell what the user's code decided by sizes."""
    return replace(exported, unrolled=frozenset(exported.signature.symbols))


def _small_calls(calling: Calling) -> Iterator[tuple[torch.Tensor, ...]]:
    """The example, one record of it, the smallest free sizes, and zeros: few values choose few places."""
    free = [[at for at, size in enumerate(spec.shape) if isinstance(size, str)] for spec in calling.signature.inputs]
    for count in (0, 1, None):
        sizes = [dict.fromkeys(axes[:count], 1) for axes in free]
        tensors = tuple(resize_tensor(tensor, size) for tensor, size in zip(calling.example, sizes, strict=True))
        yield tensors
        yield tuple(torch.zeros_like(tensor) for tensor in tensors)


def _draws(program: GraphModule) -> bool:
    """Whether it draws random numbers."""
    graphs = (one.graph for one in program.modules() if isinstance(one, GraphModule))
    return any(
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        for graph in graphs
        for node in graph.nodes
    )


def _agree(one: torch.nn.Module, other: torch.nn.Module, calling: Calling, more: int) -> bool:
    tensors = [resize_tensor(tensor, {0: tensor.shape[0] + more}) for tensor in calling.example]
    with torch.no_grad(), as_trained():
        answers = [
            {str(at): to_array(tensor) for at, tensor in enumerate(module(*(tensor.clone() for tensor in tensors)))}
            for module in (one, other)
        ]
    return compare.compare(*answers).agrees


# ---- sizes in units


def export_in_units(error: Fixed, export: Callable[[Steps], Exported]) -> Exported | None:
    """The program in the smallest units that free what `error` says is fixed; None when none do.

    `if height % 2 == 0` along a stack of strides holds for 64, and torch.export, which cannot say for which sizes it
    holds, fixes 64. Traced as a number of units of 32, the height stays free.
    """
    steps: Steps = {}
    exported = None
    while exported is None:
        step = largest_unit(error.size)
        if error.symbol == BATCH or error.symbol in steps or step < 2:
            return None
        steps[error.symbol] = step
        exported, next_error = _export_steps(export, steps)
        if exported is None and next_error is None:
            return None
        error = next_error or error
    low, high = 1, max(steps.values())  # `low` is known to fail, `high` to work
    while high > 2 * low:
        middle = low
        while middle * middle < low * high:
            middle *= 2
        smaller, _ = _export_steps(export, {symbol: min(step, middle) for symbol, step in steps.items()})
        if smaller is None:
            low = middle
        else:
            exported, high = smaller, middle
    return exported


def largest_unit(size: int) -> int:
    """The largest power of two, up to MAX_UNIT, of which `size` is at least twice a multiple."""
    step = 1
    while step < MAX_UNIT and not size % (2 * step) and size > 2 * step:
        step *= 2
    return step


def _export_steps(export: Callable[[Steps], Exported], steps: Steps) -> tuple[Exported | None, Fixed | None]:
    try:
        return export(steps), None
    except Fixed as error:
        return None, error
    except CaptureError:
        return None, None


def start_at(dim: Dim, start: int | None) -> Dim:
    """`dim` from `start`, unless the exporter has a reason for more than its assumption that 0 and 1 are special."""
    return dim if start is None or dim.min > 1 else msgspec.structs.replace(dim, min=min(start, dim.min))


def in_multiples(dim: Dim, units: Dim | None, step: int) -> Dim:
    """`dim` in multiples of `step`, as many as `units` allows."""
    most = None if units is None or units.max is None else units.max * step
    upper = min((bound for bound in (dim.max, most) if bound is not None), default=None)
    return msgspec.structs.replace(dim, min=step, max=upper, multiple_of=step)
