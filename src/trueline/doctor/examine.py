"""Whether torch.export follows a module and its program is right on every call; if not, at which line, and why.

Values decide, not guards: the program runs without its guards on every recorded call, in the order in which the eager
module was called, so that a frozen state shows too.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from trueline.capture.export import torchscript
from trueline.capture.export.tracing import watch_specialization
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.patches.stand_ins import size_lengths
from trueline.capture.proof.disagreement import uses_places_in_order
from trueline.doctor import export
from trueline.doctor.export import NO_DIVISORS, Divisors, Memory, export_module, silence_exporters
from trueline.doctor.recorded_calls import (
    FlatModule,
    RecordedAnswer,
    RecordedCall,
    agree,
    answer_of,
    base_call,
    free_dims,
)
from trueline.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one examination. `reason` is empty when the exported program is right everywhere."""

    reason: str
    places: tuple[SourceLine, ...] = ()
    """Lines of the user's code that may be the cause, the likeliest first."""
    fixed: tuple[SourceLine, ...] = ()
    """Those of the places that made a constant of a size that varies."""
    program: torch.export.ExportedProgram | None = None
    max_abs_error: float = 0.0
    compared: int = 0
    divisors: Divisors = field(default_factory=dict)
    """Of sizes that the module accepts in multiples only."""
    memory: Memory | None = None
    """The state of a module that remembers, which the program takes and returns beside inputs and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A module's calls with the answers of the original, a fresh copy that was called in order."""

    calls: tuple[RecordedCall, ...]
    answers: tuple[RecordedAnswer, ...]
    forgetful: bool
    """Whether a repeated call has the same answer: no state."""
    written: tuple[str, ...] = ()
    """Buffers that the calls changed."""
    refuse: Callable[[torch.nn.Module], tuple[str, SourceLine | None]] | None = None
    """Why capture refuses an edit of the module, and the line: where the module is the whole model."""

    @property
    def pairs(self) -> Iterator[tuple[RecordedCall, RecordedAnswer]]:
        return zip(self.calls, self.answers, strict=True)

    @property
    def answered_pairs(self) -> list[tuple[RecordedCall, RecordedAnswer]]:
        """Calls and answers, without the calls on which the original raises."""
        return [(call, answer) for call, answer in self.pairs if answer.arrays is not None]

    @property
    def answered(self) -> Sequence[RecordedCall]:
        """The calls that the original answers; all where it answers none."""
        return [call for call, _ in self.answered_pairs] or self.calls

    @property
    def base(self) -> RecordedCall:
        """The call to export with: one that the original answers."""
        return base_call(self.answered, free_dims(self.calls))

    def partings(self) -> tuple[SourceLine, ...]:
        """Lines at which the ways of two answered calls part, for calls of one size first: those are values."""
        seen: dict[SourceLine, None] = {}
        answered = self.answered_pairs
        shapes = [tuple(tensor.shape for tensor in call.tensors) for call, _ in answered]
        for same in (True, False):
            for index, (_, answer) in enumerate(answered):
                other = next((i for i in range(index) if (shapes[i] == shapes[index]) is same), None)
                place = None if other is None else code_paths.divergence(answered[other][1].way, answer.way)
                if place is not None:
                    seen[place] = None
        return tuple(seen)


def ask_original(module: torch.nn.Module, calls: Sequence[RecordedCall]) -> Oracle:
    """Makes each call to a copy of `module`, watching its way, and repeats the first one at the end."""
    twin = export.copy_without_hooks(module)
    before = {name: buffer.clone() for name, buffer in twin.named_buffers()}
    answers = [answer_of(twin, call, watch=True) for call in calls]
    reason, _ = agree(answers[0], answer_of(twin, calls[0]))
    answers = _without_accidents(calls, answers)
    written = tuple(n for n, b in twin.named_buffers() if n not in before or not torch.equal(b, before[n]))
    return Oracle(calls=tuple(calls), answers=tuple(answers), forgetful=not reason, written=written)


def _without_accidents(calls: Sequence[RecordedCall], answers: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    """The answers without those of a matrix that has to be square (an adjacency) at sizes 1 and n: torch broadcasts
    `a + a.t()` there, and the module raises at any other two sizes."""
    axes = {
        (i, a, b) for call in calls for i, one in enumerate(call.tensors) for a in range(one.ndim) for b in range(a)
    }
    left = list(answers)
    for i, a, b in axes:
        pairs = [(call.tensors[i].shape[a], call.tensors[i].shape[b]) for call in calls]
        others = [answer for answer, (one, two) in zip(answers, pairs, strict=True) if one != two and min(one, two) > 1]
        alike = [answer for answer, (one, two) in zip(answers, pairs, strict=True) if one == two > 1]
        if others and not any(one.arrays for one in others) and any(one.arrays for one in alike):
            left = [
                answer if one == two else replace(answer, arrays=None, error="a matrix that is not square")
                for answer, (one, two) in zip(left, pairs, strict=True)
            ]
    return left


def examine(module: torch.nn.Module, oracle: Oracle, *, in_units: bool = False) -> Finding:
    """Exports a copy of `module` with the free dimensions of its calls, and compares on all of them.

    A module whose answers depend on earlier calls is exported with its state explicit. `in_units`: sizes may have to be
    multiples of powers of two; then it is compared on the calls that are.
    """
    free = free_dims(oracle.calls)
    base = export.evenest(oracle.answered, free) if in_units else oracle.base
    flat: torch.nn.Module = FlatModule(export.copy_without_hooks(module), base)
    tensors, memory, divisors = base.tensors, None, NO_DIVISORS
    if not oracle.forgetful:
        try:
            held = export.make_state_explicit(export.copy_without_hooks(module), base)
        except Exception as error:  # noqa: BLE001 (blind except): a rewrite that cannot be called is no rewrite
            return _refusal(error, oracle, {})
        if isinstance(held, str):
            return Finding(reason=held)
        if held is not None:
            flat, tensors, memory = held.module, (*base.tensors, *held.state), held.memory
            free = [*free, *held.free]
    fixed: Mapping[int, SourceLine] = {}
    try:
        with watch_specialization() as fixed:
            if in_units and memory is None:
                program, divisors = export.export_with_divisors(
                    partial(export_module, flat, tensors), free, oracle.calls
                )
            else:
                program = export.export_like_capture(flat, tensors, export.all_sizes(free), oracle.answered)
    except Exception as error:  # noqa: BLE001 (blind except): whatever the exporter raises is the finding
        return _refusal(error, oracle, fixed)
    guesses = [*export.guess_divisors(base, free, divisors)] if in_units else [divisors]
    found = _compare(program, oracle, memory, guesses)
    # a length that Python makes a number of has rewrites of its own
    slices = size_lengths.makes_slices(flat) and not size_lengths.may_help(flat)
    if found.reason and memory is None and not in_units and slices:
        found = _compare_free_slices(flat, tensors, free, oracle) or found
    if found.reason or found.divisors or memory is not None or oracle.refuse is None:
        return found
    refused, place = oracle.refuse(export.copy_without_hooks(module))
    return replace(found, reason=refused, places=(*filter(None, [place]), *oracle.partings())) if refused else found


def _compare_free_slices(
    flat: torch.nn.Module, tensors: tuple[torch.Tensor, ...], free: Sequence[set[int]], oracle: Oracle
) -> Finding | None:
    """The finding where slices leave sizes free on both sides of their ends, as capture has them; None where that
    program is not right either."""
    with contextlib.suppress(Exception), size_lengths.keep_lengths_free(flat):
        found = _compare(export.export_module(flat, tensors, export.all_sizes(free)), oracle, None, [NO_DIVISORS])
        return None if found.reason else found
    return None


def _compare(
    program: torch.export.ExportedProgram, oracle: Oracle, memory: Memory | None, guesses: Sequence[Divisors]
) -> Finding:
    """The finding for the first of the guessed divisors with which the program is right, else for the last."""
    with torch.no_grad(), silence_exporters():
        run: Callable[..., Any] = export.without_ranges(program).module(check_guards=False)
        writes = oracle.written and memory is None
        kept = program.run_decompositions({}).graph_signature.buffers_to_mutate if writes else {}
        run = memory.thread_state(run) if memory is not None else run
        for divisors in guesses:
            reason, worst, compared = _compare_calls(run, oracle, divisors)
            if not reason:
                break
    if not reason and kept:
        reason = f"it writes into its own buffers when it is called ({', '.join(oracle.written)})"
        return Finding(reason=reason, program=program)
    finding = Finding(
        reason=reason,
        places=oracle.partings() if reason else (),
        program=program,
        max_abs_error=worst,
        compared=compared,
        memory=memory,
        divisors=divisors,
    )
    refused, place = ("", None) if reason else export.find_refusal(program)
    # of equal values ONNX takes others first, which these calls need not show
    if not refused or (not uses_places_in_order(program) and prove_onnx(finding, oracle) == "proven"):
        return finding
    return replace(finding, reason=refused, places=(place,) if place is not None else oracle.partings())


def find_rank_change(oracle: Oracle) -> Finding | None:
    """A model whose output has more dimensions on one call than on another: it can be exported, but no bundle holds
    such answers. None for any other."""
    seen: dict[str, tuple[RecordedCall, RecordedAnswer]] = {}
    for call, answer in oracle.answered_pairs:
        for name, array in (answer.arrays or {}).items():
            first, earlier = seen.setdefault(name, (call, answer))
            assert earlier.arrays is not None
            if earlier.arrays[name].ndim != array.ndim:
                shapes = [list(earlier.arrays[name].shape), list(array.shape)]
                reason = f"{name} has shape {shapes[0]} for inputs of {first.sizes} and {shapes[1]} for {call.sizes}"
                place = code_paths.find_line(answer.way, ".squeeze()")
                advice = ": squeeze() drops a batch of 1 too; name the dimension, as in squeeze(-1)" if place else ""
                return Finding(reason=reason + advice, places=(place,) if place is not None else ())
    return None


def _compare_calls(run: Callable[..., Any], oracle: Oracle, divisors: Divisors = NO_DIVISORS) -> tuple[str, float, int]:
    """Why `run`, which takes flat tensors, is not the original; the largest difference; how many calls agree.

    With `divisors` only calls of such sizes are compared, and two different sizes of each dimension have to be.
    """
    worst, compared = 0.0, 0
    seen: dict[export.Axis, set[int]] = {place: set() for place in divisors}
    for call, expected in oracle.answered_pairs:
        if not export.is_divisible(call, divisors):
            continue
        leaves, spec = pytree.tree_flatten((call.tensors, {}))
        flat = RecordedCall(tensors=call.tensors, leaves=tuple(... for _ in leaves), spec=spec)
        reason, error = agree(expected, answer_of(run, flat))
        if reason:
            return f"for inputs of {call.sizes}, {reason}", worst, compared
        worst, compared = max(worst, error), compared + 1
        for number, axis in seen:
            seen[number, axis].add(call.tensors[number].shape[axis])
    if any(len(sizes) < export.LEAST_SIZES for sizes in seen.values()):
        return "it accepts a size in multiples only, and no other call had such a size", worst, compared
    return ("" if compared else "no call could be compared: the original raises on each"), worst, compared


def _refusal(error: Exception, oracle: Oracle, fixed: Mapping[int, SourceLine]) -> Finding:
    """`fixed` are the lines that made constants of sizes; the error names the sizes that it is about."""
    place = code_paths.users_line(error)
    partings = oracle.partings()
    sizes = [int(size) for size in export.CONSTANT.findall(str(error))]
    places = [place, *partings] if place is not None else [*partings]
    # torch names the dimensions in any order
    constant = tuple(sorted({fixed[size] for size in sizes if size in fixed}, key=lambda one: (one.file, one.line)))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return Finding(reason=reason, places=tuple(dict.fromkeys([*places, *constant])), fixed=constant)


def traces(module: torch.nn.Module, oracle: Oracle) -> bool:
    """Whether torch.jit.trace gives a program that is right on every call."""
    base = oracle.base
    with silence_exporters(), torch.no_grad():
        try:
            flat = FlatModule(export.copy_without_hooks(module), base)
            program = torchscript.trace(flat, base.tensors, strict=True)
        except Exception:  # noqa: BLE001 (blind except): torch's refusal is the answer
            return False
        return not _compare_calls(program, oracle)[0]


def scripts(module: torch.nn.Module, oracle: Oracle) -> bool:
    """Whether torch.jit.script gives a program that is right on every call."""
    with silence_exporters(), torch.no_grad():
        try:
            program = torch.jit.script(export.copy_without_hooks(module))
        except Exception:  # noqa: BLE001 (blind except): torch's refusal is the answer
            return False
        return all(not agree(expected, answer_of(program, call))[0] for call, expected in oracle.answered_pairs)


def prove_onnx(finding: Finding, oracle: Oracle) -> str:
    """`proven`, or why the program has no ONNX form that is right: translated, run by ONNX Runtime, compared on every
    call. Raises nothing."""
    import onnxruntime

    from trueline.capture.onnx import emit

    assert finding.program is not None
    if not oracle.forgetful and finding.memory is None:
        return "ONNX cannot hold the state"
    signature = finding.program.graph_signature
    inputs = [f"input {i}" for i in range(len(signature.user_inputs))]
    outputs = [f"output {i}" for i in range(len(signature.user_outputs))]
    try:
        with torch.no_grad(), silence_exporters(), contextlib.redirect_stderr(io.StringIO()):
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            model = emit.translate(finding.program, inputs, outputs).model_proto.SerializeToString()
            session = onnxruntime.InferenceSession(model, options)
    except CaptureError as error:
        return f"not translated: {error.message[:200]}"
    except Exception as error:  # noqa: BLE001 (blind except): a refusal of the exporter or the runtime is the answer
        return f"not translated: {_first_line(error.__cause__ or error)}"
    names = [spec.name for spec in session.get_inputs()]

    def run(*tensors: Any) -> Any:
        return session.run(None, {name: np.asarray(one) for name, one in zip(names, tensors, strict=False)})

    ask = run if finding.memory is None else finding.memory.thread_state(run)
    for call, expected in oracle.answered_pairs:
        if not export.is_divisible(call, finding.divisors):
            continue
        try:
            arrays = {f"output {index}": array for index, array in enumerate(ask(*call.tensors))}
        except Exception as error:  # noqa: BLE001 (blind except): whatever the runtime raises is a disagreement
            return f"refused: it raises {_first_line(error)}"
        reason, _ = agree(expected, RecordedAnswer(arrays=arrays, error=""))
        if reason:
            return f"refused: {reason}"
    return "proven"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
