"""From the guards that torch.export found to what a signature claims: ranges, divisibility, and relations in words.

The exporter writes dozens of guards, most implied by others, and many that are its own assumptions: it treats 0 and 1
as special in every expression. Values decide, so there are several claims, from the widest (no assumptions, no excluded
sizes) to the strictest (all guards), and the prover takes the first that holds. What a set of guards leaves is found by
trying sizes. A guard with fractions (`trunc(0.6 * length) == 3`) becomes the excluded sizes or the range around the
example, in whole numbers, so that every reader of a bundle decides alike: narrower than the guard where it has holes,
never wider. Pure.
"""

import ast
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Dim
from trueline.capture.export.fraction_guards import (
    FUNCTIONS,
    UNREADABLE,
    WholeDivisions,
    WholeNumbers,
    compile_test,
    in_whole_numbers,
)
from trueline.capture.export.guard_assumptions import (
    DENSE,
    HOLES,
    NEAR,
    REMAINDERS,
    assumes,
    comparison,
    is_assumption,
    list_holes,
    may_be_tried,
)
from trueline.capture.export.guard_changes import Columns, breaks_far, changes, combinations, holding, is_certain
from trueline.capture.export.guard_search import find_broken, is_implied

NOWHERE = "0 > 1"
EQUAL = "d0 == d1"
"""The rule of two sizes that have to be equal."""
FAR_HOLES = (128, 256, 512, 900)
FAR_TOGETHER = (64, 260, 520)
TUPLES = 1000
"""Combinations of sizes on which guards between several symbols are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Sizes for which a program is said to hold."""

    dims: dict[str, Dim]
    guards: tuple[Guard, ...]

    def allows(self, sizes: Mapping[str, int]) -> bool:
        inside = all(self.dims[symbol].allows(size) for symbol, size in sizes.items())
        return inside and all(guard.holds(sizes) for guard in self.guards)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedGuards:
    """What the exporter found: guards as source, and the span of each symbol."""

    codes: Sequence[str]
    decided: Collection[str] = ()
    """Those of the codes that are conditions of the user's code."""
    spans: Mapping[str, Dim]
    """By the signature's names; as the exporter has them, its lower bound of 2 included."""
    places: Mapping[tuple[int, int], str | int]
    """Input number and axis -> symbol, or the size of a fixed dimension."""
    names: Mapping[str, str]
    """The exporter's names of symbols -> the signature's."""
    units: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """The exporter's name of a number of units -> the signature's symbol, and its size in one unit."""
    example: Mapping[str, int] = field(default_factory=dict)


def claims(found: ExportedGuards, *, batch: str) -> tuple[Claim, ...]:
    """What may be claimed, from the widest to the strictest."""
    read = [(guard, assumed, code in found.decided) for code in found.codes for guard, assumed in _read(code, found)]
    guards, firm = [guard for guard, *_ in read], [guard for guard, assumed, _ in read if not assumed]
    decided = frozenset(guard for guard, _, users in read if users)
    without_holes = [guard for guard in firm if not _is_hole(guard, found.spans, users=guard in decided)]
    wide = {symbol: _widen(symbol, dim, guards, firm) for symbol, dim in found.spans.items()}
    from_one = {symbol: Dim(min=1 if dim.min <= 2 else dim.min, max=dim.max) for symbol, dim in found.spans.items()}
    from_two = {symbol: from_one[symbol] if symbol == batch else dim for symbol, dim in found.spans.items()}
    made = [
        _reduce(kept, spans, decided)
        for kept, spans in ((without_holes, wide), (firm, wide), (guards, from_one), (guards, from_two))
    ]
    return tuple(claim for i, claim in enumerate(made) if claim not in made[:i])


def claim_alike(
    found: ExportedGuards, alike: Mapping[str, str], made: Sequence[Claim], *, batch: str
) -> tuple[Claim, ...]:
    """Claims with each symbol equal to the one that is `alike` in all of the user's examples, where they allow other
    sizes than `made`: a box around an example has no room for a mask that is as long as each text."""
    if not alike:
        return ()
    places = {place: alike.get(str(symbol), symbol) for place, symbol in found.places.items()}
    names = {theirs: alike.get(ours, ours) for theirs, ours in found.names.items()}
    spans = {symbol: dim for symbol, dim in found.spans.items() if symbol not in alike}
    tied = claims(replace(found, places=places, names=names, spans=spans), batch=batch)
    equal = tuple(Guard(text=f"{one} == {other}", rule=EQUAL, symbols=(one, other)) for other, one in alike.items())
    dims = [one.dims | {other: one.dims[first] for other, first in alike.items()} for one in tied]
    full = [Claim(dims=own, guards=one.guards + equal) for own, one in zip(dims, tied, strict=True)]
    return tuple(one for one in full if not made or one.dims != made[0].dims)


def _is_hole(guard: Guard, spans: Mapping[str, Dim], *, users: bool) -> bool:
    """Whether probes try sizes that it leaves out; `users`: the user's code decides by it."""
    match comparison(guard):
        case ast.NotEq():
            near = not _is_far(guard, spans) and not (users and len(guard.symbols) == 1)
            return near or (users and may_be_tried(guard, spans))
        case ast.Eq():
            return users and len(guard.symbols) == 1 and may_be_tried(guard, spans)
    return False


def _widen(symbol: str, dim: Dim, guards: Sequence[Guard], firm: Sequence[Guard]) -> Dim:
    """The span without a lower end that only an assumption explains."""
    if dim.min <= 2 or len(guards) > len(firm):
        return Dim(min=1, max=dim.max)
    return dim


def unread(found: ExportedGuards) -> frozenset[str]:
    """The symbols in guards that cannot be computed here: nothing tells for which of their sizes a program holds."""
    symbols: set[str] = set()
    for code in found.codes:
        if ".size()" in code and translate(code, found) is None and found.example:
            reader = _Reader(found, FUNCTIONS)
            try:
                tree = reader.visit(ast.parse(code, mode="eval").body)
                compile_test(tree, len(reader.symbols))
            except UNREADABLE:
                sizes = re.findall(r"\[(\d+)\]\.size\(\)\[(\d+)\]", code)
                places = (found.places[int(index), int(axis)] for index, axis in sizes)
                symbols |= {place for place in places if isinstance(place, str)}
    return frozenset(symbols)


def _read(code: str, found: ExportedGuards) -> list[tuple[Guard, bool]]:
    """The guard in whole numbers, as one or several, and whether it is an assumption; none where it is not about sizes.
    Raises ValueError for one about sizes that cannot be expressed."""
    whole = translate(code, found)
    if whole is not None or not found.example:
        return [] if whole is None else [(whole, is_assumption(whole, decided=code in found.decided))]
    reader = _Reader(found, FUNCTIONS)
    try:
        tree = reader.visit(ast.parse(code, mode="eval").body)
        compile_test(tree, len(reader.symbols))
    except UNREADABLE:
        return []  # see `unread`
    several, decided = len(reader.symbols) > 1, code in found.decided
    assumed = assumes(tree) and not (several and decided)
    if not reader.symbols or (assumed and several):
        return []
    steps = {symbol: found.spans[symbol].multiple_of for symbol in reader.symbols}
    whole_ones = in_whole_numbers(tree, reader.symbols, found.example, steps, decided=decided)
    return [(guard, assumed) for guard in whole_ones]


def translate(code: str, found: ExportedGuards) -> Guard | None:
    """The guard `L['x'][0].size()[1] % 4 == 0` in the signature's symbols; None when it is not integer arithmetic on
    sizes (strides, devices): values decide then."""
    reader = _Reader(found)
    try:
        tree = reader.visit(WholeDivisions().visit(ast.parse(code, mode="eval").body))
        shown, symbols = ast.unparse(tree), tuple(reader.symbols)
        rule = ast.unparse(WholeNumbers().visit(tree))
        text = re.sub(r"\bd(\d+)\b", lambda match: symbols[int(match[1])], shown)
        guard = Guard(text=text, rule=rule, symbols=symbols)
        guard.holds(dict.fromkeys(symbols, 4))
    except (SyntaxError, ValueError, KeyError):
        return None
    return guard if symbols else None


class _Reader(ast.NodeTransformer):
    """Puts `d0`, `d1`, ... where the exporter writes the size of an input, or its own symbol."""

    def __init__(self, found: ExportedGuards, known: Collection[str] = ("min", "max", "abs")) -> None:
        self.found = found
        self.known = known
        self.symbols: list[str] = []

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Subscript(slice=ast.Constant(value=int(index))), attr="size")
                ),
                slice=ast.Constant(value=int(axis)),
            ):
                return self._symbol(self.found.places[index, axis])
        raise ValueError(f"{ast.unparse(node)} is no size of an input")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.found.units:
            symbol, step = self.found.units[node.id]
            return ast.BinOp(self._symbol(symbol), ast.FloorDiv(), ast.Constant(step))
        return node if node.id in self.known else self._symbol(self.found.names[node.id])

    def _symbol(self, place: str | int) -> ast.expr:
        if isinstance(place, int):
            return ast.Constant(place)
        if place not in self.symbols:
            self.symbols.append(place)
        return ast.Name(f"d{self.symbols.index(place)}", ast.Load())


def _reduce(guards: Iterable[Guard], spans: Mapping[str, Dim], decided: Collection[Guard] = ()) -> Claim:
    """The same in as few words as the sizes that are tried can tell apart; of the conditions of the user's code,
    `decided`, those are left out that the others certainly imply."""
    # equalities first: they imply most of the rest
    unique = sorted(
        dict.fromkeys(guards), key=lambda one: (not isinstance(comparison(one), ast.Eq), len(one.rule), one.rule)
    )
    dims: dict[str, Dim] = {}
    kept: list[Guard] = []
    for symbol, span in spans.items():
        alone = [guard for guard in unique if guard.symbols == (symbol,)]
        dims[symbol], left = _reduce_one(symbol, span, alone, decided)
        kept += left
    tried: dict[tuple[str, ...], Columns] = {}
    for guard in (guard for guard in unique if len(guard.symbols) > 1):
        involved = [other for other in kept if set(other.symbols) <= set(guard.symbols)]
        if guard.symbols not in tried:
            tried[guard.symbols] = _combinations(guard.symbols, dims)
        sizes = tried[guard.symbols]
        cut = ~holding(guard, sizes)
        for other in involved:
            cut = cut & holding(other, sizes) if cut.any() else cut
        if cut.any() or (not _follows(guard, involved, dims) if guard in decided else _is_far(guard, dims)):
            kept.append(guard)
    pinned = {symbol: size for guard in kept for symbol, size in _find_pinned(guard, dims)}
    if pinned:
        at = {symbol: Dim(min=size, max=size) for symbol, size in pinned.items()}
        return _reduce(unique, {**spans, **at}, decided)
    return Claim(dims=dims, guards=tuple(kept))


def _find_pinned(guard: Guard, dims: Mapping[str, Dim]) -> Iterator[tuple[str, int]]:
    """The symbols of which a guard with several leaves one size, whatever the others are: `(b * n + n - 1) // n == 3`
    says that `b` is 3."""
    if len(guard.symbols) < 2:
        return
    sizes = _combinations(guard.symbols, dims)
    fine = holding(guard, sizes)
    for symbol in guard.symbols:
        left = np.unique(sizes[symbol][fine])
        if len(left) == 1 and fine[sizes[symbol] == left[0]].all() and not fine.all():
            yield symbol, int(left[0])


def _is_far(guard: Guard, dims: Mapping[str, Dim]) -> bool:
    """Whether it excludes only sizes that neither the ones tried here nor a probe meets, `batch * length != 6000` or
    `5 * length != 5000`: nothing would show that it is dropped wrongly."""
    if len(guard.symbols) < 2:
        few = holding(guard, {guard.symbols[0]: np.arange(1, DENSE + 1)})
        return isinstance(comparison(guard), ast.NotEq) and bool(few.all()) and bool(changes(guard))
    if (
        is_assumption(guard, decided=False)
        or is_certain(guard, dims)
        or not holding(guard, _combinations(guard.symbols, dims)).all()
    ):
        return False
    return isinstance(comparison(guard), ast.NotEq) or breaks_far(guard, dims)


def _follows(guard: Guard, kept: Sequence[Guard], dims: Mapping[str, Dim]) -> bool:
    """Whether it is certain that `guard` holds for all sizes in `dims` that keep the guards `kept` on its symbols."""
    at = {symbol: f"d{place}" for place, symbol in enumerate(guard.symbols)}
    rules = [
        re.sub(r"\bd(\d+)\b", lambda match, symbols=other.symbols: at[symbols[int(match[1])]], other.rule)  # type: ignore[misc]
        for other in kept
    ]
    return is_implied(guard.rule, tuple(dims[symbol] for symbol in guard.symbols), tuple(rules))


def _reduce_one(symbol: str, span: Dim, guards: Sequence[Guard], decided: Collection[Guard]) -> tuple[Dim, list[Guard]]:
    """Range and divisibility of one symbol, with the guards that these do not say."""

    def holds(size: int) -> bool:
        return span.allows(size) and all(guard.holds({symbol: size}) for guard in guards)

    tried = _sizes_to_try(span, guards)
    fine = [size for size in tried if holds(size)]
    if not fine:
        return span, list(guards)
    beyond = [size for size in tried if size > fine[-1]]
    upper = span.max
    rules = tuple(guard.rule for guard in guards)
    if beyond and is_implied(NOWHERE, (Dim(min=beyond[0], max=span.max),), rules):
        # the last size that holds: it changes once
        upper = fine[-1] + bisect_left(range(fine[-1] + 1, beyond[0]), True, key=lambda size: not holds(size))
    step = math.gcd(*fine) if len(fine) > 1 else 1
    dim = Dim(min=fine[0], max=upper, multiple_of=step)
    kept: list[Guard] = []
    for guard in guards:
        cut = [size for size in tried if dim.allows(size) and not guard.holds({symbol: size})]
        if any(all(other.holds({symbol: size}) for other in kept) for size in cut) or (
            guard in decided and not _follows(guard, kept, {symbol: dim})
        ):
            kept.append(guard)
    return dim, kept


def _sizes_to_try(span: Dim, guards: Sequence[Guard]) -> list[int]:
    numbers = {int(number) for guard in guards for number in re.findall(r"(?<!d)\b\d{1,9}\b", guard.rule)}
    numbers |= {span.min, span.max or span.min}
    near = {number * factor + step for number in numbers for factor in (1, 2) for step in (-1, 0, 1)}
    powers = {step * 2**power for power in range(8, 21) for step in (1, 3)}
    beside = {size + step for guard in guards for size in changes(guard) for step in (0, 1)}
    return sorted(size for size in {*range(1, DENSE + 1), *near, *powers, *beside} if size >= 1)


def _combinations(symbols: Sequence[str], dims: Mapping[str, Dim]) -> Columns:
    """The smallest sizes of each symbol, and large ones: `batch * length <= 5000` excludes none of the small."""
    each = max(4, int(TUPLES ** (1 / len(symbols))))
    more = max(1, int((2.5 * TUPLES) ** (1 / len(symbols))) - each)
    choices = []
    for symbol in symbols:
        step = dims[symbol].multiple_of
        small = itertools.islice((size for size in range(1, 20 * each) if dims[symbol].allows(size)), each)
        large = (step * 2**power for power in range(20, 4, -max(1, 16 // more)))
        choices.append([*small, *(size for size in large if dims[symbol].allows(size))])
    return combinations(choices, symbols)


def borders(made: Sequence[Claim]) -> dict[str, tuple[int, ...]]:
    """Sizes of each symbol at which a claim changes its answer, on both sides, and the first between two claims."""
    found: dict[str, list[int]] = {}
    for symbol in made[0].dims:
        sizes: list[int] = []
        for claim in reversed(made):
            dim = claim.dims[symbol]
            sizes += [dim.max + 1, dim.max] if dim.max is not None else []
            sizes += [dim.min - 1, dim.min] if dim.min > 2 else []
            sizes += [dim.multiple_of, 3 * dim.multiple_of] if dim.multiple_of > 1 else []
            for guard in (guard for guard in claim.guards if guard.symbols == (symbol,)):
                sizes += _choose_holes([size for size in range(1, NEAR + 1) if not guard.holds({symbol: size})])
        strict, wide = made[-1], made[0]
        between = (size for size in range(1, NEAR + 1) if _alone(wide, symbol, size))
        sizes += _choose_holes([size for size in between if not _alone(strict, symbol, size)])
        found[symbol] = [size for size in dict.fromkeys(sizes) if 1 <= size <= NEAR]
    return {symbol: tuple(sizes) for symbol, sizes in found.items()}


def list_far_holes(found: ExportedGuards, made: Sequence[Claim]) -> list[Mapping[str, int]]:
    """Sizes that only the strictest claim leaves out, by a guard that the user's code decides: also far ones, since
    small ones may be answered alike (`if height == width: image[:, 200:] = 0`)."""
    holes: list[Mapping[str, int]] = []
    for guard in (guard for code in found.decided for guard, _ in _read(code, found)):
        if guard in made[0].guards or guard not in made[-1].guards:
            continue
        dims = {symbol: made[0].dims[symbol] for symbol in guard.symbols}
        tried = [*list_holes(guard, dims)]
        for least in FAR_TOGETHER if len(dims) > 1 else ():
            spans = [
                Dim(min=max(dim.min, least), max=min(dim.max or NEAR, NEAR), multiple_of=dim.multiple_of)
                for dim in dims.values()
            ]
            box = find_broken(guard.rule, tuple(spans))
            tried += [box] if box else []
        holes += [dict(zip(guard.symbols, sizes, strict=True)) for sizes in dict.fromkeys(tried)]
    return holes


def _choose_holes(out: Sequence[int]) -> list[int]:
    """All sizes that a guard leaves out, if they are few; else the first ones and others up to the largest, of one
    remainder after the other."""
    if len(out) <= HOLES:
        return list(out)
    far = [(next((size for size in out if size >= least), 0), turn) for turn, least in enumerate(FAR_HOLES)]
    spread = (size + turn if size + turn in out else size for size, turn in far if size)
    return [*out[: REMAINDERS - 1], *spread]


def _alone(claim: Claim, symbol: str, size: int) -> bool:
    guards = (guard for guard in claim.guards if guard.symbols == (symbol,))
    return claim.dims[symbol].allows(size) and all(guard.holds({symbol: size}) for guard in guards)
