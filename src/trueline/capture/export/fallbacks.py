"""Other ways to trace a model that torch.export does not follow as it stands, each tried only then.

| what stands in the way | what is done |
|---|---|
| a list of numbers that is made of a size, the `len` of a tensor | it stays a function of the size (`size_lists`) |
| a look at values that the model's own tensors decide | it is answered with them (`held_choices`) |
| a gradient that it takes of itself, a part that is TorchScript | the operators beneath are traced (`beneath`) |
| a loop over the places where a mask holds | each place has a step (`places`) |
| code that goes through the batch record by record | one record is traced, and the program asks for each (`records`) |

What comes of it is an exported program like any other: it is proven, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from trueline import events
from trueline.bundle.schema import BY_RECORD
from trueline.capture.export.exported import Exported, Fixed
from trueline.capture.export.tracing import tracing
from trueline.capture.model.dynamic_dims import resize_tensor
from trueline.capture.model.signature import BATCH, Calling, TensorModule, as_trained
from trueline.capture.patches import (
    below_python,
    nonzero_loops,
    parameter_branches,
    per_record,
    size_lists,
)
from trueline.errors import CaptureError
from trueline.runtime import compare

BY_RECORDS = f"{BY_RECORD}: `trueline doctor` may show a rewrite that takes a batch at once"
Export = Callable[[torch.nn.Module], Exported]
"""Exports a module that takes flat tensors and gives them."""


@dataclass(frozen=True, slots=True)
class Exporters:
    """The exporter that failed, for another try."""

    whole: Export
    single: Callable[[torch.nn.Module, Calling], torch.export.ExportedProgram]
    """Exports for one record."""


def tried(error: CaptureError, module: torch.nn.Module, calling: Calling, exporters: Exporters) -> Exported | None:
    """The program that another way of tracing gives, after torch.export raised `error`; None when none does."""
    export = exporters.whole
    flat = TensorModule(module, calling)
    listed = isinstance(error, Fixed) and error.symbol != BATCH and size_lists.may_help(module)
    if listed or (isinstance(error, Fixed) and size_lists.counts(module)):
        try:
            with size_lists.kept(module):
                return _told(export(flat), "lists of numbers and lengths stay functions of a size")
        except CaptureError:
            pass  # what is raised is what torch.export said of the model as it stands
    if calling.signature.state:
        return None
    if parameter_branches.may_help(error.message):
        chosen = _chosen(flat, export)
        if chosen is not None:
            return chosen
    found = _all_places(flat, calling, export) if nonzero_loops.may_help(module, error.message) else None
    if found is None and below_python.may_help(module, error.message):
        found = _beneath(flat, calling, export)
    in_rows = all(spec.shape[:1] == (BATCH,) for spec in calling.signature.inputs)
    return found or (_by_records(flat, calling, exporters) if in_rows else None)


def _chosen(flat: TensorModule, export: Export) -> Exported | None:
    """With the choices made that parameters and buffers decide, if there are any."""
    choices = parameter_branches.HeldChoices(flat)
    try:
        with choices:
            found = export(flat)
    except CaptureError as error:
        events.emit("program.unfollowed", by="choices", why=error.message)
        return None
    return _told(found, "what its parameters and buffers decide is decided") if choices.looks else None


def _all_places(flat: TensorModule, calling: Calling, export: Export) -> Exported | None:
    """With a step for each place that a loop over the values' choice could take, if some call leaves one out."""
    if not nonzero_loops.left_out(flat, _small_calls(calling)):
        return None
    try:
        with nonzero_loops.all_of_them(flat):
            return _told(export(flat), "a loop over places that values choose has a step for each place")
    except CaptureError as error:
        events.emit("program.unfollowed", by="places", why=error.message)
        return None


def _small_calls(calling: Calling) -> Iterator[tuple[torch.Tensor, ...]]:
    """The example, one record of it, the least of all that is free, and zeros: of little, not much is chosen."""
    free = [[at for at, size in enumerate(spec.shape) if isinstance(size, str)] for spec in calling.signature.inputs]
    for most in (0, 1, None):
        sizes = [dict.fromkeys(axes[:most], 1) for axes in free]
        tensors = tuple(resize_tensor(tensor, size) for tensor, size in zip(calling.example, sizes, strict=True))
        yield tensors
        yield tuple(torch.zeros_like(tensor) for tensor in tensors)


def _beneath(flat: TensorModule, calling: Calling, export: Export) -> Exported | None:
    """What the operators beneath the model make, where they can be traced with free sizes."""
    try:
        with tracing():
            graph = below_python.graph(flat, calling)
        return _told(export(graph), "traced beneath Python, as the operators that it calls")
    except Exception as error:  # noqa: BLE001 - whatever the tracer raises: what torch.export said of the model counts
        events.emit("program.unfollowed", by="operators", why=f"{type(error).__name__}: {error}")
        return None


def _by_records(flat: TensorModule, calling: Calling, exporters: Exporters) -> Exported | None:
    """A program that asks for each record, if it answers the example as the model does, and one record more."""
    try:
        with size_lists.kept(flat.module):
            by_records = per_record.Records(exporters.single(per_record.Single(flat), calling))
        if not _draws(by_records.program) and not all(_agree(by_records, flat, calling, more) for more in (0, 1)):
            return None  # what the prover would say of it is less than what torch.export said of the model
        return _told(replace(exporters.whole(by_records), how=BY_RECORDS), BY_RECORDS)
    except Exception as error:  # noqa: BLE001 - whatever the exporter raises: what it said of the whole is what counts
        events.emit("program.unfollowed", by="records", why=f"{type(error).__name__}: {error}")
        return None


def _told(exported: Exported, how: str) -> Exported:
    events.emit("program.retraced", how=how)
    return exported


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
            {str(at): tensor.numpy() for at, tensor in enumerate(asked(*(tensor.clone() for tensor in tensors)))}
            for asked in (one, other)
        ]
    return compare.compare(*answers).agrees
