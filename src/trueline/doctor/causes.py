"""The cause that blocks a module: the construct at the line that was found, and what its condition depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from trueline.capture.model.code_paths import SourceLine
from trueline.doctor.diagnosis import Cause, Kind
from trueline.doctor.examine import Finding, Oracle
from trueline.doctor.patch import class_node, file_of, owner_of
from trueline.doctor.rewrites.scope import Scope, Spot
from trueline.doctor.rewrites.state import written_attribute
from trueline.doctor.rewrites.tensors.numbers import free_size
from trueline.doctor.search import function_at, locals_of


def cause_of(module: torch.nn.Module, oracle: Oracle, finding: Finding) -> Cause:
    """The first line of the user's code that explains `finding`, and why."""
    for place in finding.places:
        cause = _explain(place, module, oracle)
        if cause is not None:
            return cause
    state = None if oracle.forgetful and not oracle.written else _state(module)
    if state is not None:
        return state
    if finding.fixed:
        place = finding.fixed[0]
        return _cause("fixed size", place, f"it makes a constant of a size that varies: `{place.source}`")
    if finding.places:
        return _cause("exporter", finding.places[0], finding.reason)
    owner = owner_of(module)
    line = vars(owner)["forward"].__code__.co_firstlineno
    return _cause("exporter", SourceLine(file=file_of(owner), line=line), finding.reason)


def cause_of_rank_change(finding: Finding) -> Cause | None:
    """The line that drops a dimension at some sizes (`examine.find_rank_change`), where it is known."""
    return _cause("size branch", finding.places[0], finding.reason) if finding.places else None


def _cause(kind: Kind, place: SourceLine, words: str) -> Cause:
    return Cause(kind=kind, file=place.file, line=place.line, source=place.source, words=words)


def _explain(place: SourceLine, module: torch.nn.Module, oracle: Oracle) -> Cause | None:
    try:
        text = Path(place.file).read_text()
    except (OSError, UnicodeDecodeError):
        return None
    function = function_at(ast.parse(text), place.line)
    if function is None:
        return None
    seen = locals_of(module, oracle, place.file, function)
    scope = Scope(text=text, function=function, seen=seen)
    spot = scope.spot(place.line)
    found = _construct(scope, spot) if spot is not None else None
    return None if found is None else _cause(found[0], place, found[1])


def _construct(scope: Scope, spot: Spot) -> tuple[Kind, str] | None:
    statement = spot.statement
    tried = [one.statement.body[-1].end_lineno or 0 for one in spot.outer if isinstance(one.statement, ast.Try)]
    if tried and statement.lineno <= tried[-1] and not isinstance(statement, ast.If | ast.While | ast.For):
        return "value branch", f"it takes another way where values make this raise: `{ast.unparse(statement)}`"
    if isinstance(statement, ast.If):
        return _branch(scope, statement.test, "if")
    if isinstance(statement, ast.While):
        return "value loop", f"values decide how often the loop runs: `while {ast.unparse(statement.test)}`"
    if isinstance(statement, ast.For):
        source = ast.unparse(statement.iter)
        if scope.depends_on(statement.iter) in ("size", "tensor"):
            return "time loop", f"the loop takes as many steps as a size that varies: `{source}`"
        return "value loop", f"values decide how often the loop runs: `{source}`"
    if isinstance(statement, ast.Break | ast.Continue):
        return "break", "values end the loop early"
    if isinstance(statement, ast.Assert):
        return _branch(scope, statement.test, "assert")
    return _expression(scope, statement)


def _branch(scope: Scope, test: ast.expr, word: str) -> tuple[Kind, str]:
    text, dependence = ast.unparse(test), scope.depends_on(test)
    if dependence == "size":
        return "size branch", f"it branches on a size that varies: `{word} {text}`"
    if dependence == "static":
        return "value branch", f"it branches on something that changes from call to call: `{word} {text}`"
    return "value branch", f"it branches on values: `{word} {text}`"


def _expression(scope: Scope, statement: ast.stmt) -> tuple[Kind, str] | None:
    for node in ast.walk(statement):
        if isinstance(node, ast.IfExp) and scope.depends_on(node.test) != "static":
            return _branch(scope, node.test, "… if")
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist"):
            return "item", f"it takes numbers out of a tensor: `{ast.unparse(node)}`"
        if free_size(scope, node) is not None:
            return "fixed size", f"it makes a number of a size that varies: `{ast.unparse(node)}`"
        match node:
            case ast.Call(func=ast.Name(id="int" | "float" | "bool"), args=[given, *_]):
                if scope.depends_on(given) == "tensor":
                    return "item", f"it takes a number out of a tensor: `{ast.unparse(node)}`"
        if isinstance(node, ast.Call) and scope.depends_on(node) == "number":
            return "item", f"it computes with a number that was taken out of a tensor: `{ast.unparse(node)}`"
        match node:
            case ast.Subscript(slice=ast.Name() | ast.Compare() as mask) if scope.depends_on(mask) == "tensor":
                return "masked selection", f"values decide how much is selected: `{ast.unparse(node)}`"
        if isinstance(node, ast.ListComp) and any(scope.depends_on(one.iter) != "static" for one in node.generators):
            return "time loop", f"it takes as many steps as something that varies: `{ast.unparse(node)}`"
    return ("state", _state_words(statement)) if written_attribute(statement) else None


def _state_words(statement: ast.stmt) -> str:
    return f"it keeps a state between calls: `{ast.unparse(statement)}`"


def _state(module: torch.nn.Module) -> Cause | None:
    """The first line of the module's own class, or of a submodule's, that writes into `self`."""
    for part in module.modules():
        if type(part).__module__.startswith("torch."):
            continue
        file = file_of(owner_of(part))
        try:
            node = class_node(ast.parse(Path(file).read_text()), owner_of(part))
        except (OSError, SyntaxError):
            continue
        for statement in ast.walk(node) if node is not None else ():
            if isinstance(statement, ast.FunctionDef) and statement.name != "__init__":
                for one in ast.walk(statement):
                    if isinstance(one, ast.stmt) and written_attribute(one):
                        return _cause("state", SourceLine(file=file, line=one.lineno), _state_words(one))
    return None
