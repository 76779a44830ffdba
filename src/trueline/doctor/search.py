"""The search from a module that cannot be exported to the smallest edits with which it can, each step proven.

    blocking line ──candidates──▶ edit ──the eager answers are the same?──▶ export, compare on all calls
                        ▲                                                        │ blocked elsewhere
                        └────────────────────────────────────────────────────────┘

Depth first, with a budget. It returns a proven result or the reason why there is none.
"""

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trueline.doctor.examine import Finding, Oracle, examine
from trueline.doctor.export import copy_without_hooks, silence_exporters
from trueline.doctor.patch import MARK, class_node, file_of, name_of, owner_of, patch_module
from trueline.doctor.recorded_calls import agree, answer_of
from trueline.doctor.rewrites import candidates
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot
from trueline.doctor.rewrites.state import written_attribute
from trueline.doctor.rewrites.tensors.numbers import FREED, fixes_size
from trueline.doctor.rewrites.tensors.selections import makes_pieces
from trueline.recipe.eager_mode import as_called

MAX_EXAMINED = 16
"""Exports that one class may cost."""
FEW = 2
"""Exports that remain after an edit that is right for some sizes."""
MAX_DEPTH = 6
STRUCTURED = ("torch.cond(", "_higher_order_ops")
"""What stands in code with structured control flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """Edits with which the module is right."""

    text: str
    steps: tuple[str, ...]
    finding: Finding
    frees: bool = False
    """Whether a step frees a size: other modules of the edited code may then accept only multiples."""


@dataclass(slots=True)
class _Search:
    module: torch.nn.Module
    oracle: Oracle
    texts: Mapping[str, str]
    file: str
    owner: type
    left: int = MAX_EXAMINED
    tried: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    in_units: Healed | None = None
    """A result for sizes that are multiples, used when there is none for all sizes."""

    def with_text(self, text: str) -> torch.nn.Module:
        return patch_module(self.module, {**self.texts, self.file: text})

    def refuse(self, candidate: Candidate, reason: object) -> None:
        self.refusals.append(f"{candidate.words}: {reason}")


def heal(module: torch.nn.Module, oracle: Oracle, texts: Mapping[str, str], finding: Finding) -> Healed | str:
    """Edits of the file of `module`'s class that make it exportable and right; else why there are none.

    `texts` are the files as edited so far; `finding` is the examination with these.
    """
    owner = owner_of(module)
    file = file_of(owner)
    if file not in texts and not Path(file).is_file():
        return f"{owner.__name__} is not in a file ({file}): move it into a module, where it can be rewritten"
    start = texts.get(file) or Path(file).read_text()
    search = _Search(module=module, oracle=oracle, texts=texts, file=file, owner=owner)
    healed = _try_candidates(search, start, (), finding, {}) or search.in_units
    if healed is not None:
        return healed
    if not search.tried:
        return f"no rewrite is known for this form: {finding.reason}"
    last = search.refusals[-1] if search.refusals else finding.reason
    return f"{len(search.tried)} rewrites were tried, none is proven; the last: {last}"


def _try_candidates(
    search: _Search, text: str, steps: tuple[str, ...], finding: Finding, seen: Mapping[str, Any]
) -> Healed | None:
    if len(steps) >= MAX_DEPTH:
        return None
    for candidate, held in _propose(search, text, finding, seen):
        if candidate.text in search.tried or search.left <= 0:
            continue
        search.tried.add(candidate.text)
        if candidate.both is not None and not _takes_both_ways(search, text, *candidate.both):
            search.refuse(candidate, "the probes do not go both ways")
            continue
        if candidate.witness and not _raises(search, candidate.witness):
            search.refuse(candidate, "no probe shows the difference")
            continue
        try:
            module = search.with_text(candidate.text)
        except (SyntaxError, NameError) as error:
            search.refuse(candidate, error)
            continue
        if not _agrees(search, module, candidate) or not _twins_agree(search, text, candidate):
            continue
        search.left -= 1
        after = examine(module, search.oracle)
        done = (*steps, candidate.words)
        if not after.reason:
            structured = any(word in candidate.text for word in STRUCTURED)
            if structured and not _agrees(search, module, candidate, compiled=True):
                continue
            freed = candidate.frees or FREED in " ".join(done)
            return Healed(text=candidate.text, steps=done, finding=after, frees=freed)
        search.refuse(candidate, after.reason)
        if candidate.frees and search.in_units is None:
            finding = examine(search.with_text(candidate.text), search.oracle, in_units=True)
            if not finding.reason:  # kept for the end, with a smaller budget for the rest
                search.in_units = Healed(text=candidate.text, steps=done, finding=finding, frees=True)
                search.left = min(search.left, FEW)
        healed = _try_candidates(search, candidate.text, done, after, held)
        if healed is not None:
            return healed
    return None


def _twins_agree(search: _Search, text: str, candidate: Candidate) -> bool:
    """Whether the files that have to answer alike do, or calls take both ways where that is enough."""
    if candidate.ways is not None and _takes_both_ways(search, text, *candidate.ways):
        return True
    return all(_agrees(search, search.with_text(one), candidate) for one in candidate.alike)


@contextlib.contextmanager
def _tracing(on_call: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def _takes_both_ways(search: _Search, text: str, test: int, body: int) -> bool:
    """Whether the calls reach the line `test` with and without reaching the line `body` after it."""
    counts = {test: 0, body: 0}
    lines, own = text.splitlines(), Path(search.file).read_text().splitlines()
    # a function without edits runs from the user's own file, where its lines may have other numbers
    there = {at: line for line in counts for at in _nearest(own, lines[line - 1].strip(), line)}
    numbers = {name_of(search.file, text): {line: line for line in counts}, search.file: there}

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_filename in numbers else None

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        line = numbers[frame.f_code.co_filename].get(frame.f_lineno) if event == "line" else None
        if line is not None:
            counts[line] += 1
        return on_line

    module = search.with_text(text)
    with _tracing(on_call):
        for call in search.oracle.answered:
            answer_of(module, call)
    return 0 < counts[body] < counts[test]


def _raises(search: _Search, text: str) -> bool:
    """Whether `text` raises on a call that the original answers."""
    module = search.with_text(text)
    return any(answer_of(module, call).error for call in search.oracle.answered)


def _agrees(search: _Search, module: torch.nn.Module, candidate: Candidate, *, compiled: bool = False) -> bool:
    """Whether the eager rewrite answers as the original on every call. `compiled`: also as torch itself runs structured
    control flow, which it checks for more at size 1, on the call that was exported and on the smallest."""
    # without a state, calls that the original does not answer are skipped: they may never end
    oracle = search.oracle
    pairs = oracle.answered_pairs if oracle.forgetful else [*oracle.pairs]
    if compiled and oracle.forgetful:
        smallest, _ = min(pairs, key=lambda pair: sum(tensor.numel() for tensor in pair[0].tensors))
        pairs = [(call, answer) for call, answer in pairs if call is oracle.base or call is smallest]
    twin = copy_without_hooks(module)  # a copy: its state stays as it is
    with as_called() if compiled else contextlib.nullcontext(), silence_exporters():
        for call, expected in pairs:
            reason, _ = agree(expected, answer_of(twin, call))
            if reason:
                search.refuse(candidate, reason)
                return False
    return True


def _propose(
    search: _Search, text: str, finding: Finding, seen: Mapping[str, Any]
) -> Iterator[tuple[Candidate, Mapping[str, Any]]]:
    done: set[int] = set()
    for line in _lines_of(finding, search, text):
        scope = _scope_at(search, text, line, seen)
        spot = None if scope is None else scope.spot(line)
        if scope is None or spot is None or spot.statement.lineno in done:
            continue
        done.add(spot.statement.lineno)
        for candidate in chain(candidates(scope, spot), _inside(scope, spot)):
            yield candidate, scope.seen


def _inside(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """Edits of branches inside a loop, which have to go before the loop can."""
    for around in (*spot.outer, spot):
        for node in ast.walk(around.statement) if isinstance(around.statement, ast.For | ast.While) else ():
            if isinstance(node, ast.If) and scope.depends_on(node.test) != "static":
                inner = scope.spot(node.lineno)
                if inner is not None:
                    yield from candidates(scope, inner)


def _lines_of(finding: Finding, search: _Search, text: str) -> list[int]:
    """Lines of `text` that the finding's places stand for; where there is none, or the module remembers, also the lines
    that write a state."""
    found: list[int] = []
    lines = text.splitlines()
    current = name_of(search.file, text)
    node = class_node(ast.parse(text), search.owner)
    for place in finding.places:
        if place.file == current:
            found.append(place.line)
        elif place.file.partition(MARK)[0] == search.file:
            # lines above it may have been edited, and other classes have lines that read the same
            own = class_node(ast.parse(Path(search.file).read_text()), search.owner)
            inside = place.file == search.file and own is not None and place.line in _lines(own)
            span = _lines(node) if inside and node is not None else None
            found += _nearest(lines, place.source, place.line, span)
    if not found and node is not None:  # an edit took the place's own line
        own_lines = {line.strip() for line in Path(search.file).read_text().splitlines()}
        found += [at for at in _lines(node) if lines[at - 1].strip() and lines[at - 1].strip() not in own_lines]
    remembers = not search.oracle.forgetful
    for statement in ast.walk(node) if node is not None and (remembers or not found) else ():
        if isinstance(statement, ast.FunctionDef) and statement.name != "__init__":
            found += [s.lineno for s in statement.body if not finding.places and (fixes_size(s) or makes_pieces(s))]
            found += [s.lineno for s in ast.walk(statement) if isinstance(s, ast.stmt) and written_attribute(s)]
    return list(dict.fromkeys(found))


def _lines(node: ast.ClassDef | ast.FunctionDef) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _nearest(lines: list[str], source: str, number: int, within: range | None = None) -> list[int]:
    """The line (of those `within`) that reads as `source` and is nearest to `number`, if there is one."""
    alike = [at for at, line in enumerate(lines, 1) if line.strip() and line.strip() == source]
    return sorted((at for at in alike if within is None or at in within), key=lambda at: abs(at - number))[:1]


def _scope_at(search: _Search, text: str, line: int, seen: Mapping[str, Any]) -> Scope | None:
    """The function of `text` that holds `line`, with the values of its locals in the exported call."""
    function = function_at(ast.parse(text), line)
    if function is None:
        return None
    held = locals_of(search.with_text(text), search.oracle, name_of(search.file, text), function)
    return Scope(text=text, function=function, seen={**seen, **held})


def function_at(tree: ast.Module, line: int) -> ast.FunctionDef | None:
    """The outermost function that holds `line`."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if line in _lines(node)), None)


def locals_of(module: torch.nn.Module, oracle: Oracle, file: str, function: ast.FunctionDef) -> dict[str, Any]:
    """Values of the locals of `function`, and of functions that it defines, when they end, on the exported call and
    the first and last answered ones."""
    held: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    names = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
    module = copy_without_hooks(module)
    files = (file, file.partition(MARK)[0])  # code without edits runs from the user's own file

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_return if frame.f_code.co_name in names and frame.f_code.co_filename in files else None

    def on_return(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            into = held if frame.f_code.co_name == function.name else inner
            into.update({name: value for name, value in frame.f_locals.items() if value is not None})
        return on_return

    with _tracing(on_call):
        for call in dict.fromkeys((oracle.answered[0], oracle.answered[-1], oracle.base)):
            answer_of(module, call)
    return {**inner, **held}
