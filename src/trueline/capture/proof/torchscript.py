"""The TorchScript rung: by trace, by script or by a mix of both, whichever is proven first.

It needs no exported program: for a model that torch.export cannot follow it is often the only rung. Its signature is
then what the eager model showed on the probes.

A trace freezes numbers that the user's code takes out of tensors (`if x.max() > 1e4`, `.item()`, `.tolist()`), also one
that the probes never changed. So a trace is accepted only if the probes showed two values wherever a number is taken,
and two ways wherever one decides: otherwise the other side of a branch was never run, however many probes agree.
"""

import ast
import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from trueline import events
from trueline.bundle.signature import Signature
from trueline.capture.export import torchscript
from trueline.capture.export.torchscript import Way
from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import stateful
from trueline.capture.proof.narrowing import judge_and_narrow
from trueline.capture.proof.observe import Observation, find_parting, seen_signature
from trueline.capture.proof.prove import Proof
from trueline.errors import BundleError, CaptureError
from trueline.runtime.open import open_session
from trueline.runtime.session import Session

FROZEN = (
    "a number is taken out of a tensor or a size there, and no probe changes what it decides: a trace would freeze it"
)
DEPRECATED = "torch marks TorchScript as deprecated: take another program where there is one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The last way that was tried. `why` is empty when it is proven."""

    why: str = ""
    how: str = ""
    line: str = ""
    path: Path | None = None
    proof: Proof | None = None
    way: Way = "trace"


def climb_scripted(
    eager: EagerSession, signature: Signature | None, observations: Sequence[Observation], folder: Path
) -> Tried:
    """Tries the ways in the order of their chances; returns the first that is proven, else the reasons against each.
    `signature` is the exported program's, if there is one."""
    try:
        claimed = signature or seen_signature(eager.calling.presumed, observations)
    except CaptureError as error:
        return Tried(why=error.message)
    one_way = find_parting(observations) is None
    order: tuple[Way, ...] = ("trace", "script", "mix") if one_way else ("script", "mix", "trace")
    reasons, line, proof = [], "", None
    for way in order:
        tried = _try(eager, claimed, observations, folder / way, way, guarded=signature is not None)
        if not tried.why:
            return tried
        reasons.append(f"by {way}: {tried.why}")
        line, proof = line or tried.line, tried.proof or proof
    return Tried(why="; ".join(reasons), line=line, proof=proof)


def _try(
    eager: EagerSession,
    signature: Signature,
    observations: Sequence[Observation],
    folder: Path,
    way: Way,
    *,
    guarded: bool,
) -> Tried:
    """`guarded`: torch.export found the sizes of `signature`, and no others are answered."""
    started, frozen = time.monotonic(), list[SourceLine]()
    try:
        path, how = torchscript.emit(eager.module, eager.calling, folder, way, frozen=frozen)
        size = path.stat().st_size
        events.emit("program.emitted", format="torchscript", size_bytes=size, seconds=time.monotonic() - started)
        session, proof, observations = judge_and_narrow(
            lambda claim: open_session("torchscript", path, claim),
            signature,
            eager,
            observations,
            examples=eager.examples,
        )
    except (CaptureError, BundleError) as error:
        line = error.hint if isinstance(error, CaptureError) else ""
        return Tried(why=error.message, line=line)
    proof = stateful.prove_sequences(proof, session, eager)
    if proof.reason:
        return Tried(why=proof.reason, how=how, path=path, proof=proof)
    place = None
    if way != "script":
        place = find_unvaried(eager, observations, _compiled_classes(eager, how))
    if place is None and not guarded:
        place = find_one_sided(frozen, observations)
    if place is not None:
        return Tried(why=FROZEN, line=f"{place}")
    return Tried(how=how, path=path, proof=proof, way=way)


def _compiled_classes(eager: EagerSession, how: str) -> set[str]:
    """The classes whose code a mix compiled, by its own description."""
    _, _, listing = how.partition("scripted: ")
    names = listing.partition(";")[0].rstrip(")").split(", ") if listing else []
    scripted = [eager.module.get_submodule("" if name == "the model" else name) for name in names]
    return {kind.__name__ for module in scripted for part in module.modules() for kind in type(part).__mro__}


_T = torch.Tensor
TAKES = frozenset(
    getattr(_T, name)
    for name in ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "__array__")
) | {_T.is_nonzero, _T.equal, _T.allclose, torch.is_nonzero, torch.equal, torch.allclose}


class _ReadWatch(TorchFunctionMode):
    """Notes the line of the user's code for each number that is taken, and the number."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[SourceLine, set[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in TAKES:
            place = code_paths.current_line(within=_OWN)
            if place is not None:
                self.taken.setdefault(place, set()).add(_value_key(result))
        return result


_OWN = str(Path(__file__).parents[1])


def _value_key(result: Any) -> str:
    """Distinguishes one number from another; of many numbers, which there are, not how many."""
    if isinstance(result, np.ndarray):
        return str(np.unique(result).tolist())
    return str(sorted({repr(one) for one in np.ravel(result).tolist()})) if isinstance(result, list) else repr(result)


def find_unvaried(
    eager: Session, observations: Sequence[Observation], compiled: Collection[str] = ()
) -> SourceLine | None:
    """The first line where a number out of a tensor was the same on all probes, or decided the same on all. Code of the
    classes `compiled` is not traced, and does not count."""
    watch = _ReadWatch()
    for seen in observations:
        if seen.outputs is not None:
            with watch:
                eager.run(seen.probe.inputs)
    taken = {place: values for place, values in watch.taken.items() if not _is_compiled(place, compiled)}
    for place, values in taken.items():
        if len(values) < 2:
            return place
    ways = _ways(observations)
    for place in taken:
        for line in _deciding(place.file, place.line):
            if _is_one_sided(ways, place.file, line):
                return SourceLine(file=place.file, line=line)
    return None


def find_one_sided(places: Sequence[SourceLine], observations: Sequence[Observation]) -> SourceLine | None:
    """The first of `places` that decides, and where all answered probes went the same way; a check that raises does not
    count."""
    ways = _ways(observations)
    for place in places:
        decides = any(_decides(node, place.line) for node in _nodes(place.file))
        if decides and _is_one_sided(ways, place.file, place.line):
            return place
    return None


def _ways(observations: Sequence[Observation]) -> list[Sequence[Event]]:
    return list({id(seen.way): seen.way for seen in observations if seen.outputs is not None}.values())


def _is_one_sided(ways: Sequence[Sequence[Event]], file: str, line: int) -> bool:
    return len({_outcomes(way, file, line) for way in ways}) < 2


def _decides(node: ast.AST, line: int) -> bool:
    check = isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise)
    return not (check or isinstance(node, ast.Assert)) and any(
        test.lineno <= line <= (test.end_lineno or test.lineno) for test in _tests(node)
    )


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


@functools.lru_cache(maxsize=1024)
def _deciding(file: str, line: int) -> tuple[int, ...]:
    """Lines of the function around `line` whose test has a name in it that comes from there."""
    around = [node for node in _nodes(file) if isinstance(node, ast.FunctionDef) and _spans(node, line)]
    if not around:
        return ()
    function = max(around, key=lambda node: node.lineno)
    names: set[str] = set()
    statements = sorted((node for node in ast.walk(function) if isinstance(node, ast.stmt)), key=lambda s: s.lineno)
    for _ in range(3):  # what a loop carries back to its head
        for statement in statements:
            value = statement.iter if isinstance(statement, ast.For) else getattr(statement, "value", None)
            if isinstance(value, ast.AST) and (_spans(value, line) or names & _names(value, ast.Load)):
                targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                names |= {name for target in targets if target is not None for name in _names(target, ast.Store)}
    tests = [test for node in ast.walk(function) for test in _tests(node)]
    return tuple(sorted({test.lineno for test in tests if names & _names(test, ast.Load)}))


def _is_compiled(place: SourceLine, classes: Collection[str]) -> bool:
    around = [node for node in _nodes(place.file) if isinstance(node, ast.ClassDef) and _spans(node, place.line)]
    return any(node.name in classes for node in around)


@functools.lru_cache(maxsize=64)
def _nodes(file: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()


def _tests(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [test]
        case ast.For(iter=iterated):
            return [iterated]
        case ast.comprehension(iter=iterated, ifs=tests):
            return [iterated, *tests]
    return []


def _spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _names(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, kind)}
