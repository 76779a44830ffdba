"""Does torch.export follow a module, and is what it makes right on every call? If not: at which line, and why.

Values decide, not guards: the program runs without its guards on every recorded call, in the order in which
the eager module was asked, so that a state that was frozen shows too.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._sympy.value_ranges import ValueRanges

from trueline.capture.export import specialization
from trueline.capture.export.silence import quiet
from trueline.capture.export.tracing import followable
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.patches import nonzero_loops as places
from trueline.capture.patches import size_lists
from trueline.doctor import divisible_sizes
from trueline.doctor.recorded_calls import (
    FlatModule,
    RecordedAnswer,
    RecordedCall,
    agree,
    answer_of,
    base_call,
    free_dims,
)
from trueline.doctor.stateful import Memory, make_state_explicit, shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one examination. `reason` is empty when the exported program is right everywhere."""

    reason: str
    places: tuple[SourceLine, ...] = ()
    """Lines of the user's code that may be the cause, the likeliest first."""
    loud: bool = False
    """Whether the exporter itself refused."""
    fixed: tuple[SourceLine, ...] = ()
    """Those of the places that made a constant of a size that varies."""
    program: torch.export.ExportedProgram | None = None
    max_abs_error: float = 0.0
    compared: int = 0
    steps: divisible_sizes.Steps = field(default_factory=dict)
    """Of what a size has to be a multiple, where the module takes no others."""
    memory: Memory | None = None
    """Of a module that remembers: the state that the program takes and gives beside its inputs and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A module's calls with the answers of the original, asked in order of a fresh copy."""

    calls: tuple[RecordedCall, ...]
    answers: tuple[RecordedAnswer, ...]
    forgetful: bool
    """True when the same call is answered the same again: no state."""
    written: tuple[str, ...] = ()
    """Buffers that the calls changed."""

    @property
    def answered(self) -> Sequence[RecordedCall]:
        """The calls that the original answers; all where it answers none."""
        found = [call for call, answer in zip(self.calls, self.answers, strict=True) if answer.arrays is not None]
        return found or self.calls

    @property
    def base(self) -> RecordedCall:
        """The call to export with: one that the original answers."""
        return base_call(self.answered, free_dims(self.calls))

    def partings(self) -> tuple[SourceLine, ...]:
        """Lines at which the ways of two answered calls part, for calls of one size first: those are values."""
        seen: dict[SourceLine, None] = {}
        answered = [(c, a) for c, a in zip(self.calls, self.answers, strict=True) if a.arrays is not None]
        if not answered:
            return ()
        shapes = [tuple(tensor.shape for tensor in call.tensors) for call, _ in answered]
        for same in (True, False):
            for index, (_, answer) in enumerate(answered):
                other = next((i for i in range(index) if (shapes[i] == shapes[index]) is same), None)
                place = None if other is None else code_paths.divergence(answered[other][1].way, answer.way)
                if place is not None:
                    seen[place] = None
        return tuple(seen)


def ask_original(module: torch.nn.Module, calls: Sequence[RecordedCall]) -> Oracle:
    """Asks a copy of `module` each call, watching its way, and the first one again at the end."""
    twin = copy_without_hooks(module)
    before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    answers = [answer_of(twin, call, watch=True) for call in calls]
    again = answer_of(twin, calls[0])
    reason, _ = agree(answers[0], again)
    written = tuple(n for n, b in twin.named_buffers() if n not in before or not torch.equal(b, before[n]))
    return Oracle(calls=tuple(calls), answers=tuple(answers), forgetful=not reason, written=written)


def copy_without_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose hooks are gone: they watch the original. What they compute of the parameters (torch's weight_norm
    keeps the product as a plain attribute) is copied as it is."""
    computed = [
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    twin = copy.deepcopy(module, {id(value): value.detach().clone() for value in computed})
    for part in twin.modules():
        part._forward_pre_hooks.clear()
        part._forward_pre_hooks_with_kwargs.clear()
        part._forward_hooks.clear()
    return twin


def examine(module: torch.nn.Module, oracle: Oracle, *, in_units: bool = False) -> Finding:
    """Exports a copy of `module` with the free dimensions of its calls, and compares on all of them.

    A module whose answers depend on earlier calls is exported with its state explicit. `in_units`: sizes may have to be
    multiples of powers of two; then it is compared on the calls that are.
    """
    free = free_dims(oracle.calls)
    base = divisible_sizes.evenest(oracle.answered, free) if in_units else oracle.base
    flat: torch.nn.Module = FlatModule(copy_without_hooks(module), base)
    tensors, memory, steps = base.tensors, None, divisible_sizes.NONE
    if not oracle.forgetful:
        try:
            held = make_state_explicit(copy_without_hooks(module), base)
        except Exception as error:  # noqa: BLE001 (blind except): a rewrite that cannot be called is no rewrite
            return _loud(error, oracle, {})
        if isinstance(held, str):
            return Finding(reason=held)
        if held is not None:
            flat, tensors, memory = held.module, (*base.tensors, *held.state), held.memory
            free = [*free, *held.free]
    fixed: Mapping[int, SourceLine] = {}
    try:
        with specialization.watched() as fixed:
            if in_units and memory is None:
                program, steps = divisible_sizes.export_with_divisors(
                    partial(_program, flat, tensors), free, oracle.calls, base
                )
            else:
                program = _trace_like_capture(flat, tensors, shapes(free), oracle)
    except Exception as error:  # noqa: BLE001 (blind except): whatever the exporter raises is the finding
        return _loud(error, oracle, fixed)
    with torch.no_grad(), silence_exporters():
        run: Callable[..., Any] = _without_ranges(program).module(check_guards=False)
        writes = oracle.written and memory is None
        kept = program.run_decompositions({}).graph_signature.buffers_to_mutate if writes else {}
        run = memory.thread_state(run) if memory is not None else run
        for steps in [*divisible_sizes.guesses(base, free, steps)] if in_units else [steps]:  # noqa: B020 (one after the other)
            reason, worst, compared = compared_with(run, oracle, steps)
            if not reason:
                break
    if not reason and kept:
        reason = f"it writes into its own buffers when it is called ({', '.join(oracle.written)})"
        return Finding(reason=reason, program=program)
    places = oracle.partings() if reason else ()
    return Finding(
        reason=reason,
        places=places,
        program=program,
        max_abs_error=worst,
        compared=compared,
        memory=memory,
        steps=steps,
    )


def of_other_ranks(oracle: Oracle) -> Finding | None:
    """A model whose output has more dimensions on one call than on another: it can be exported, and no bundle holds
    what it answers. None for any other."""
    seen: dict[str, tuple[RecordedCall, RecordedAnswer]] = {}
    for call, answer in zip(oracle.calls, oracle.answers, strict=True):
        for name, array in (answer.arrays or {}).items():
            first, earlier = seen.setdefault(name, (call, answer))
            assert earlier.arrays is not None
            if earlier.arrays[name].ndim != array.ndim:
                shapes = [list(earlier.arrays[name].shape), list(array.shape)]
                sizes = [", ".join(str(list(tensor.shape)) for tensor in one.tensors) for one in (first, call)]
                reason = f"{name} has shape {shapes[0]} for inputs of {sizes[0]} and {shapes[1]} for {sizes[1]}"
                place = code_paths.find_line(answer.way, ".squeeze()")
                advice = ": squeeze() drops a batch of 1 too; name the dimension, as in squeeze(-1)" if place else ""
                return Finding(reason=reason + advice, places=(place,) if place is not None else ())
    return None


def _program(flat: torch.nn.Module, tensors: tuple[torch.Tensor, ...], free: Any) -> torch.export.ExportedProgram:
    with torch.no_grad(), silence_exporters(), followable():
        return torch.export.export(flat, tensors, dynamic_shapes=(free,), strict=False)


def _without_ranges(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without what torch took for its smallest sizes: of what has n / 3 rows it says that n is 4 at least,
    so that there is more than one. A shallow copy: what capture claims of the ranges stays as torch found it."""
    free = copy.copy(program)
    free._range_constraints = {
        symbol: ValueRanges(min(1, span.lower), span.upper) for symbol, span in program.range_constraints.items()
    }
    return free


def _trace_like_capture(
    flat: torch.nn.Module, tensors: tuple[torch.Tensor, ...], free: Any, oracle: Oracle
) -> torch.export.ExportedProgram:
    """As capture traces it: once more where a size was fixed or a loop goes over places that values choose."""
    try:
        return _program(flat, tensors, free)
    except Exception as error:
        if _CONSTANT.search(str(error)) and (size_lists.may_help(flat) or size_lists.counts(flat)):
            kept = size_lists.kept(flat)
        elif places.may_help(flat, str(error)) and places.left_out(flat, (call.tensors for call in oracle.answered)):
            kept = places.all_of_them(flat)
        else:
            raise
        try:
            with kept:
                return _program(flat, tensors, free)
        except Exception:  # noqa: BLE001 (blind except): what torch.export said of the module as it stands is raised
            raise error from None


def compared_with(
    run: Callable[..., Any], oracle: Oracle, steps: divisible_sizes.Steps = divisible_sizes.NONE
) -> tuple[str, float, int]:
    """Why `run`, which takes flat tensors, is not the original; the largest difference; how many calls agree.

    With `steps` only calls are asked whose sizes are such multiples, and two different ones of each have to be.
    """
    worst, compared = 0.0, 0
    seen: dict[divisible_sizes.Place, set[int]] = {place: set() for place in steps}
    for call, expected in zip(oracle.calls, oracle.answers, strict=True):
        if expected.arrays is None or not divisible_sizes.within(call, steps):
            continue
        found = answer_of(run, _flat(call))
        reason, error = agree(expected, found)
        if reason:
            sizes = ", ".join(str(list(tensor.shape)) for tensor in call.tensors)
            return f"for inputs of {sizes}, {reason}", worst, compared
        worst, compared = max(worst, error), compared + 1
        for number, axis in seen:
            seen[number, axis].add(call.tensors[number].shape[axis])
    if any(len(sizes) < divisible_sizes.LEAST for sizes in seen.values()):
        return "it takes a size in multiples only, and no call had another such size", worst, compared
    return ("" if compared else "no call could be compared: the original raises on each"), worst, compared


def _flat(call: RecordedCall) -> RecordedCall:
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten((call.tensors, {}))
    return RecordedCall(tensors=call.tensors, leaves=tuple(... for _ in leaves), spec=spec)


_CONSTANT = re.compile(r"to be a constant \((\d+)\)")


def _loud(error: Exception, oracle: Oracle, fixed: Mapping[int, SourceLine]) -> Finding:
    """`fixed` are the lines that made constants of sizes; the error says which sizes it is about."""
    place = code_paths.users_line(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    partings = oracle.partings()
    sizes = [int(size) for size in _CONSTANT.findall(str(error))]
    places = [place, *partings] if place is not None else [*partings]
    # torch names the dimensions in any order
    constant = tuple(sorted({fixed[size] for size in sizes if size in fixed}, key=lambda one: (one.file, one.line)))
    return Finding(reason=reason, places=tuple(dict.fromkeys([*places, *constant])), loud=True, fixed=constant)


def traces(module: torch.nn.Module, oracle: Oracle) -> bool:
    """Whether torch.jit.trace gives a program that is right on every call."""
    base = oracle.base

    def make() -> Any:
        return torch.jit.trace(FlatModule(copy_without_hooks(module), base), base.tensors, check_trace=False)  # type: ignore[no-untyped-call]

    return _scripted_right(make, oracle, flat=True)


def scripts(module: torch.nn.Module, oracle: Oracle) -> bool:
    """Whether torch.jit.script gives a program that is right on every call."""
    return _scripted_right(lambda: torch.jit.script(copy_without_hooks(module)), oracle, flat=False)


def _scripted_right(make: Callable[[], Any], oracle: Oracle, *, flat: bool) -> bool:
    with silence_exporters(), torch.no_grad():
        try:
            program = make()
        except Exception:  # noqa: BLE001 (blind except): a refusal is the answer, its reason is torch's own
            return False
        if flat:
            return not compared_with(program, oracle)[0]
        answered = [(c, a) for c, a in zip(oracle.calls, oracle.answers, strict=True) if a.arrays is not None]
        return all(not agree(expected, answer_of(program, call))[0] for call, expected in answered)


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """torch's exporters and TorchScript keep their talk to themselves: what matters is in the finding."""
    with quiet(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
