"""Numbers that code takes out of tensors, and what they decide: a trace freezes it where no probe changes it.

torch.export raises where a value decides, but for code that runs outside of a trace alone (`if not
torch.compiler.is_exporting()`), or that catches what a trace raises. What is decided there is in no guard.
"""

import ast
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trueline.bundle.signature import Array, Signature
from trueline.capture.export.exported import Exported
from trueline.capture.export.traced_lines import find_followed, find_structured, find_traced
from trueline.capture.model import code_paths, dispatch, fixed_inputs
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.explicit_state import Explicit
from trueline.capture.model.fixed_inputs import FixedInputs
from trueline.capture.model.syntax import decides, find_deciding, is_looked_up, nodes_of, spans, tests_of
from trueline.capture.patches import distribution_checks
from trueline.capture.proof import limits
from trueline.capture.proof.careful import Careful
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.state import taken_numbers
from trueline.capture.proof.state.taken_numbers import Outcomes, marking_casts
from trueline.capture.proof.value_probes import plant
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.compare import compare
from trueline.runtime.tensors import to_arrays, to_tensors

_T = torch.Tensor
TAKES = frozenset(
    getattr(_T, name)
    for name in ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "__array__")
) | {_T.is_nonzero, _T.equal, _T.allclose, torch.is_nonzero, torch.equal, torch.allclose}
WHOLE = frozenset(
    getattr(_T, name)
    for name in ("__contains__", "__dlpack__", "__repr__", "__format__", "__reduce_ex__", "data_ptr", "storage")
) | {_T.untyped_storage}  # these give away all numbers of a tensor
ARRAYS = frozenset({_T.numpy, _T.__array__, _T.__dlpack__, _T.data_ptr})
"""What is computed of these has no operators: neither a trace nor a watch can tell what it decides."""
UNFOLLOWED = "the model decides by a value there that a trace does not see, and no probe decides otherwise"
CHECKS = frozenset({torch._assert_async})
"""TorchScript leaves these out, since nothing follows from them."""


class _ReadWatch(TorchFunctionMode):
    """Notes the place in the user's code of each number that is taken, and the number; also in torch's `layers`."""

    layers = True
    structured: Collection[SourceLine] = ()
    """Lines of loops and branches that torch runs by itself: what decides there is in the program."""

    def __init__(self, functions: Collection[Any] = TAKES | WHOLE, fixed: FixedInputs | None = None) -> None:
        super().__init__()
        self.taken: dict[Place, set[str]] = {}
        self.arrays: dict[Place, None] = {}
        self._functions, self._fixed = functions, fixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._functions and args and self.follows(args[0]):
            place = _find_place(layers=self.layers, structured=self.structured)
            if place is not None:
                key = _value_key(result if func in TAKES else args[0].detach().numpy())
                self.taken.setdefault(place, set()).add(key)
                self.arrays |= {place: None} if func in ARRAYS else {}
        return result

    def follows(self, tensor: Any) -> bool:
        """Whether what is taken out of `tensor` counts."""
        return isinstance(tensor, torch.Tensor) and not (self._fixed and self._fixed.hold(tensor))


Place = tuple[SourceLine, int]
"""A line of the user's code, and the instruction that runs."""


def _find_place(layers: bool = True, structured: Collection[SourceLine] = ()) -> Place | None:
    """The innermost of this thread; None where Trueline's own code is nearer, or, unless `layers`, torch's layers or a
    check that the exported program has too; also where one of torch's loops and branches, on the lines `structured`,
    takes the number."""
    frame, inside = sys._getframe(1), False
    while frame is not None and not code_paths.is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OWN) and frame.f_code.co_filename not in _HERE:
            return None
        if not layers and ("/torch/nn/" in frame.f_code.co_filename or distribution_checks.is_check(frame.f_code)):
            return None
        inside = inside or "/torch/_higher_order_ops/" in frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    place = None if frame is None else (code_paths.line_at(frame), frame.f_lasti)
    return None if place is not None and inside and place[0] in structured else place


_OWN = str(Path(__file__).parents[1])
_HERE = (__file__, dispatch.__file__, fixed_inputs.__file__, taken_numbers.__file__)


def _value_key(result: Any) -> str:
    """Distinguishes one number from another; of many numbers, which there are, not how many."""
    if isinstance(result, np.ndarray):
        return str(np.unique(result).tolist())
    return str(sorted({repr(one) for one in np.ravel(result).tolist()})) if isinstance(result, list) else repr(result)


def find_unvaried(
    eager: EagerSession, observations: Sequence[Observation], claim: Signature, compiled: Collection[str] = ()
) -> SourceLine | None:
    """The first line where a number out of a tensor was the same on all probes, or decided the same on all; not one of
    an input that `claim` holds at one value. Code of the classes `compiled` is not traced, and does not count."""
    fixed = FixedInputs(eager, claim)
    watch = _ReadWatch(fixed=fixed)
    with taken_numbers.watch_threads() as threads:
        for seen in observations:
            if seen.outputs is not None:
                with watch:
                    fixed.run(seen.probe.inputs)
    if threads:
        return threads[0]
    taken = {at: values for at, values in watch.taken.items() if not _is_compiled(at[0], compiled)}
    for (place, at), values in taken.items():
        if len(values) < 2 or (place, at) in watch.arrays:
            return place
    undecided = _find_undecided(taken, _ways(observations))
    if undecided is not None or not taken:
        return undecided
    untested = _find_untested(
        _MarkedReads(eager, (), fixed), [seen for seen in observations if seen.outputs is not None]
    )
    return next((place for place in untested if not _is_compiled(place, compiled)), None)


def find_check(eager: EagerSession) -> SourceLine | None:
    """The first line that checks values where TorchScript does not."""
    watch = _ReadWatch(CHECKS)
    with watch:
        eager.run(eager.example)
    return next((place for place, _ in watch.taken), None)


def _find_undecided(
    taken: Collection[Place],
    ways: Sequence[Sequence[Event]],
    sizes: Collection[Place] = (),
    traced: Collection[SourceLine] | None = None,
) -> SourceLine | None:
    """The first line that a number taken at one of these places decides, and that goes one way on all probes, or where
    it is looked up. At `sizes` only the size of a tensor is known by then; `traced` are lines of operators that the
    exported program has, where there is one: how many numbers a list has is in its guards."""
    for at in taken:
        place = at[0]
        lines = frozenset(one.line for one in traced or () if one.file == place.file)
        if at not in sizes and is_looked_up(place.file, place.line, lines):
            return place
        for line in find_deciding(place.file, place.line, lists=traced is None or at in sizes):
            if _is_one_sided(ways, place.file, line):
                return SourceLine(file=place.file, line=line)
    return None


def find_unfollowed(eager: EagerSession, observations: Sequence[Observation], exported: Exported) -> SourceLine | None:
    """The first line where the eager model decides by a value, the same on all probes, of which the exported program
    knows nothing. A check that raises counts if no value outside of the claim makes it raise."""
    if isinstance(eager.module, Explicit):
        return None
    watch = _FollowedReads(eager, find_followed(exported), structured=find_structured(exported))
    answered = [seen for seen in observations if seen.outputs is not None]
    for number, seen in enumerate(answered):
        watch.run(seen.probe.inputs)
        if not number and not watch.taken:
            return None
    checks = [at for at in watch.taken if _only_checks(at[0])]
    if any(len(watch.taken[at]) < 2 for at in checks):
        with code_paths.watch(ends=True), Careful(), limits.bounded_memory(limits.MEMORY_BYTES[-1]):
            for inputs in _make_outer(eager, exported):
                watch.run(inputs)
    arrays = {at for at in watch.arrays if at[0] not in exported.arrays}
    unvaried = next((at[0] for at, values in watch.taken.items() if len(values) < 2 or at in arrays), None)
    decisive = [at for at in watch.taken if at not in checks]
    undecided = unvaried or _find_undecided(decisive, _ways(answered), watch.sizes, find_traced(exported))
    if undecided is not None or not watch.taken:
        return undecided
    return next(iter(_find_untested(_MarkedReads(eager, watch.known, structured=watch.structured), answered)), None)


def _make_outer(eager: EagerSession, exported: Exported) -> Iterator[Mapping[str, Array]]:
    """The example with values at the ends of its dtypes, and beyond what is claimed."""
    example = eager.example
    for spec in exported.signature.inputs:
        array, (low, high) = example[spec.name], spec.values.bounds(exported.signature.sizes(example))
        kind: Any = array.dtype
        if array.dtype.kind == "f":
            values: list[float] = [np.nan, np.inf, -np.inf, float(np.finfo(kind).max), float(np.finfo(kind).min), 0.0]
        elif array.dtype.kind in "iu":
            ends = np.iinfo(kind)
            beyond = [-1, 0, *([] if low is None else [low - 1]), *([] if high is None else [high + 1])]
            values = [ends.min, ends.max, *(one for one in beyond if ends.min <= one <= ends.max)]
        else:
            values = [0, 1]
        for value in values if array.size else ():
            for changed in (plant(array, value), np.full_like(array, value)):
                yield {**example, spec.name: changed}


class _FollowedReads(_ReadWatch):
    """Notes what is taken out of tensors that follow from the inputs' values, but on lines of `known` and of libraries:
    transformers takes a shortcut where no token is masked, and asks twice what cannot be otherwise."""

    layers = False  # a layer of torch that takes the sizes of packed records keeps them to itself

    def __init__(
        self,
        eager: EagerSession,
        known: Collection[SourceLine],
        fixed: FixedInputs | None = None,
        structured: Collection[SourceLine] = (),
    ) -> None:
        super().__init__(fixed=fixed)
        self.eager, self.known, self.structured = eager, known, structured
        self._memory: dict[int, torch.UntypedStorage | torch.Tensor] = {}
        self.sizes: set[Place] = set()

    def run(self, inputs: Mapping[str, Array]) -> tuple[torch.Tensor, ...] | None:
        """Returns the answer; None where the model raises."""
        eager, answer, self._memory = self.eager, None, {}
        tensors = to_tensors(eager.signature, inputs)
        for tensor in tensors:
            self.follow(tensor)
        fixed = nullcontext() if self._fixed is None else self._fixed.following(tensors)
        with suppress(Exception), torch.no_grad(), as_trained(), fixed, _Follow(self), self:
            answer = eager.calling.call(eager.module, tensors)
        self.taken = {at: values for at, values in self.taken.items() if not code_paths.is_installed(at[0].file)}
        return answer

    def follow(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            memory = tensor.untyped_storage()
            self._memory[memory._cdata] = memory
        else:  # a sparse tensor has no memory of its own
            self._memory[id(tensor)] = tensor

    def follows(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        strided = tensor.layout is torch.strided
        return (tensor.untyped_storage()._cdata if strided else id(tensor)) in self._memory

    def note(self, result: Any, *, size: bool = False) -> None:
        place = _find_place(layers=False, structured=self.structured)
        if place is not None and place[0] not in self.known:
            self.taken.setdefault(place, set()).add(repr(result))
            self.sizes |= {place} if size else set()


class _MarkedReads(_FollowedReads):
    """Gives away numbers that note what they decide."""

    def __init__(
        self,
        eager: EagerSession,
        known: Collection[SourceLine],
        fixed: FixedInputs | None = None,
        structured: Collection[SourceLine] = (),
    ) -> None:
        super().__init__(eager, known, fixed, structured)
        self.outcomes = Outcomes()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = func in (_T.item, _T.tolist) and self.counts(args[0])
        return self.outcomes.mark(result) if given else result

    def counts(self, tensor: torch.Tensor) -> bool:
        place = _find_place(layers=False, structured=self.structured) if self.follows(tensor) else None
        return place is not None and place[0] not in self.known and not code_paths.is_installed(place[0].file)


def _find_untested(reads: _MarkedReads, answered: Sequence[Observation]) -> Iterator[SourceLine]:
    """The lines, of whatever function, where a number has the same outcome on all probes. None where the model answers
    otherwise with numbers that note it (`type(count) is int`)."""
    with marking_casts(_ways(answered), reads.outcomes, reads.counts):
        for seen in answered:
            answer = reads.run(seen.probe.inputs)
            if answer is None or not compare(seen.outputs or {}, to_arrays(reads.eager.signature, answer)).agrees:
                return iter(())
    return reads.outcomes.find_one_sided()


class _Follow(OperatorMode):  # type: ignore[no-untyped-call]
    """Follows tensors through torch's operators."""

    def __init__(self, reads: _FollowedReads) -> None:
        super().__init__()
        self._reads = reads

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__.startswith(_OF_SIZES) or not any(
            map(self._reads.follows, tree_leaves((args, kwargs)))
        ):
            return result
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._reads.follow(args[0])
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._reads.follow(leaf)
            elif leaf is not None:
                self._reads.note(leaf)
        if torch.Tag.dynamic_output_shape in func.tags and not _has_known_size(func, args, kwargs, result):
            self._reads.note([one.shape for one in tree_leaves(result) if isinstance(one, torch.Tensor)], size=True)
        return result


def _has_known_size(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether no value decided the size: an index without a mask; a count of numbers that is as long as the code says,
    where programs refuse larger ones."""
    if func is torch.ops.aten.index.Tensor:
        return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    return func is torch.ops.aten.bincount.default and result.shape[0] == least


_OF_SIZES = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "sym_")


def _only_checks(place: SourceLine) -> bool:
    """Whether what is taken there decides nothing but whether the model raises."""
    lines = {place.line, *find_deciding(place.file, place.line)}
    tests = [
        node for node in nodes_of(place.file) for test in tests_of(node) if any(spans(test, line) for line in lines)
    ]
    return bool(tests) and not any(decides(node, line) for node in tests for line in lines)


def find_one_sided(
    eager: EagerSession, places: Sequence[SourceLine], observations: Sequence[Observation]
) -> SourceLine | None:
    """The first of `places`, where a trace froze a size, that decides and where all answered probes went the same way,
    or where nothing tells what becomes of the size; a check that raises does not count."""
    ways, watch = _ways(observations), _ReadWatch()
    with watch:
        eager.run(eager.example)
    values = {line for line, _ in watch.taken}
    for place in places:
        decisive = any(decides(node, place.line) for node in nodes_of(place.file))
        unknown = place not in values and not _only_checks(place)
        if _is_one_sided(ways, place.file, place.line) if decisive else unknown:
            return place
    return None


def _ways(observations: Sequence[Observation]) -> list[Sequence[Event]]:
    return list({id(seen.way): seen.way for seen in observations if seen.outputs is not None}.values())


def _is_one_sided(ways: Sequence[Sequence[Event]], file: str, line: int) -> bool:
    return len({_outcomes(way, file, line) for way in ways}) < 2


def _outcomes(way: Sequence[Event], file: str, line: int) -> tuple[int, ...]:
    """Where the code went from each conditional jump on `line`, in order."""
    outcomes: list[int] = []
    waiting: set[int] = set()
    """Numbers of calls whose last instruction was such a jump."""
    for number, code, offset in way:
        if number in waiting:
            waiting.discard(number)
            outcomes.append(offset)
        if code.co_filename == file and offset in _jumps(code).get(line, ()):
            waiting.add(number)
    return tuple(outcomes)


@functools.lru_cache(maxsize=4096)
def _jumps(code: CodeType) -> dict[int, frozenset[int]]:
    """Offsets of the conditional jumps of each line."""
    jumps: dict[int, set[int]] = {}
    for instruction, line in code_paths.instructions(code):
        if ("JUMP" in instruction.opname and "_IF_" in instruction.opname) or instruction.opname == "FOR_ITER":
            jumps.setdefault(line, set()).add(instruction.offset)
    return {line: frozenset(offsets) for line, offsets in jumps.items()}


def _is_compiled(place: SourceLine, classes: Collection[str]) -> bool:
    around = [node for node in nodes_of(place.file) if isinstance(node, ast.ClassDef) and spans(node, place.line)]
    return any(node.name in classes for node in around)
