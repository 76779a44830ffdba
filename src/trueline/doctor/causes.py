"""What blocks a module, in words: the construct at the line that was found, and what its condition depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from trueline.capture.model.code_paths import SourceLine
from trueline.doctor.diagnosis import Cause, Kind
from trueline.doctor.examine import Finding, Oracle
from trueline.doctor.patch import class_node, file_of, owner_of
from trueline.doctor.rewrites.scope import Scope, Spot
from trueline.doctor.rewrites.state.unused_state import writes_state
from trueline.doctor.rewrites.tensors.sizes import free_size
from trueline.doctor.search import function_at, locals_of


def cause_of(module: torch.nn.Module, oracle: Oracle, finding: Finding) -> Cause:
    """The first line of the user's code that explains `finding`, and why."""
    for place in finding.places:
        found = _explain(place, module, oracle)
        if found is not None:
            return found
    state = None if oracle.forgetful and not oracle.written else _state(module, oracle)
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


def cause_of_lost_dimension(finding: Finding) -> Cause | None:
    """The line that drops a dimension at some sizes (`examine.of_other_ranks`), where it is known."""
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
    if spot is None:
        return None
    found = _construct(scope, spot)
    return None if found is None else _cause(found[0], place, found[1])


def _construct(scope: Scope, spot: Spot) -> tuple[Kind, str] | None:
    statement = spot.statement
    tried = [one.statement.body[-1].end_lineno or 0 for one in spot.outer if isinstance(one.statement, ast.Try)]
    if tried and statement.lineno <= tried[-1] and not isinstance(statement, ast.If | ast.While | ast.For):
        return "value branch", f"it goes another way where values make this raise: `{ast.unparse(statement)}`"
    if isinstance(statement, ast.If):
        return _branch(scope, statement.test, "if")
    if isinstance(statement, ast.While):
        test = ast.unparse(statement.test)
        return "value loop", f"how often the loop runs depends on values: `while {test}`"
    if isinstance(statement, ast.For):
        source = ast.unparse(statement.iter)
        if scope.worth(statement.iter) in ("size", "tensor"):
            return "time loop", f"the loop takes as many steps as a size that varies: `{source}`"
        return "value loop", f"how often the loop runs depends on values: `{source}`"
    if isinstance(statement, ast.Break | ast.Continue):
        return "break", "the loop ends early, when values say so"
    if isinstance(statement, ast.Assert):
        return _branch(scope, statement.test, "assert")
    return _expression(scope, statement)


def _branch(scope: Scope, test: ast.expr, word: str) -> tuple[Kind, str]:
    text = ast.unparse(test)
    worth = scope.worth(test)
    if worth == "size":
        return "size branch", f"it branches on a size that varies: `{word} {text}`"
    if worth == "static":
        return "value branch", f"it branches on what changes from call to call: `{word} {text}`"
    return "value branch", f"it branches on values: `{word} {text}`"


def _expression(scope: Scope, statement: ast.stmt) -> tuple[Kind, str] | None:
    for node in ast.walk(statement):
        if isinstance(node, ast.IfExp) and scope.worth(node.test) != "static":
            return _branch(scope, node.test, "… if")
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist"):
            return "item", f"it takes numbers out of a tensor: `{ast.unparse(node)}`"
        if free_size(scope, node) is not None:
            return "fixed size", f"it makes a number of a size that varies: `{ast.unparse(node)}`"
        if _takes_number(scope, node):
            return "item", f"it takes a number out of a tensor: `{ast.unparse(node)}`"
        if isinstance(node, ast.Call) and scope.worth(node) == "number":
            return "item", f"it computes with a number that was taken out of a tensor: `{ast.unparse(node)}`"
        if _selects(scope, node):
            return "masked selection", f"values decide how much is selected: `{ast.unparse(node)}`"
        if isinstance(node, ast.ListComp) and any(scope.worth(one.iter) != "static" for one in node.generators):
            return "time loop", f"it takes as many steps as something that varies: `{ast.unparse(node)}`"
    if writes_state(statement):
        return "state", f"it keeps a state between calls: `{ast.unparse(statement)}`"
    return None


def _takes_number(scope: Scope, node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return False
    return node.func.id in ("int", "float", "bool") and scope.worth(node.args[0]) == "tensor"


def _selects(scope: Scope, node: ast.AST) -> bool:
    if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name | ast.Compare)):
        return False
    return scope.worth(node.slice) == "tensor"


def _state(module: torch.nn.Module, oracle: Oracle) -> Cause | None:
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
                    if isinstance(one, ast.stmt) and writes_state(one):
                        words = f"it keeps a state between calls: `{ast.unparse(one)}`"
                        return _cause("state", SourceLine(file=file, line=one.lineno), words)
    return None
