"""From a module that cannot be exported to the smallest edits with which it can, each step proven on its calls.

    blocking line ──candidates──▶ edit ──the eager answers are the same?──▶ export, compare on all calls
                        ▲                                                        │ blocked elsewhere
                        └────────────────────────────────────────────────────────┘

A search in depth with a budget: what comes out is proven, what does not come out is said.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trueline.capture.model.code_paths import SourceLine
from trueline.doctor.examine import Finding, Oracle, copy_without_hooks, examine, silence_exporters
from trueline.doctor.patch import MARK, class_node, file_of, name_of, owner_of, patch_module
from trueline.doctor.recorded_calls import agree, answer_of
from trueline.doctor.rewrites import candidates
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot
from trueline.doctor.rewrites.state.unused_state import writes_state
from trueline.doctor.rewrites.tensors.sizes import FREED, fixes_size

MAX_EXAMINED = 16
"""Exports that one class may cost."""
FEW = 2
"""Of them after an edit that is right for some sizes."""
MAX_DEPTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """Edits with which the module is right."""

    text: str
    steps: tuple[str, ...]
    finding: Finding
    frees: bool = False
    """Whether a step frees a size: other modules of the edited code may then take it in multiples only."""


@dataclass(slots=True)
class _Search:
    module: torch.nn.Module
    oracle: Oracle
    texts: Mapping[str, str]
    file: str
    owner: type
    left: int = MAX_EXAMINED
    tried: set[str] = field(default_factory=set)
    offered: int = 0
    refusals: list[str] = field(default_factory=list)
    in_units: Healed | None = None
    """What is right for sizes that are multiples: taken when nothing is for all."""

    def structured(self, text: str) -> bool:
        """Whether a rewrite has put structured control flow into `text`, beside what the user's own file has."""
        own = Path(self.file).read_text()
        return any(text.count(word) > own.count(word) for word in ("torch.cond(", "_higher_order_ops"))

    def with_text(self, text: str) -> torch.nn.Module:
        return patch_module(self.module, {**self.texts, self.file: text})


def heal(module: torch.nn.Module, oracle: Oracle, texts: Mapping[str, str], finding: Finding) -> Healed | str:
    """Edits of the file of `module`'s class that make it exportable and right; else why there are none.

    `texts` are the files as edited so far; `finding` is the examination with these.
    """
    owner = owner_of(module)
    file = file_of(owner)
    if file not in texts and not Path(file).is_file():
        return f"{owner.__name__} was written in no file ({file}): put it into a module, and it can be rewritten there"
    start = texts.get(file) or Path(file).read_text()
    search = _Search(module=module, oracle=oracle, texts=texts, file=file, owner=owner)
    found = _deeper(search, start, (), finding, {}) or search.in_units
    if found is not None:
        return found
    if not search.offered:
        return f"no rewrite is known for this form: {finding.reason}"
    last = search.refusals[-1] if search.refusals else finding.reason
    return f"{search.offered} rewrites were tried, none is proven; the last: {last}"


def _deeper(
    search: _Search, text: str, steps: tuple[str, ...], finding: Finding, seen: Mapping[str, Any]
) -> Healed | None:
    if len(steps) >= MAX_DEPTH:
        return None
    for candidate, held in _propose(search, text, finding, seen):
        if candidate.text in search.tried or search.left <= 0:
            continue
        search.tried.add(candidate.text)
        search.offered += 1
        if candidate.both is not None and not _both_ways(search, text, *candidate.both):
            search.refusals.append(f"{candidate.words}: the probes do not go both ways")
            continue
        module = _compile(search, candidate)
        if module is None or not _same(search, module, candidate):
            continue
        search.left -= 1
        after = examine(module, search.oracle)
        done = (*steps, candidate.words)
        if not after.reason:
            if candidate.cheap or _same_where_it_matters(search, module, candidate):
                freed = candidate.frees or FREED in " ".join(done)
                return Healed(text=candidate.text, steps=done, finding=after, frees=freed)
            continue
        search.refusals.append(f"{candidate.words}: {after.reason}")
        if candidate.frees and search.in_units is None:
            _tried_in_units(search, candidate, done)
        found = _deeper(search, candidate.text, done, after, held)
        if found is not None:
            return found
    return None


def _tried_in_units(search: _Search, candidate: Candidate, done: tuple[str, ...]) -> None:
    """Keeps the edit for the end if it is right where sizes are multiples; then not much else is tried."""
    found = examine(search.with_text(candidate.text), search.oracle, in_units=True)
    if not found.reason:
        search.in_units = Healed(text=candidate.text, steps=done, finding=found, frees=True)
        search.left = min(search.left, FEW)


def _both_ways(search: _Search, text: str, test: int, body: int) -> bool:
    """Whether the calls reach the line `test` with and without reaching the line `body` after it."""
    counts = {test: 0, body: 0}
    lines, own = text.splitlines(), Path(search.file).read_text().splitlines()
    # a function that no edit has reached runs from the user's own file, where its lines may have other numbers
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
    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        for call in search.oracle.answered:
            answer_of(module, call)
    finally:
        sys.settrace(before)
    return 0 < counts[body] < counts[test]


def _compile(search: _Search, candidate: Candidate) -> torch.nn.Module | None:
    try:
        return search.with_text(candidate.text)
    except (SyntaxError, NameError) as error:
        search.refusals.append(f"{candidate.words}: {error}")
        return None


def _same(search: _Search, module: torch.nn.Module, candidate: Candidate) -> bool:
    """Whether the eager rewrite answers as the original on every call. Structured operators are compiled by torch at
    each new shape, which takes seconds: theirs is left to the exported program and `_same_where_it_matters`."""
    if not candidate.cheap or search.structured(candidate.text):
        return True
    return _same_in_order(search, module, candidate)


def _same_in_order(search: _Search, module: torch.nn.Module, candidate: Candidate) -> bool:
    module = copy_without_hooks(module)  # what it remembers of these calls stays here
    for call, expected in zip(search.oracle.calls, search.oracle.answers, strict=True):
        if expected.arrays is None and search.oracle.forgetful:
            continue  # there is no answer to keep, and a loop may be without end
        reason, _ = agree(expected, answer_of(module, call))
        if reason:
            search.refusals.append(f"{candidate.words}: {reason}")
            return False
    return True


def _same_where_it_matters(search: _Search, module: torch.nn.Module, candidate: Candidate) -> bool:
    """The eager rewrite on the call that was exported and on the smallest: of size 1 torch checks more. One that
    remembers is asked all calls, in their order."""
    if not search.oracle.forgetful:
        with silence_exporters():
            return _same_in_order(search, module, candidate)
    answered = [(c, a) for c, a in zip(search.oracle.calls, search.oracle.answers, strict=True) if a.arrays is not None]
    smallest, _ = min(answered, key=lambda pair: sum(tensor.numel() for tensor in pair[0].tensors))
    for call, expected in answered:
        if call is search.oracle.base or call is smallest:
            with silence_exporters():
                reason, _ = agree(expected, answer_of(module, call))
            if reason:
                search.refusals.append(f"{candidate.words}: {reason}")
                return False
    return True


def _propose(
    search: _Search, text: str, finding: Finding, seen: Mapping[str, Any]
) -> Iterator[tuple[Candidate, Mapping[str, Any]]]:
    done: set[int] = set()
    for line in lines_of(finding, search.file, text, search.owner, remembers=not search.oracle.forgetful):
        scope = scope_at(search, text, line, seen)
        spot = None if scope is None else scope.spot(line)
        if scope is None or spot is None or spot.statement.lineno in done:
            continue
        done.add(spot.statement.lineno)
        for candidate in candidates(scope, spot):
            yield candidate, scope.seen
        for candidate in _inside(scope, spot):
            yield candidate, scope.seen


def _inside(scope: Scope, spot: Spot) -> Iterator[Candidate]:
    """What a loop holds that has to go before the loop can."""
    for around in (*spot.outer, spot):
        if isinstance(around.statement, ast.For | ast.While):
            for node in ast.walk(around.statement):
                if isinstance(node, ast.If) and scope.worth(node.test) != "static":
                    inner = scope.spot(node.lineno)
                    if inner is not None:
                        yield from candidates(scope, inner)


def lines_of(finding: Finding, file: str, text: str, owner: type, *, remembers: bool) -> list[int]:
    """Lines of `text` that the finding's places stand for; where there is none, or the module remembers, also the lines
    that write a state."""
    found: list[int] = []
    lines = text.splitlines()
    current = name_of(file, text)
    for place in finding.places:
        if place.file == current:
            found.append(place.line)
        elif place.file.partition(MARK)[0] == file:
            found += _same_source(place, lines, _span(file, text, owner, place))
    node = class_node(ast.parse(text), owner)
    for statement in ast.walk(node) if node is not None and (remembers or not found) else ():
        if isinstance(statement, ast.FunctionDef) and statement.name != "__init__":
            found += [s.lineno for s in statement.body if not finding.places and fixes_size(s)]
            found += [s.lineno for s in ast.walk(statement) if isinstance(s, ast.stmt) and writes_state(s)]
    return list(dict.fromkeys(found))


def _span(file: str, text: str, owner: type, place: SourceLine) -> range | None:
    """The lines of the class in `text`, where `place` lies in it: other classes have lines that read the same."""
    own = class_node(ast.parse(Path(file).read_text()), owner) if place.file == file else None
    if own is None or not own.lineno <= place.line <= (own.end_lineno or own.lineno):
        return None
    node = class_node(ast.parse(text), owner)
    return None if node is None else range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _same_source(place: SourceLine, lines: list[str], within: range | None) -> list[int]:
    """Lines that read as the place's does, the nearest first: lines above it may have been edited."""
    return _nearest(lines, place.source, place.line, within)


def _nearest(lines: list[str], source: str, number: int, within: range | None = None) -> list[int]:
    """The line (of those `within`) that reads as `source` and is nearest to `number`, if there is one."""
    alike = [at for at, line in enumerate(lines, 1) if line.strip() and line.strip() == source]
    if within is not None:
        alike = [at for at in alike if at in within]
    return sorted(alike, key=lambda at: abs(at - number))[:1]


def scope_at(search: _Search, text: str, line: int, seen: Mapping[str, Any]) -> Scope | None:
    """The function of `text` that holds `line`, with what its locals hold on the exported call."""
    tree = ast.parse(text)
    function = function_at(tree, line)
    if function is None:
        return None
    if search.structured(text):
        return Scope(text=text, function=function, seen=seen)
    held = locals_of(search.with_text(text), search.oracle, name_of(search.file, text), function)
    return Scope(text=text, function=function, seen={**seen, **held})


def function_at(tree: ast.Module, line: int) -> ast.FunctionDef | None:
    """The outermost function that holds `line`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return node
    return None


def locals_of(module: torch.nn.Module, oracle: Oracle, file: str, function: ast.FunctionDef) -> dict[str, Any]:
    """Values of the locals of `function`, and of functions that it defines, when they end, on the calls that are
    exported and asked first."""
    held: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    names = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
    module = copy_without_hooks(module)
    files = (file, file.partition(MARK)[0])  # what no edit has reached runs from the user's own

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_return if frame.f_code.co_name in names and frame.f_code.co_filename in files else None

    def on_return(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            into = held if frame.f_code.co_name == function.name else inner
            into.update({name: value for name, value in frame.f_locals.items() if value is not None})
        return on_return

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        for call in dict.fromkeys((oracle.answered[0], oracle.answered[-1], oracle.base)):
            answer_of(module, call)
    finally:
        sys.settrace(before)
    return {**inner, **held}


def diff(before: str, after: str, name: str) -> str:
    """The edits as a unified diff of the user's file."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
