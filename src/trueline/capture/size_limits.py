"""Where the claims on sizes end: at the sizes that the eager model answers, and at those that were compared.

A size has no upper bound only where the exported graph has it free, no guard is on it, no Python loop was unrolled over
it, and the user's code takes no other way at the far sizes that were tried. Every other claim ends at the largest size
at which model and program were compared; where they part, the border is found by halving.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from trueline.bundle.signature import Dim, Signature
from trueline.capture.export.exported import Exported
from trueline.capture.model.code_paths import Edge, edges_of
from trueline.capture.model.signature import BATCH, Calling
from trueline.capture.proof.far_sizes import (
    FIRST,
    GIVEN,
    LARGEST,
    MIXED,
    PAIRED,
    SMALL,
    TOGETHER,
    FarAnswer,
    FarSizes,
    divide_numbers,
    far_sizes,
    numbers_of,
)
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import fit
from trueline.capture.proof.prove import agrees_on_given, find_verdict
from trueline.runtime.session import Session

QUICK_S = 0.25
"""A free size whose call takes longer is not compared again on each format."""
RANGE_SHARE, DENSE_SHARE, CODE_SHARE = 0.4, 0.6, 0.8
"""Of a symbol's time, when the search for what the model answers ends, then the DENSE sizes, and those around numbers
of the code; the far ones have the rest."""
NEAR = (8, 16, 32)
"""Sizes of all symbols at once that are tried before the far ones: a limit on their product may lie below those."""
DENSE = 130
"""Up to here every size is tried where nothing tells what the code does with them."""


def settle(far: FarSizes, exported: Exported) -> Exported:
    """The claims cut to the sizes that the eager model answers, found by doubling and halving: a table of 64 positions
    ends a length at 64, which no guard contains. The proof refuses a model that cannot answer small batches."""
    claims = list(exported.claims)
    far.unrolled = exported.unrolled
    for symbol in claims[0].symbols:
        low, high = find_range(far, claims[0], symbol)
        claims = [_cut(claim, symbol, low, high) for claim in claims]
    unique = tuple(claim for i, claim in enumerate(claims) if claim not in claims[:i])
    borders = {}
    for symbol, sizes in exported.boundaries.items():
        dim = unique[0].dims[symbol]
        ends = [dim.max, None if dim.max is None else dim.max + 1, dim.min if dim.min > 1 else None]
        given = sorted(far.sizes_of_examples(unique[0], symbol))
        borders[symbol] = (*(size for size in (*ends, *given) if size is not None and size <= LARGEST), *sizes)
    return replace(exported, claims=unique, signature=unique[0], boundaries=borders)


def find_range(far: FarSizes, claim: Signature, symbol: str) -> tuple[int, int | None]:
    """The smallest and the largest size that the model answers; None for the latter when no end was found."""
    base, dim = _base(claim, far, symbol), claim.dims[symbol]
    here, step = base[symbol], dim.multiple_of

    def answers(size: int) -> bool | None:
        sizes = fit(claim, base, {symbol: size})
        answer = None if sizes is None else far.ask(claim, symbol, sizes, share=RANGE_SHARE)
        return None if answer is None else answer.answered

    low = dim.min
    answers(here)
    if symbol != BATCH and low < here and answers(low) is False:
        low = _edge(lambda size: answers(size) is True, here, low, step)
    good = here  # what twice the size costs tells what is constant in a call's cost
    for size in sorted(size for size in {2 * here, *far_sizes(step)} if size > here and size <= (dim.max or size)):
        found = answers(size)
        if found is False:
            return low, _edge(lambda size: answers(size) is True, good, size, step)
        good = size if found else good
    return low, dim.max


def _base(claim: Signature, far: FarSizes, symbol: str) -> dict[str, int]:
    """The sizes of the example; two records are enough where another symbol varies."""
    base = claim.sizes(far.example)
    return base if symbol == BATCH else fit(claim, base, {BATCH: 2}) or base


def _edge(fine: Callable[[int], bool], good: int, bad: int, step: int) -> int:
    """The last fine size from `good` towards `bad`; one that there was no time to try is not fine."""
    while abs(bad - good) > step:
        middle = good + (bad - good) // (2 * step) * step if bad > good else good - (good - bad) // (2 * step) * step
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if fine(middle) else (good, middle)
    return good


def _cut(claim: Signature, symbol: str, low: int, high: int | None, *, probed: bool = False) -> Signature:
    dim = claim.dims[symbol]
    bounds = [bound for bound in (dim.max, high) if bound is not None]
    most = min(bounds, default=None)
    probed = (probed and most != dim.max) or (dim.probed and most == dim.max)
    dims = {**claim.dims, symbol: msgspec.structs.replace(dim, min=max(dim.min, low), max=most, probed=probed)}
    return msgspec.structs.replace(claim, dims=dims)


def find_excluded(claim: Signature, calling: Calling) -> str:
    """The first of the user's examples that `claim` leaves out, in words; empty where it takes all."""
    for number, batch in enumerate(calling.batches, 1):
        sizes: dict[str, int] = {}
        fits = True
        for spec, tensor in zip(claim.inputs, batch, strict=True):
            for named, size in zip(spec.shape, tensor.shape, strict=True):
                fits &= int(size) == (sizes.setdefault(named, int(size)) if isinstance(named, str) else named)
        if not fits or not claim.allows(sizes):
            shapes = {spec.name: list(one.shape) for spec, one in zip(claim.inputs, batch, strict=True)}
            said = [f"{name} {size}" for name, size in (sizes if fits else shapes).items()]
            return f"example {number} ({', '.join(said)})"
    return ""


# ---- what was compared


@dataclass(frozen=True, slots=True, kw_only=True)
class FarProbe:
    """A comparison at a far size of one symbol, to be repeated on the program of each format."""

    symbol: str
    below: int
    """The largest smaller size that was compared."""
    seen: Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """How far the program of one symbol's sizes agrees."""

    low: int
    high: int
    parts: bool
    """Whether the program disagrees above `high`, or the model does not answer."""
    branches: bool
    """Whether the user's code takes steps that no small size takes."""
    probes: tuple[FarProbe, ...]


@dataclass(slots=True, kw_only=True)
class _Walk:
    """The comparison of `program` with the model along the sizes of one symbol."""

    far: FarSizes
    program: Session
    symbol: str
    known: set[Edge]
    """The steps of the user's code at the sizes before."""
    verdicts: dict[tuple[int, str], bool | None] = field(default_factory=dict)
    answers: dict[tuple[int, str], FarAnswer] = field(default_factory=dict)

    def agrees(
        self, size: int, *, sizes: dict[str, int] | None = None, how: str = GIVEN, share: float = 1.0
    ) -> bool | None:
        """Whether the program answers as the model at `size`; None where neither ran, or the claim has it not. `sizes`:
        of all symbols, if not the example's."""
        key = size, how
        if key not in self.verdicts:
            claim = self.program.signature
            sizes = sizes or fit(claim, _base(claim, self.far, self.symbol), {self.symbol: size})
            self.verdicts[key] = self._compare(size, sizes, how, share)
        return self.verdicts[key]

    def _compare(self, size: int, sizes: dict[str, int] | None, how: str, share: float) -> bool | None:
        claim = self.program.signature
        answer = None if sizes is None else self.far.ask(claim, self.symbol, sizes, how=how, share=share)
        if answer is None:
            return None
        self.answers[size, how] = answer
        # many pairs are tried in little time, and where one is another way the answers differ by more than rounding
        seen = replace(answer.seen, arbitrate=None) if self.symbol == PAIRED else answer.seen
        with self.far.allowance(self.symbol).charging():
            verdict, *_ = find_verdict(self.program, seen)
        if verdict == "agrees" and how == GIVEN and self.symbol != PAIRED:
            return self.agrees(size, sizes=sizes, how=SMALL, share=share) is not False
        return None if verdict == "outside" or (how != GIVEN and not answer.answered) else verdict == "agrees"

    def is_plain(self, size: int) -> bool:
        """Whether the program agrees at `size`, and the user's code takes no new step there."""
        return self.agrees(size) is True and not self.takes_new_steps(size)

    def takes_new_steps(self, size: int) -> bool:
        answer = self.answers.get((size, GIVEN))
        return answer is not None and not answer.edges <= self.known


def extend(
    far: FarSizes, exported: Exported, program: Session, observations: Sequence[Observation]
) -> tuple[Exported, tuple[FarProbe, ...]]:
    """The claims cut to the sizes at which `program`, the exported one, was compared, unless they have a reason to
    continue; with the comparisons to repeat on the programs of other formats."""
    if not agrees_on_given(program, observations):
        return exported, ()  # the formats are refused on the usual probes, with the reason
    signature, probes = cut_to_compared(far, program, observations)
    cuts = {symbol: dim for symbol, dim in signature.dims.items() if dim != exported.signature.dims[symbol]}
    claims = list(exported.claims)
    for symbol, dim in cuts.items():
        claims = [_cut(claim, symbol, dim.min, dim.max, probed=dim.probed) for claim in claims]
    at = exported.claims.index(exported.signature)
    return replace(exported, claims=tuple(claims), signature=claims[at]), probes


def cut_to_usual(exported: Exported, observations: Sequence[Observation]) -> Exported:
    """The claims without sizes beyond the usual probes, where code was unrolled over them."""
    claims = exported.claims
    answered = [seen for seen in observations if seen.outputs is not None]
    for symbol in exported.unrolled:
        most = _largest_seen(exported.signature, symbol, answered)
        claims = tuple(_cut(claim, symbol, 1, most, probed=True) for claim in claims)
    return replace(exported, claims=claims, signature=claims[exported.claims.index(exported.signature)])


def cut_to_compared(
    far: FarSizes, program: Session, observations: Sequence[Observation], *, branches: bool = True
) -> tuple[Signature, tuple[FarProbe, ...]]:
    """The claim of `program` cut to the sizes that were compared, but for symbols that are free: no code was unrolled
    over them and, where the program has not all `branches` of the user's code, that takes no new step at a far size."""
    signature = program.signature
    answered = [seen for seen in observations if seen.outputs is not None]
    if not answered or any(seen.draws is not None for seen in answered):
        return signature, ()  # random answers are compared as distributions, at the usual sizes
    ways = list({id(seen.way): seen.way for seen in answered}.values())
    known = set[Edge]().union(*map(edges_of, ways))
    numbers = numbers_of(far.eager.module, ways)
    probes: list[FarProbe] = []
    for symbol in signature.symbols:
        dim = signature.dims[symbol]
        reached = _walk(_Walk(far=far, program=program, symbol=symbol, known=set(known)), numbers)
        probes += reached.probes
        most = max(reached.high, _largest_seen(signature, symbol, answered))
        if reached.parts:
            signature = _cut(signature, symbol, reached.low, reached.high)
        elif symbol in far.unrolled or (reached.branches and branches):
            signature = _cut(signature, symbol, reached.low, most, probed=True)
        elif reached.low > dim.min:
            signature = _cut(signature, symbol, reached.low, dim.max)
    return _cut_at_pairs(far, program, _cut_together(far, program, signature), numbers), tuple(probes)


def _cut_together(far: FarSizes, program: Session, claim: Signature) -> Signature:
    """`claim`, each of whose sizes was compared alone, cut to where all of them are far and the program agrees: a loop
    that was unrolled may hide `len(x) * len(x[0]) < 2000`, and the shorter side of an image may have a limit."""
    if len(claim.symbols) < 2:
        return claim
    base = claim.sizes(far.example)
    walk = _Walk(far=far, program=program, symbol=TOGETHER, known=set())

    def agrees(size: int) -> bool | None:
        sizes = _fit_all(claim, size)
        return None if sizes is None else walk.agrees(size, sizes=sizes)

    good = max(base.values())
    for size in (*NEAR, *far_sizes()):
        found = agrees(size) if size > good else None
        if found is False:
            most = _edge(lambda size: agrees(size) is True, good, size, 1)
            for symbol, dim in claim.dims.items():
                if symbol in base:
                    claim = _cut(claim, symbol, 1, max(_at_most(most, dim), base[symbol]), probed=True)
            return claim
        good = size if found else good
    return claim


def _fit_all(claim: Signature, size: int) -> dict[str, int] | None:
    """All symbols at `size`, or as far as their own limits allow; the largest of a guard that breaks is halved until it
    holds. None where nothing fits."""
    sizes = {symbol: _at_most(size, claim.dims[symbol]) for symbol in claim.symbols}
    while not claim.allows(sizes):
        broken = next((guard for guard in claim.guards if not guard.holds(sizes)), None)
        if broken is None:
            return None
        largest = max(broken.symbols, key=sizes.__getitem__)
        half = _at_most(sizes[largest] // 2, claim.dims[largest])
        if half >= sizes[largest]:  # its least size breaks the guard, too
            return None
        sizes[largest] = half
    return sizes


def _cut_at_pairs(far: FarSizes, program: Session, claim: Signature, numbers: Sequence[int]) -> Signature:
    """`claim` cut below two sizes of which each agrees alone, while the model goes another way at both:
    `if x.shape[:2] == (93, 1871)`. Tried are the numbers of the user's code and those beside them, numbers that stand
    together first."""
    base = claim.sizes(far.example)
    both = list(itertools.permutations((symbol for symbol in claim.symbols if symbol in base), 2))
    places = sorted(
        itertools.product(range(len(numbers)), repeat=2), key=lambda at: (at[0] == at[1], abs(at[1] - at[0]))
    )
    beside = itertools.product((0, -1, 1), repeat=2)
    walk = _Walk(far=far, program=program, symbol=PAIRED, known=set())
    tries = itertools.takewhile(lambda _: far.time_left(PAIRED) > 0, itertools.product(beside, places, both))
    for tried, (steps, (i, j), pair) in enumerate(tries):
        sizes = base | {pair[0]: numbers[i] + steps[0], pair[1]: numbers[j] + steps[1]}
        if claim.allows(sizes) and walk.agrees(-1 - tried, sizes=sizes) is False:
            far.unrolled |= {PAIRED}  # such a model is tried at all of its numbers
            longer = max(pair, key=sizes.__getitem__)
            claim = _cut(claim, longer, 1, max(sizes[longer] - 1, base[longer]), probed=True)
    return claim


def _at_most(size: int, dim: Dim) -> int:
    """The largest allowed size up to `size`."""
    most = min(size, dim.max or size)
    return max(most - most % dim.multiple_of, dim.min)


def _largest_seen(claim: Signature, symbol: str, observations: Sequence[Observation]) -> int:
    sizes = (claim.sizes(seen.probe.inputs) for seen in observations)
    return max((one[symbol] for one in sizes if claim.allows(one)), default=1)


def _walk(walk: _Walk, numbers: Sequence[int]) -> _Reached:
    """From the example's size up to the largest that time allows, and down to the numbers of the code below it."""
    dim = walk.program.signature.dims[walk.symbol]
    here = _base(walk.program.signature, walk.far, walk.symbol)[walk.symbol]
    doubled = [size for size in far_sizes(dim.multiple_of) if dim.allows(size) and size > here]
    if dim.max is not None and here < dim.max <= LARGEST:
        doubled = sorted({*doubled, dim.max})
    around = {number + step for number in numbers for step in (-1, 0, 1)} - set(doubled) - {here}
    around |= walk.far.sizes_of_examples(walk.program.signature, walk.symbol) - {here}
    if walk.symbol in walk.far.unrolled:  # of another, a guard would tell
        around |= set(divide_numbers(numbers, walk.program.signature)) - set(doubled) - {here}
    shares = dict.fromkeys(range(1, DENSE + 1 if walk.symbol in walk.far.unrolled else 1), DENSE_SHARE)
    shares |= dict.fromkeys(around, CODE_SHARE) | dict.fromkeys(doubled, 1.0)
    shares = {size: share for size, share in sorted(shares.items()) if dim.allows(size) and size != here}
    if walk.agrees(here) is not True:
        return _Reached(low=dim.min, high=here, parts=False, branches=False, probes=())
    walk.known |= walk.answers[here, GIVEN].edges
    low = dim.min
    for size in reversed([size for size in shares if size < here]):
        if walk.agrees(size, share=shares[size]) is False:
            low = _edge(lambda size: walk.agrees(size) is True, here, size, dim.multiple_of)
            break
    reached = [here]
    parts = branches = False
    for size in (size for size in shares if size > here):
        found = walk.agrees(size, share=shares[size])
        if found is False:
            reached.append(_edge(lambda size: walk.agrees(size) is True, reached[-1], size, dim.multiple_of))
            parts = True
            break
        if found and walk.takes_new_steps(size):
            branches = True
            border = _edge(walk.is_plain, reached[-1], size, dim.multiple_of)
            if any(walk.agrees(near) is False for near in (border, border + dim.multiple_of)):
                reached.append(border)
                parts = True
                break
            walk.known |= walk.answers[size, GIVEN].edges
        if found:
            reached.append(size)
    return _with_order(walk, low, reached, parts=parts, branches=branches)


def _with_order(walk: _Walk, low: int, reached: list[int], *, parts: bool, branches: bool) -> _Reached:
    """The same after the comparison in another order of the records, at the largest size at which that agrees too."""
    while len(reached) > 1 and walk.agrees(reached[-1], how=MIXED) is False:
        reached.pop()
        parts = True
    sizes = [size for size in reached[1:] if size in (reached[-1], next((s for s in reached if s >= FIRST), 0))]
    probes, below = [], reached[0]
    for size in sizes:
        asked = [walk.answers[size, how] for how in (GIVEN, SMALL, MIXED) if walk.verdicts.get((size, how))]
        needed = walk.symbol in walk.far.unrolled
        seen = [answer.seen for answer in asked if needed or answer.cost[0] < QUICK_S]
        probes += [FarProbe(symbol=walk.symbol, below=below, seen=one) for one in seen]
        below = size
    return _Reached(low=low, high=reached[-1], parts=parts, branches=branches, probes=tuple(probes))


def observations_of(probes: Sequence[FarProbe], usual: Observation) -> tuple[Observation, ...]:
    """The observations of `probes`, as such that took the way of the `usual` one: theirs were not recorded in order."""
    return tuple(replace(probe.seen, way=usual.way) for probe in probes)


def shorten(exported: Exported, probe: FarProbe) -> Exported:
    """`exported` with claims that end below `probe`, on which a format disagrees."""
    claims = tuple(_cut(claim, probe.symbol, 1, probe.below, probed=True) for claim in exported.claims)
    return replace(exported, claims=claims, signature=claims[exported.claims.index(exported.signature)])
