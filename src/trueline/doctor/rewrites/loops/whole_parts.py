"""A loop over the parts of a tensor, which are joined again, on the whole tensor at once.

    outs = []                                   outs = []
    for part in q.split(64, dim=1):             for part in (q,):
        w = (part @ k.mT).softmax(-1)   ──▶         w = (part @ k.mT).softmax(-1)
        outs.append(w @ v)                          outs.append(w @ v)
    return torch.cat(outs, dim=1)               return torch.cat(outs, dim=1)

Also `chunk`, `zip` of several tensors that are split alike, and a list of `torch.cat`. The parts save memory, which one
call then needs for all. Condition: each step treats every row by itself and all rows alike, as its statements say.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trueline.doctor.rewrites.appends import appended_by
from trueline.doctor.rewrites.rowwise import steps_are_alike
from trueline.doctor.rewrites.scope import Candidate, Scope, Spot, assign, first_line, loaded_names, stored_names, walk

_SPLITS = ("split", "chunk")
_JOINS = ("torch.cat", "torch.concat")


def take_whole(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The statement at `spot` on whole tensors."""
    statement = copy.deepcopy(spot.statement)
    match statement:
        case ast.For(body=[*before, last], orelse=[]):
            appended = appended_by(last)
            parts = _find_parts(scope, statement.target, statement.iter)
            if appended is None or parts is None or _find_axes(spot.rest, appended[0]) != {parts.axis}:
                return
            block = [*before, assign("appended", appended[1])]
            alike = not _carries(block) and steps_are_alike(scope, block, dict.fromkeys(parts.names, parts.inner))
            statement.iter = parts.whole
        case _:
            alike = _take_lists(scope, statement)
    if alike:
        words = f"`{first_line(spot.statement)}` takes the parts as one"
        yield scope.candidate([spot.statement], [statement], words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    names: tuple[str, ...]
    axis: int
    """The dimension that is split, from the first on."""
    inner: int
    """The dimensions within a row of it."""
    whole: ast.expr


def _take_lists(scope: Scope, statement: ast.stmt) -> bool:
    """Whether each `torch.cat([f(part) for part in x.split(64)])` in the statement could be made one of the whole."""
    taken = False
    for node in ast.walk(statement):
        match node:
            case ast.Call(args=[ast.ListComp(generators=[ast.comprehension(ifs=[]) as made]) as rows, *_]):
                parts = _find_parts(scope, made.target, made.iter)
                if parts is None or ast.unparse(node.func) not in _JOINS or _axis_of(node, 1) != parts.axis:
                    continue
                if steps_are_alike(scope, [assign("made", rows.elt)], dict.fromkeys(parts.names, parts.inner)):
                    made.iter, taken = parts.whole, True
    return taken


def _carries(block: Sequence[ast.stmt]) -> bool:
    """Whether a step reads what the one before it gave a name."""
    written = [set(stored_names([statement])) for statement in block]
    return any(
        set(loaded_names([statement])) & set().union(*written) - set().union(*written[:at])
        for at, statement in enumerate(block)
    )


def _find_parts(scope: Scope, target: ast.expr, source: ast.expr) -> _Parts | None:
    """What a loop goes through, where that is one tensor in parts, or several that are split alike."""
    match target, source:
        case ast.Name(id=name), ast.Call():
            names, calls = [name], [source]
        case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=args):
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            calls = [one for one in args if isinstance(one, ast.Call)]
            if not len(names) == len(targets) == len(calls) == len(args):
                return None
        case _:
            return None
    found = [_read_split(scope, call) for call in calls]
    split = [one for one in found if one is not None]
    if len(split) < len(found) or len({(how, axis, inner) for _, how, axis, inner in split}) != 1:
        return None
    whole: list[ast.expr] = [ast.Tuple(elts=[of], ctx=ast.Load()) for of, *_ in split]
    given = whole[0] if isinstance(target, ast.Name) else ast.Call(func=ast.Name(id="zip"), args=whole, keywords=[])
    _, _, axis, inner = split[0]
    return _Parts(names=tuple(names), axis=axis, inner=inner, whole=given)


def _read_split(scope: Scope, call: ast.Call) -> tuple[ast.expr, str, int, int] | None:
    """The tensor, how it is split, the dimension and those within its rows; None for another call."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _SPLITS:
        return None
    of_torch = ast.unparse(call.func.value) == "torch"
    if of_torch and not call.args:
        return None
    of = call.args[0] if of_torch else call.func.value
    rank, axis = scope.rank(of), _axis_of(call, 2 if of_torch else 1)
    given = call.args[of_torch : of_torch + 1]
    if rank is None or axis is None or not given or not -rank <= axis < rank:
        return None
    return of, f"{call.func.attr} {ast.unparse(given[0])}", axis % rank, rank - 1 - axis % rank


def _axis_of(call: ast.Call, place: int) -> int | None:
    """The dimension that a call names, at `place` or by its name; 0 where it names none, None where it is no number."""
    named = [one.value for one in call.keywords if one.arg in ("dim", "axis")]
    given = named or call.args[place : place + 1]
    try:
        axis = ast.literal_eval(given[0]) if given else 0
    except ValueError:
        return None
    return axis if isinstance(axis, int) else None


def _find_axes(rest: Sequence[ast.stmt], name: str) -> set[int | None]:
    """The dimensions along which the list `name` is joined after the loop; None is among them for any other use."""
    uses = [node for node in walk(rest) if isinstance(node, ast.Name) and node.id == name]
    joins = [
        node
        for node in walk(rest)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _JOINS and node.args and node.args[0] in uses
    ]
    return {_axis_of(node, 1) for node in joins} | ({None} if len(joins) < len(uses) else set())
