"""A `match` as the `if`s that it means: values, alternatives, names, guards, and the parts of a shape.

    match x.shape:                                  if len(x.shape) == 3 and x.shape[1] == 1: …
        case (_, 1, _): …                           elif len(x.shape) == 3 and x.shape[1] > 20:
        case (_, n, _) if n > 20: y = x * n             n = x.shape[1]
        case _: …                                       y = x * n

Conditions: no case stores a name that a later one reads, and only shapes and tuples are taken apart. A subject that is
more than names, attributes and sizes gets a name first.
"""

import ast
import copy
from dataclasses import dataclass, field

from trueline.doctor.rewrites.scope import Scope, assign, expression, loaded_names, statements, substitute

_SHAPES = (".shape", ".size()")


@dataclass(slots=True)
class _Case:
    """What a pattern asks, and the names that it gives values."""

    tests: list[str] = field(default_factory=list)
    names: dict[str, ast.expr] = field(default_factory=dict)


class _NoForm(Exception):
    """A pattern that has no plain form: a class, a dict, a star."""


def as_ifs(scope: Scope, statement: ast.Match) -> list[ast.stmt] | None:
    """The statement as `if`s; None where a pattern has no plain form."""
    subject = statement.subject
    plain = all(_is_plain(one) for one in (subject.elts if isinstance(subject, ast.Tuple) else [subject]))
    named = subject if plain else ast.Name(id=scope.fresh("chosen"), ctx=ast.Load())
    read, rest = loaded_names(scope.function), list[ast.stmt]()
    for case in reversed(statement.cases):
        found = _Case()
        try:
            _read(case.pattern, named, found, is_tuple=isinstance(subject, ast.Tuple) or _is_shape(subject))
        except _NoForm:
            return None
        body = [copy.deepcopy(one) for one in case.body]
        body = [*(assign(name, value) for name, value in found.names.items() if name in read), *body]
        if case.guard is not None:
            found.tests.append(ast.unparse(substitute(case.guard, found.names)))
        test = " and ".join(f"({one})" if len(found.tests) > 1 else one for one in found.tests)
        rest = [ast.If(test=expression(test), body=body, orelse=rest)] if test else body
    if named is subject:
        return rest
    assert isinstance(named, ast.Name)
    return [*statements(f"{named.id} = {ast.unparse(subject)}"), *rest]


def _is_plain(node: ast.expr) -> bool:
    """Whether it may be written again and again."""
    match node:
        case ast.Name() | ast.Constant():
            return True
        case ast.Attribute(value=owner) | ast.Subscript(value=owner, slice=ast.Constant() | ast.UnaryOp()):
            return _is_plain(owner)
        case ast.Call(func=ast.Attribute(value=owner, attr="size"), args=given, keywords=[]):
            return _is_plain(owner) and all(isinstance(one, ast.Constant) for one in given)
    return False


def _is_shape(node: ast.expr) -> bool:
    return ast.unparse(node).endswith(_SHAPES)


def _read(pattern: ast.pattern, subject: ast.expr, found: _Case, *, is_tuple: bool = False) -> None:
    """Adds to `found` what `pattern` asks of `subject`. Raises _NoForm."""
    text = ast.unparse(subject)
    match pattern:
        case ast.MatchValue(value=value):
            found.tests.append(f"{text} == {ast.unparse(value)}")
        case ast.MatchSingleton(value=value):
            found.tests.append(f"{text} is None" if value is None else text if value else f"not {text}")
        case ast.MatchOr(patterns=patterns):
            ways = [_Case() for _ in patterns]
            for one, way in zip(patterns, ways, strict=True):
                _read(one, subject, way, is_tuple=is_tuple)
            if any(way.names or not way.tests for way in ways):
                raise _NoForm
            found.tests.append(" or ".join(f"({' and '.join(way.tests)})" for way in ways))
        case ast.MatchAs(pattern=inner, name=name):
            if inner is not None:
                _read(inner, subject, found, is_tuple=is_tuple)
            if name is not None:
                found.names[name] = subject
        case ast.MatchSequence(patterns=patterns) if is_tuple and not any(
            isinstance(one, ast.MatchStar) for one in patterns
        ):
            _read_parts(patterns, subject, found)
        case _:
            raise _NoForm


def _read_parts(patterns: list[ast.pattern], subject: ast.expr, found: _Case) -> None:
    if isinstance(subject, ast.Tuple):
        if len(subject.elts) != len(patterns):
            raise _NoForm
        parts = subject.elts
    else:
        found.tests.append(f"len({ast.unparse(subject)}) == {len(patterns)}")
        parts = [expression(f"{ast.unparse(subject)}[{at}]") for at in range(len(patterns))]
    for one, part in zip(patterns, parts, strict=True):
        _read(one, part, found)
