"""Where the claims on sizes end: at the sizes that the eager model answers, and at those that were compared.

A size has no upper bound only where the exported graph has it free, no guard is on it, no Python loop was unrolled over
it, and the user's code takes no other way at the far sizes that were tried, one of them at least. Every other claim
ends at the largest size at which model and program were compared; where they part, the border is found by halving.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from trueline.bundle.signature import Dim, Signature
from trueline.capture.code_numbers import numbers_of, tables_of
from trueline.capture.export.exported import Exported
from trueline.capture.model.code_paths import Edge, edges_of
from trueline.capture.model.signature import BATCH, Calling
from trueline.capture.proof.far_sizes import GIVEN, LARGEST, LEAST, MOST, PAIRED, TOGETHER, FarSizes, far_sizes
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import fit
from trueline.capture.proof.prove import agrees_on_given
from trueline.capture.size_walk import FarProbe, SizeWalk, find_base, find_edge, walk_sizes
from trueline.runtime.session import Session

RANGE_SHARE = 0.4
"""Of a symbol's time, when the search for what the model answers ends."""
NEAR = (8, 16, 32)
"""Sizes of all symbols at once that are tried before the far ones: a limit on their product may lie below those."""


def settle(far: FarSizes, exported: Exported) -> Exported:
    """The claims cut to the sizes that the eager model answers, found by doubling and halving: a table of 64 positions
    ends a length at 64, which no guard contains. The proof refuses a model that cannot answer small batches."""
    takes_all = (at for at, claim in enumerate(exported.claims) if not find_excluded(claim, far.eager.calling))
    claims = list(exported.claims[next(takes_all, 0) :])
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
    base, dim = find_base(claim, far, symbol), claim.dims[symbol]
    here, step = base[symbol], dim.multiple_of

    def answers(size: int, dear: bool = False) -> bool | None:
        found = ask(size, GIVEN, dear)
        return any(ask(size, how, dear) is False for how in ends) is False if found else found

    def ask(size: int, how: str, dear: bool = False) -> bool | None:
        sizes = fit(claim, base, {symbol: size})
        answer = None if sizes is None else far.ask(claim, symbol, sizes, how=how, share=RANGE_SHARE, dear=dear)
        return None if answer is None else answer.answered

    ends = [how for how in (MOST, LEAST) if far.has_whole and symbol != BATCH and ask(here, how)]
    low, tables = dim.min, tables_of(far.eager.module) if symbol != BATCH else []
    answers(here)
    if symbol != BATCH and low < here and answers(low) is False:
        low = find_edge(lambda size: answers(size) is True, here, low, step)
    good = here  # what twice the size costs tells what is constant in a call's cost
    for size in sorted(size for size in {2 * here, *far_sizes(step)} if size > here and size <= (dim.max or size)):
        found = answers(size)
        if found is False:
            return low, find_edge(lambda size: answers(size) is True, good, size, step)
        good = size if found else good
    for size in (rows + beyond for rows in tables for beyond in (0, step) if rows % step == 0):
        if good < size <= (dim.max or size):  # calls are too dear for the doubled sizes
            found = answers(size, dear=True)
            if found is False:
                return low, find_edge(lambda size: answers(size, dear=True) is True, good, size, step)
            good = size if found else good
    return low, dim.max


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
    numbers = numbers_of(far.eager, ways)
    probes: list[FarProbe] = []
    for symbol in signature.symbols:
        dim = signature.dims[symbol]
        reached = walk_sizes(SizeWalk(far=far, program=program, symbol=symbol, known=set(known)), numbers)
        probes += reached.probes
        most = max(reached.high, _largest_seen(signature, symbol, answered))
        if reached.parts:
            signature = _cut(signature, symbol, reached.low, reached.high)
        elif symbol in far.unrolled or (reached.branches and branches) or not reached.asked:
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
    walk = SizeWalk(far=far, program=program, symbol=TOGETHER, known=set())
    far.renew(TOGETHER)  # other formats have other claims, whose calls may have taken all of its time

    def agrees(size: int) -> bool | None:
        sizes = _fit_all(claim, size)
        alone = sizes is None or sum(sizes[symbol] != base[symbol] for symbol in base) < 2  # compared before
        return None if sizes is None or alone else walk.agrees(size, sizes=sizes)

    good = max(base.values())
    for size in (*NEAR, *far_sizes()):
        found = agrees(size) if size > good else None
        if found is False:
            most = find_edge(lambda size: agrees(size) is True, good, size, 1)
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
    walk = SizeWalk(far=far, program=program, symbol=PAIRED, known=set())
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


def observations_of(probes: Sequence[FarProbe], usual: Observation) -> tuple[Observation, ...]:
    """The observations of `probes`, as such that took the way of the `usual` one: theirs were not recorded in order."""
    return tuple(replace(probe.seen, way=usual.way) for probe in probes)


def shorten(exported: Exported, probe: FarProbe) -> Exported:
    """`exported` with claims that end below `probe`, on which a format disagrees."""
    claims = tuple(_cut(claim, probe.symbol, 1, probe.below, probed=True) for claim in exported.claims)
    return replace(exported, claims=claims, signature=claims[exported.claims.index(exported.signature)])
