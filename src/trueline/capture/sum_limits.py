"""What the eager model requires of two sizes together, and no guard of the exporter contains.

A table of 64 positions ends two lengths together (past + new tokens <= 64): each of them may be long while the other is
short. Boxes and their scores are of one number: an index into the one is made of the other. Such conditions are found
on the eager model and become guards of the signature.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from trueline.bundle.guards import Guard
from trueline.bundle.signature import Signature
from trueline.capture.export.exported import Exported
from trueline.capture.export.guard_ranges import EQUAL
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.signature import BATCH
from trueline.capture.proof.probes import fit, resize

LARGEST = 4096
"""Sizes up to which a limit is looked for."""
BUDGET_S, CHEAP_CALLS = 2.0, 200
"""Seconds for it, and cheap calls beside them; a model that needs more is not asked at larger sizes."""
Limits = Mapping[tuple[str, str], int]
"""Two symbols, and the largest sum of their sizes."""


def find_limits(eager: EagerSession, claim: Signature) -> Limits:
    """The limits of the eager model on each two symbols of `claim`."""
    allowance = Allowance(BUDGET_S, CHEAP_CALLS)
    pairs = itertools.combinations([symbol for symbol in claim.symbols if symbol != BATCH], 2)
    tied = [set(guard.symbols) for guard in claim.guards if guard.rule == EQUAL]
    found = {pair: _find_sum(eager, claim, *pair, allowance) for pair in pairs if set(pair) not in tied}
    return {pair: most for pair, most in found.items() if most is not None}


def bound_sums(claim: Signature, limits: Limits) -> Signature:
    """`claim` with a guard for each of the limits."""
    for (one, other), most in limits.items():
        claim = _add_guard(claim, one, other, most)
    return claim


def bound_exported(eager: EagerSession, exported: Exported) -> Exported:
    """`exported` with these guards, and sizes beside them to be probed."""
    limits, base = find_limits(eager, exported.claims[0]), exported.claims[0].sizes(eager.example)
    boundaries = dict(exported.boundaries)
    for (one, other), most in limits.items():
        for symbol, another in ((one, other), (other, one)):
            boundaries[symbol] = (*boundaries.get(symbol, ()), most - base[another])
    claims = tuple(bound_sums(claim, limits) for claim in exported.claims)
    at = exported.claims.index(exported.signature)
    return replace(exported, claims=claims, signature=claims[at], boundaries=boundaries)


def tie_sizes(eager: EagerSession, exported: Exported) -> Exported:
    """`exported` with a guard on each two sizes that are equal in all examples, where the eager model answers a change
    of both, and of neither alone. Further claims have it on all of these: a kernel of torch may answer keys and values
    of different lengths, which no other runtime takes."""
    alike = eager.calling.find_alike(exported.claims[0].inputs)
    if not alike:
        return exported
    guards = [Guard(text=f"{one} == {other}", rule=EQUAL, symbols=(one, other)) for other, one in alike.items()]
    tied = [guard for guard in guards if _are_tied(eager, exported.claims[0], *guard.symbols)]
    claims = tuple(_add_guards(claim, tied) for claim in exported.claims)
    further = [one for one in (_add_guards(claim, guards) for claim in claims) if one not in claims]
    at = exported.claims.index(exported.signature)
    return replace(exported, claims=(*claims, *further), signature=claims[at])


def _add_guards(claim: Signature, guards: Sequence[Guard]) -> Signature:
    return msgspec.structs.replace(
        claim, guards=(*claim.guards, *(guard for guard in guards if guard not in claim.guards))
    )


def _are_tied(eager: EagerSession, claim: Signature, one: str, other: str) -> bool:
    base = claim.sizes(eager.example)
    base = fit(claim, base, {BATCH: 1}) or base
    larger, smaller = 2 * base[one], max(base[one] // 2, 1)

    def answers(first: int, second: int) -> bool:
        return _answers(eager, claim, {**base, one: first, other: second})

    if base[one] != base[other] or not answers(larger, larger):
        return False
    alone = [(larger, base[one]), (base[one], larger), (smaller, base[one]), (base[one], smaller)]
    return sum(answers(*pair) for pair in alone) <= len(alone) // 2


def _answers(eager: EagerSession, claim: Signature, sizes: Mapping[str, int]) -> bool:
    if not claim.allows(sizes):
        return False
    try:
        eager.run(resize(eager.example, claim, sizes))
    except Exception:  # noqa: BLE001 - the user's forward at sizes it may not accept may raise anything
        return False
    return True


def _add_guard(claim: Signature, one: str, other: str, most: int) -> Signature:
    guard = Guard(text=f"{one} + {other} <= {most}", rule=f"d0 + d1 <= {most}", symbols=(one, other))
    dims = dict(claim.dims)
    for symbol, another in ((one, other), (other, one)):
        dim = dims[symbol]
        largest = (most - dims[another].min) // dim.multiple_of * dim.multiple_of
        dims[symbol] = msgspec.structs.replace(dim, max=largest if dim.max is None else min(dim.max, largest))
    return msgspec.structs.replace(claim, dims=dims, guards=(*claim.guards, guard))


def _find_sum(eager: EagerSession, claim: Signature, one: str, other: str, allowance: Allowance) -> int | None:
    """The largest sum of two sizes that the model answers; None where the two have no such limit, or no time was left
    to find it."""
    base = claim.sizes(eager.example)
    base = fit(claim, base, {BATCH: 1}) or base

    def answers(first: int, second: int) -> bool:
        with allowance.charging():
            return _answers(eager, claim, {**base, one: first, other: second})

    here, there = base[one], base[other]
    if not answers(here, there):
        return None
    high = _largest(lambda size: allowance.allows() and answers(size, there), here)
    wide = _largest(lambda size: allowance.allows() and answers(here, size), there)
    if high is None or wide is None or high + there != here + wide or not allowance.allows():
        return None  # else it is confirmed, whatever time that takes
    most = high + there
    middle = (here + high) // 2
    along = [(middle, most - middle), (most - 1, 1), (1, most - 1)]
    inside = [pair for pair in along if claim.allows({**base, one: pair[0], other: pair[1]})]
    if not inside or not all(answers(*pair) for pair in inside):
        return None
    beyond = [(first + 1, second) for first, second in inside] + [(first, second + 1) for first, second in inside]
    tested = [pair for pair in beyond if claim.allows({**base, one: pair[0], other: pair[1]})]
    return None if not tested or any(answers(*pair) for pair in tested) else most  # a guard may tie the two already


def _largest(fine: Callable[[int], bool], good: int) -> int | None:
    """The largest fine size from `good` on; None where no end was found."""
    bad = 2 * good
    while fine(bad):
        good, bad = bad, 2 * bad
        if bad > LARGEST:
            return None
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fine(middle) else (good, middle)
    return good
