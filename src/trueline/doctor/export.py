"""Exports a module as capture does, in two special forms too: as a function of its state, and in units of its sizes.

State: a module whose answers depend on earlier calls is exported with its state as input and output. The calls are made
in their order, and the state after one call goes into the next, so a state that is dropped, frozen or mixed up shows.

Units: a module that accepts a size in multiples only (`if height % 2 == 0` along a stack of strides) and that
torch.export can follow for one size only is exported again in units, on a call whose sizes have many factors of two,
and compared on the calls that are such multiples. See `runtime.multiples`.
"""

import contextlib
import copy
import io
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._sympy.value_ranges import ValueRanges

from trueline.bundle.describe import range_text
from trueline.capture import larger_trace, size_limits
from trueline.capture.export import operators, torch_export
from trueline.capture.export.fallbacks import MAX_UNIT, largest_unit
from trueline.capture.export.tracing import apply_patches, quiet
from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.arguments import Arguments
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import GIVEN, NEXT, Explicit
from trueline.capture.patches import nonzero_loops
from trueline.capture.patches.stand_ins import size_lengths
from trueline.capture.proof.far_sizes import FarSizes
from trueline.doctor.recorded_calls import RecordedCall, flat_answer
from trueline.errors import CaptureError, first_line

Axis = tuple[int, int]
"""Number of a tensor, and one of its dimensions."""
Divisors = Mapping[Axis, int]
"""The number of which the size of each of these dimensions is a multiple; all other sizes are free."""
NO_DIVISORS: Divisors = MappingProxyType({})
LARGE = 64 << 20
LEAST_SIZES = 2
"""Different sizes of each dimension with a divisor that a proof needs."""
CONSTANT = re.compile(r"to be a constant \((\d+)\)")
_CONSTANT_AT = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but .* be a constant \((\d+)\)")


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """Silences torch's exporters and TorchScript; their errors are in the finding."""
    with quiet(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def copy_without_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """A copy without hooks, which watch the original. Tensors that hooks compute from parameters (torch's weight_norm
    keeps the product in an attribute) are copied as they are. Raises CaptureError, with the attribute, for a model that
    has no copy."""
    computed = [
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    try:
        twin = copy.deepcopy(module, {id(value): value.detach().clone() for value in computed})
    except Exception as error:
        named = f" ({kept})" if (kept := _find_uncopied(module)) else ""
        raise CaptureError(
            f"the model cannot be copied, and a rewrite is tried on copies{named}: {first_line(error)}",
            hint="a generator, a lock or an open file has no copy: keep a number or a tensor, or make it in forward",
        ) from error
    for part in twin.modules():
        part._forward_pre_hooks.clear()
        part._forward_pre_hooks_with_kwargs.clear()
        part._forward_hooks.clear()
    return twin


def _find_uncopied(module: torch.nn.Module) -> str:
    """The first attribute of a part that has no copy."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_"):
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # noqa: BLE001 - whatever the user's object raises
                return f"{path}.{name}" if path else name
    return ""


def export_module(
    flat: torch.nn.Module, tensors: tuple[torch.Tensor, ...], free: tuple[dict[int, Any], ...]
) -> torch.export.ExportedProgram:
    """The program; `free` in the form that torch.export takes. Raises what it raises."""
    with torch.no_grad(), silence_exporters(), apply_patches():
        return torch.export.export(flat, tensors, dynamic_shapes=(free,), strict=False)


def export_like_capture(
    flat: torch.nn.Module,
    tensors: tuple[torch.Tensor, ...],
    free: tuple[dict[int, Any], ...],
    answered: Iterable[RecordedCall],
) -> torch.export.ExportedProgram:
    """As capture traces it: once more where a size was fixed, or a loop runs over indices that values choose."""
    try:
        return export_module(flat, tensors, free)
    except Exception as error:
        of_sizes = CONSTANT.search(str(error)) is not None or size_lengths.is_cause(str(error))
        if of_sizes and (size_lengths.may_help(flat) or size_lengths.makes_slices(flat)):
            patch = size_lengths.keep_lengths_free(flat)
        elif nonzero_loops.may_help(flat, str(error)) and nonzero_loops.leave_places_out(
            flat, (call.tensors for call in answered)
        ):
            patch = nonzero_loops.trace_all_places(flat)
        else:
            raise
        with contextlib.suppress(Exception), patch:
            return export_module(flat, tensors, free)
        raise  # the error about the module without the patch


def without_ranges(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A shallow copy without torch's lower bounds of sizes: for n / 3 rows it assumes n >= 4, so that there is more
    than one. The original keeps its ranges, on which capture bases its claims."""
    free = copy.copy(program)
    free._range_constraints = {
        symbol: ValueRanges(min(1, span.lower), span.upper) for symbol, span in program.range_constraints.items()
    }
    return free


def find_refusal(program: torch.export.ExportedProgram) -> tuple[str, SourceLine | None]:
    """Why a bundle cannot hold the program, and the user's line; empty where it can. Weights above LARGE bytes are not
    written for it."""
    weights = [*program.state_dict.values(), *program.constants.values()]
    if sum(one.nbytes for one in weights if isinstance(one, torch.Tensor)) > LARGE:
        return "", None
    with tempfile.TemporaryDirectory(prefix="trueline-doctor-") as folder, silence_exporters():
        try:
            torch_export.save(operators.as_aten(program), Path(folder) / "model.pt2")
        except CaptureError as error:
            return error.message.replace(f"{folder}/", ""), operators.line_of(program, error.message)
        except Exception as error:  # noqa: BLE001 (blind except): whatever torch raises of a program is the reason
            return f"torch cannot decompose the program: {first_line(error)}", None
    return "", None


def ask_capture(eager: EagerSession, module: torch.nn.Module) -> tuple[str, SourceLine | None]:
    """Why capture makes no graph of `module`, an edit of `eager`'s own, that takes all of the user's examples, and the
    user's line; empty where it makes one. A model that keeps something between calls is not asked about."""
    if eager.signature.state or eager.recall.find_changed():
        return "", None
    try:
        with torch.no_grad(), silence_exporters():
            exported = torch_export.export(module, eager.calling)
    except CaptureError as error:
        cause = error.__cause__
        return error.message, code_paths.users_line(cause) if isinstance(cause, Exception) else None
    left_out = size_limits.find_excluded(exported.signature, eager.calling)
    if left_out:  # as capture does: another size may be traced for more
        far, calling = FarSizes(eager), eager.calling
        settled = size_limits.settle(far, exported)
        exported = larger_trace.widen(far, settled, lambda sizes: torch_export.export_at(module, calling, sizes))
        left_out = size_limits.find_excluded(exported.signature, calling)
    if left_out:
        return f"capture's program holds for {range_text(exported.signature)} only, which leaves out {left_out}", None
    return "", None


def all_sizes(free: Sequence[set[int]]) -> tuple[dict[int, Any], ...]:
    """The free dimensions in the form that torch.export takes."""
    return tuple(dict.fromkeys(sorted(axes), torch.export.Dim.DYNAMIC) for axes in free)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """The state that a module begins with, by the names of its buffers."""

    names: tuple[str, ...]
    initial: tuple[torch.Tensor, ...]

    def thread_state(self, run: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """`run`, which takes the state after its inputs and returns it after its answers, with the state inside."""
        held = list(self.initial)

        def run_once(*tensors: Any) -> tuple[Any, ...]:
            answer = tuple(run(*tensors, *held))
            held[:] = answer[len(answer) - len(held) :]
            return answer[: len(answer) - len(held)]

        return run_once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Remembered:
    """A module as a function of its state, and the values to export it with."""

    module: torch.nn.Module
    state: tuple[torch.Tensor, ...]
    free: tuple[set[int], ...]
    """For each part of the state the dimensions that vary: with the batch, or because it grows."""
    memory: Memory


def make_state_explicit(module: torch.nn.Module, base: RecordedCall) -> Remembered | str | None:
    """`module` (a copy that may be changed) with the buffers explicit that the call `base` writes; None where it writes
    none, and the reason where they change their form."""
    asked = Arguments(*base.arguments(base.tensors))
    try:
        lifted = explicit_state.lift_state(module, [asked])
    except CaptureError as error:
        return error.message
    if lifted is None:
        return None
    given = explicit_state.with_state(lifted, asked).kwargs
    axes = [(lifted.records.get(name), lifted.grows.get(name)) for name in lifted.names]
    return Remembered(
        module=FlatStateModule(lifted, base),
        state=tuple(given[GIVEN + name].clone() for name in lifted.names),
        free=tuple({axis for axis in pair if axis is not None} for pair in axes),
        memory=Memory(names=lifted.names, initial=tuple(value.clone() for value in lifted.initial.values())),
    )


class FlatStateModule(torch.nn.Module):
    """An Explicit with a call's tensors and then the state in, and the tensors of its answer and then the state out."""

    def __init__(self, module: Explicit, like: RecordedCall) -> None:
        super().__init__()
        self.module = module
        self.like = like

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.like.tensors)
        args, kwargs = self.like.arguments(tensors[:count])
        state = {GIVEN + name: given for name, given in zip(self.module.names, tensors[count:], strict=True)}
        answer, left = self.module(*args, **kwargs, **state)
        return (*flat_answer(answer), *(left[NEXT + name] for name in self.module.names))


def export_with_divisors(
    export: Callable[[tuple[dict[int, Any], ...]], torch.export.ExportedProgram],
    free: Sequence[set[int]],
    calls: Sequence[RecordedCall],
) -> tuple[torch.export.ExportedProgram, Divisors]:
    """The program, in units where torch fixes a size, and the divisors of these sizes.

    `export` takes the free dimensions in torch.export's form. Raises what it raises, when no units free them.
    """
    divisors: dict[Axis, int] = {}
    while True:
        try:
            return export(_in_units(free, divisors, calls)), divisors
        except Exception as error:
            fixed = {(int(i), int(axis)): int(size) for i, axis, size in _CONSTANT_AT.findall(str(error))}
            new = {place: largest_unit(size) for place, size in fixed.items() if place not in divisors}
            if not new or any(divisor < 2 or axis == 0 for (_, axis), divisor in new.items()):
                raise
            divisors |= new


def guess_divisors(base: RecordedCall, free: Sequence[set[int]], divisors: Divisors) -> Iterator[Divisors]:
    """What the program of `base`, which needs `divisors`, may need beside them: powers of two, the least first.

    A branch on whether a size is even fixes no size, and the program is wrong for odd ones.
    """
    sizes = {(i, axis): base.tensors[i].shape[axis] for i, axes in enumerate(free) for axis in axes if axis}
    before: Divisors | None = None
    power = 1
    while power <= MAX_UNIT:
        more = {place: min(power, size & -size) for place, size in sizes.items() if size}
        guess = {place: divisor for place, divisor in {**more, **divisors}.items() if divisor > 1}
        if guess != before:
            yield guess
        before, power = guess, 2 * power


def _in_units(
    free: Sequence[set[int]], divisors: Divisors, calls: Sequence[RecordedCall]
) -> tuple[dict[int, Any], ...]:
    """The free dimensions in torch.export's form; those whose sizes are equal in all calls share a unit."""
    units: dict[tuple[int, ...], Any] = {}
    shapes = all_sizes(free)
    for number, axis in ((number, axis) for number, axes in enumerate(free) for axis in sorted(axes)):
        divisor = divisors.get((number, axis))
        if divisor is not None:
            sizes = tuple(call.tensors[number].shape[axis] for call in calls)
            shapes[number][axis] = divisor * units.setdefault(sizes, torch.export.Dim(f"units_{number}_{axis}"))
    return shapes


def evenest(calls: Sequence[RecordedCall], free: Sequence[set[int]]) -> RecordedCall:
    """The call whose free sizes, without the first of a tensor, have the most factors of two."""

    def score(call: RecordedCall) -> int:
        pairs = zip(call.tensors, free, strict=False)
        return min((largest_unit(tensor.shape[axis]) for tensor, axes in pairs for axis in axes if axis), default=0)

    return max(calls, key=score)


def is_divisible(call: RecordedCall, divisors: Divisors) -> bool:
    """Whether the sizes of the call are multiples of `divisors`."""
    return all(call.tensors[number].shape[axis] % divisor == 0 for (number, axis), divisor in divisors.items())
