"""Lists of numbers that Python takes out of a tensor, and computes with one by one, as tensors.

    rows = [[(i * 31 + 7) % 16 for i in row] for row in ids.tolist()]        rows = (ids * 31 + 7) % 16
    return self.table(torch.tensor(rows))                             ──▶    return self.table(rows)

Also counts in a dict or a Counter (`counts[k]` is `(ids == k).sum()`), `sorted(range(n), key=…)` as a stable argsort,
`bisect` as `bucketize`, and a loop that appends such numbers. Other code is mapped
with `torch.vmap`. Python's whole numbers have no bound; the proof compares at the extremes of the inputs.
"""

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from trueline.doctor.rewrites.comprehensions import NamedRows, as_comprehension, counted_tensor, without_filter
from trueline.doctor.rewrites.predicate import predicate, without_numbers
from trueline.doctor.rewrites.scope import (
    Candidate,
    Scope,
    Spot,
    assign,
    expression,
    loaded_names,
    named_value,
    substitute,
    tensor_of,
    tensor_of_list,
    value_of,
)

_MADE = ("torch.tensor", "torch.as_tensor", "torch.LongTensor", "torch.FloatTensor", "np.array", "np.asarray")
_REDUCED = {"max": "amax()", "min": "amin()", "sum": "sum()", "len": "shape[0]", "any": "any()", "all": "all()"}
_BISECTED = {"bisect": "True", "bisect_right": "True", "bisect_left": "False"}


def keep_lists(scope: Scope, spot: Spot) -> Iterator[Candidate | None]:
    """The function with its lists of numbers as tensors."""
    function = scope.function
    if not any(isinstance(node, ast.Call | ast.ListComp | ast.GeneratorExp) for node in ast.walk(spot.statement)):
        return
    kept = _Lists(scope)
    new = kept.block(function.body)
    old = function.body
    while kept.words and old and new and ast.dump(old[0]) == ast.dump(new[0]):
        old, new = old[1:], new[1:]
    while kept.words and old and new and ast.dump(old[-1]) == ast.dump(new[-1]):
        old, new = old[:-1], new[:-1]
    if kept.words and old:
        yield scope.candidate(old, new or [ast.Pass()], f"`{kept.words[0]}` stays a tensor")


class _Lists(ast.NodeTransformer):
    """Rewrites blocks in order; knows which names have become tensors."""

    def __init__(self, scope: Scope, known: Mapping[str, torch.Tensor] | None = None) -> None:
        self.scope = scope
        self.known = dict(known or {})
        """Names of lists that are tensors now, with a sample."""
        self.counts: dict[str, str] = {}
        """Dict of counts -> the tensor whose values it counts."""
        self.words: list[str] = []

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The statements of a block with lists as tensors."""
        new: list[ast.stmt] = []
        for index, statement in enumerate(body):
            if self._counts(statement, body[index + 1 :]):
                continue
            statement = as_comprehension(statement, body[:index], new) or statement
            named = named_value(statement) if isinstance(statement, ast.Assign) else None
            whole = self.convert(named[1]) if named is not None else None
            if named is not None and whole is not None:
                value, sample = whole
                if ast.unparse(value) != named[0]:
                    new.append(ast.copy_location(assign(named[0], value), statement))
                self.known[named[0]] = sample
                self.words.append(ast.unparse(named[1]))
                continue
            statement = copy.deepcopy(statement)
            inner = [name for name in ("body", "orelse") if isinstance(getattr(statement, name, None), list)]
            blocks = {name: self.block(getattr(statement, name)) for name in inner}
            for name in inner:
                setattr(statement, name, [])
            statement = self.visit(statement)
            for name, block in blocks.items():
                setattr(statement, name, block)
            new.append(statement)
        return new

    def _counts(self, statement: ast.stmt, rest: Sequence[ast.stmt]) -> bool:
        """Whether `statement` only makes, or fills, a dict of counts."""
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called, args=[given])):
                whole = self.convert(given) if ast.unparse(called).endswith("Counter") else None
                if whole is not None:
                    self.counts[name] = ast.unparse(whole[0])
                    self.words.append(ast.unparse(statement.value))
                return whole is not None
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                empty = ast.unparse(value) in ("{}", "dict()", "Counter()", "defaultdict(int)")
                return empty and any(self._fills(one, name) for one in rest)
            case ast.For(body=[one], iter=source):
                names = [name for name in loaded_names(one) if self._fills(statement, name)]
                whole = self.convert(source) if names else None
                if whole is not None:
                    self.counts[names[0]] = ast.unparse(whole[0])
                    self.words.append(f"for {ast.unparse(statement.target)} in {ast.unparse(source)}")
                return whole is not None
        return False

    def _fills(self, statement: ast.stmt, name: str) -> bool:
        """Whether it is `for i in …: name[i] += 1`, or `name[i] = name.get(i, 0) + 1`."""
        match statement:
            case ast.For(target=ast.Name(id=i), iter=source, body=[one], orelse=[]):
                forms = (f"{name}[{i}] += 1", f"{name}[{i}] = {name}.get({i}, 0) + 1")
                return ast.unparse(one) in forms and self.convert(source) is not None
        return False

    # ---- expressions

    def convert(self, node: ast.expr) -> tuple[ast.expr, torch.Tensor] | None:
        """A list of numbers as a tensor and a sample of it; None for anything else."""
        match node:
            case ast.Name(id=name):
                return (node, self.known[name]) if name in self.known else None
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[given]):
                return self.convert(given)
            case ast.Call(func=ast.Name(id="range"), args=[_]):
                counted = self._range(node)
                return None if counted is None else (expression(counted), torch.zeros(2, dtype=torch.int64))
            case ast.Call(func=ast.Name(id="sorted"), args=[given, *_]):
                return self._argsort(node, given)
            case ast.Call(func=ast.Attribute(attr="tolist")):
                source = tensor_of_list(node)
                return self._sample(source)
            case (
                ast.ListComp(elt=element, generators=[ast.comprehension(target=target, iter=source, ifs=[])])
                | ast.GeneratorExp(elt=element, generators=[ast.comprehension(target=target, iter=source, ifs=[])])
            ):
                return self._map_elements(element, target, source)
        return None

    def _sample(self, source: ast.expr) -> tuple[ast.expr, torch.Tensor] | None:
        """`source` with a sample of its form; None where it is no tensor."""
        if self.scope.depends_on(source) != "tensor" and not set(loaded_names(source)) & set(self.known):
            return None
        held = self.known.get(ast.unparse(source))
        held = tensor_of(source, self.scope) if held is None else held
        if held is None:
            held = _evaluate(source, self.scope)
        return None if held is None or not held.ndim or not held.shape[0] else (source, held)

    def _range(self, node: ast.Call) -> str | None:
        """`range(n)` of a size, also of a list that is a tensor now, as `torch.arange`."""
        length = ast.unparse(self.visit(copy.deepcopy(node.args[0])))
        counts = any(f"{name}.shape[0]" == length for name in self.known)
        return f"torch.arange({length})" if counts or self.scope.depends_on(node.args[0]) == "size" else None

    def _argsort(self, node: ast.Call, given: ast.expr) -> tuple[ast.expr, torch.Tensor] | None:
        whole = self.convert(given)
        options = {one.arg: one.value for one in node.keywords}
        if whole is None or set(options) - {"key", "reverse"} or whole[1].ndim != 1:
            return None
        turned = ast.unparse(options["reverse"]) if "reverse" in options else "False"
        sorting, text = f"stable=True, descending={turned}", ast.unparse(whole[0])
        if "key" not in options:
            return expression(f"torch.sort({text}, {sorting}).values"), whole[1]
        key = options["key"]
        if isinstance(key, ast.Attribute) and key.attr == "__getitem__":
            key = expression(f"lambda i: {ast.unparse(key.value)}[i]")
        if not isinstance(key, ast.Lambda) or len(key.args.args) != 1:
            return None
        ranks = self._map_elements(key.body, ast.Name(id=key.args.args[0].arg, ctx=ast.Store()), given)
        if ranks is None:
            return None
        order = f"torch.argsort({ast.unparse(ranks[0])}, {sorting})"
        counted = ast.unparse(given).startswith("range(")
        return expression(order if counted else f"{text}[{order}]"), whole[1]

    def _map_elements(
        self, element: ast.expr, target: ast.expr, source: ast.expr
    ) -> tuple[ast.expr, torch.Tensor] | None:
        """`[element for target in source]`."""
        counter: str | None = None
        match target, source:
            case ast.Tuple(elts=[ast.Name() as first, ast.Name() as target]), ast.Call(
                func=ast.Name(id="enumerate"), args=[source]
            ):
                counter = first.id
        if not isinstance(target, ast.Name):
            return None
        row = counted_tensor(source)
        if row is not None and counter is None:  # `[f(x[i]) for i in range(len(x))]` is `[f(x_i) for x_i in x]`
            direct = NamedRows(row, target.id)
            element = direct.visit(copy.deepcopy(element))
            if target.id not in loaded_names(element):
                return self._map_elements(element, ast.Name(id=direct.name, ctx=ast.Store()), expression(row))
        whole = self.convert(source) or self._sample(source)
        if whole is None:
            return self._stack_elements(element, target, source)
        given, name = ast.unparse(whole[0]), target.id
        inner = _Lists(self.scope, {**self.known, **({name: whole[1][0]} if whole[1].ndim > 1 else {})})
        inner.counts = self.counts
        seen = {name: whole[1][0], **({counter: torch.zeros((), dtype=torch.int64)} if counter else {})}
        inner.scope = replace(self.scope, seen={**self.scope.seen, **seen})
        value = inner.scalar(element)
        if value is None or not {name, counter} & {*loaded_names(value)}:
            return None
        names, sources = [name], [given]
        if counter in loaded_names(value):
            names, sources = [counter or "", name], [f"torch.arange({given}.shape[0])", given]
        if len(names) == 1 and _is_elementwise(value, name):
            return substitute(value, {name: expression(given)}), whole[1]
        mapped = f"torch.vmap(lambda {', '.join(names)}: {ast.unparse(value)})({', '.join(sources)})"
        return expression(mapped), torch.zeros((2, 2) if isinstance(element, ast.ListComp | ast.List) else (2,))

    def _stack_elements(
        self, element: ast.expr, target: ast.Name, source: ast.expr
    ) -> tuple[ast.expr, torch.Tensor] | None:
        """A list of fixed length, of numbers out of a tensor."""
        if self.scope.depends_on(source) != "static":
            return None
        value, counts = self.scalar(element), "Counter(" in ast.unparse(element) or bool(self.counts)
        if not counts or value is None or ast.dump(value) == ast.dump(element):
            return None
        made = f"torch.stack([{ast.unparse(value)} for {target.id} in {ast.unparse(source)}])"
        return expression(made), torch.zeros(2)

    def scalar(self, element: ast.expr) -> ast.expr | None:
        """What a list holds, a number or a list again, as a tensor."""
        whole = self.convert(element)
        if whole is not None:
            return whole[0]
        if isinstance(element, ast.ListComp | ast.GeneratorExp | ast.Dict | ast.JoinedStr):
            return None
        if isinstance(element, ast.List | ast.Tuple):
            parts = [self.scalar(one) for one in element.elts]
            inside = ", ".join(ast.unparse(one) for one in parts if one is not None)
            return expression(f"torch.stack([{inside}])") if None not in parts else None
        new = self.visit(without_numbers(element, self.scope))
        return _Choices(self.scope).visit(new)  # type: ignore[no-any-return]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        match node:
            case ast.Call(args=[given], keywords=options) if called in _MADE and {o.arg for o in options} <= {"dtype"}:
                whole = self.convert(given)
                if whole is not None:
                    self.words.append(ast.unparse(node))
                    to = f".to({ast.unparse(options[0].value)})" if options else ""
                    return expression(f"({ast.unparse(whole[0])}){to}")
            case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_], keywords=[ast.keyword(arg="key")]):
                best = self._best(node, name)
                if best is not None:
                    return best
            case ast.Call(func=ast.Name(id=name), args=[given], keywords=[]) if name in _REDUCED:
                whole = None if isinstance(given, ast.Call) else self.convert(without_filter(name, given))
                if whole is not None:
                    self.words.append(ast.unparse(node))
                    counts = name == "len" and isinstance(given, ast.ListComp)
                    return expression(f"({ast.unparse(whole[0])}).{'sum()' if counts else _REDUCED[name]}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get"), args=[key, ast.Constant(value=0)]):
                if name in self.counts:
                    return self._count(self.counts[name], key)
            case ast.Call(args=[edges, value], keywords=[]) if called.rpartition(".")[2] in _BISECTED:
                right, edges = _BISECTED[called.rpartition(".")[2]], self.visit(edges)
                at = ast.unparse(self.visit(value))
                return expression(f"torch.bucketize({at}, torch.as_tensor({ast.unparse(edges)}), right={right})")
            case ast.Call(func=ast.Name(id="list"), args=[ast.Call(func=ast.Name(id="range"), args=[_]) as counter]):
                made = self._range(counter)
                if made is not None:
                    return expression(made)
        return self.generic_visit(node)

    def _best(self, node: ast.Call, name: str) -> ast.expr | None:
        """`max(range(n), key=row.__getitem__)` as `row.argmax()`."""
        key = node.keywords[0].value
        counted = ast.unparse(node.args[0])
        for row in self.known:
            if counted == f"range(len({row}))" and ast.unparse(key) in (f"{row}.__getitem__", f"lambda i: {row}[i]"):
                return expression(f"{row}.arg{name}()")
        return None

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node.value:
            case ast.Name(id=name) if name in self.counts:
                return self._count(self.counts[name], node.slice)
            case ast.Call(func=called, args=[given]) if ast.unparse(called).endswith("Counter"):
                whole = self.convert(given)
                return self._count(ast.unparse(whole[0]), node.slice) if whole is not None else node
        return self.generic_visit(node)

    def _count(self, counted: str, key: ast.expr) -> ast.expr:
        at = ast.unparse(self.visit(copy.deepcopy(key)))
        return expression(f"({counted} == {at}).sum()")


class _Choices(ast.NodeTransformer):
    """`a if c else b` on values as `torch.where`, `not c` and `and` on tensors."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if self.scope.depends_on(node.test) not in ("number", "tensor"):
            return node
        test = predicate(node.test, self.scope)
        return expression(f"torch.where({ast.unparse(test)}, {ast.unparse(node.body)}, {ast.unparse(node.orelse)})")


def _is_elementwise(node: ast.expr, name: str) -> bool:
    """Whether it is arithmetic of each element by itself, so that it means the same of the whole tensor."""
    match node:
        case ast.Name(id=used):
            return used == name
        case ast.Constant(value=int() | float()):
            return True
        case ast.BinOp(left=left, right=right):
            return _is_elementwise(left, name) and _is_elementwise(right, name)
        case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
            return _is_elementwise(operand, name)
        case ast.Compare(left=left, comparators=[right]):
            return _is_elementwise(left, name) and _is_elementwise(right, name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="bucketize"), args=[value, *_]):
            return _is_elementwise(value, name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="where"), args=given):
            return all(_is_elementwise(one, name) for one in given)
    return False


def _evaluate(node: ast.expr, scope: Scope) -> torch.Tensor | None:
    """A sample of the form of `x[..., 0].flatten()`: the tensor is known, and so are the methods and constants."""
    match node:
        case ast.Name() | ast.Attribute():
            held = value_of(node, scope.seen)
            return held if isinstance(held, torch.Tensor) else None
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=given, keywords=options):
            held = _evaluate(owner, scope)
            try:
                plain = [ast.literal_eval(one) for one in given]
                named = {one.arg or "": ast.literal_eval(one.value) for one in options}
                found = getattr(held, name)(*plain, **named) if held is not None else None
            except (ValueError, TypeError, AttributeError, RuntimeError, IndexError):
                return None
            return found if isinstance(found, torch.Tensor) else None
        case ast.Compare(left=left) | ast.BinOp(left=left):
            return _evaluate(left, scope)
        case ast.Subscript(value=owner, slice=at):
            held = _evaluate(owner, scope)
            parts = at.elts if isinstance(at, ast.Tuple) else [at]
            whole = [one for one in parts if isinstance(one, ast.Slice | ast.Constant)]
            if held is None or len(whole) < len(parts):
                return None
            drops = sum(isinstance(one, ast.Constant) and type(one.value) is int for one in parts)
            return held.new_zeros((2,) * (held.ndim - drops))
    return None
