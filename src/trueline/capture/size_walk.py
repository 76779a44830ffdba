"""The sizes of one symbol, from the example's up to the largest that time allows: at each a program is compared with
the eager model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trueline.bundle.signature import Signature
from trueline.capture.code_numbers import divide_numbers
from trueline.capture.model.code_paths import Edge
from trueline.capture.model.signature import BATCH
from trueline.capture.proof.far_sizes import FIRST, GIVEN, LARGEST, MIXED, PAIRED, SMALL, FarAnswer, FarSizes, far_sizes
from trueline.capture.proof.observe import Observation
from trueline.capture.proof.probes import fit
from trueline.capture.proof.prove import find_verdict
from trueline.runtime.session import Session

QUICK_S = 0.25
"""A free size whose call takes longer is not compared again on each format."""
DENSE_SHARE, CODE_SHARE = 0.6, 0.8
"""Of a symbol's time, when the DENSE sizes end, and those around numbers of the code; the far ones have the rest."""
DEAREST_S, NEARER = 8.0, 16
"""Seconds for the one far call of a model whose calls are dear; where that takes longer, the size that is tried."""
DENSE = 130
"""Up to here every size is tried where nothing tells what the code does with them."""


def find_base(claim: Signature, far: FarSizes, symbol: str) -> dict[str, int]:
    """The sizes of the example; two records are enough where another symbol varies."""
    base = claim.sizes(far.example)
    return base if symbol == BATCH else fit(claim, base, {BATCH: 2}) or base


def find_edge(fine: Callable[[int], bool], good: int, bad: int, step: int) -> int:
    """The last fine size from `good` towards `bad`; one that there was no time to try is not fine."""
    while abs(bad - good) > step:
        middle = good + (bad - good) // (2 * step) * step if bad > good else good - (good - bad) // (2 * step) * step
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if fine(middle) else (good, middle)
    return good


@dataclass(frozen=True, slots=True, kw_only=True)
class FarProbe:
    """A comparison at a far size of one symbol, to be repeated on the program of each format."""

    symbol: str
    below: int
    """The largest smaller size that was compared."""
    seen: Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedSizes:
    """How far the program of one symbol's sizes agrees."""

    low: int
    high: int
    parts: bool
    """Whether the program disagrees above `high`, or the model does not answer."""
    branches: bool
    """Whether the user's code takes steps that no small size takes."""
    probes: tuple[FarProbe, ...]
    asked: bool = True
    """Whether a far size was compared, or the claim has none."""


@dataclass(slots=True, kw_only=True)
class SizeWalk:
    """The comparison of `program` with the model along the sizes of one symbol."""

    far: FarSizes
    program: Session
    symbol: str
    known: set[Edge]
    """The steps of the user's code at the sizes before."""
    verdicts: dict[tuple[int, str], bool | None] = field(default_factory=dict)
    answers: dict[tuple[int, str], FarAnswer] = field(default_factory=dict)

    def agrees(
        self,
        size: int,
        *,
        sizes: dict[str, int] | None = None,
        how: str = GIVEN,
        share: float = 1.0,
        dear: bool = False,
    ) -> bool | None:
        """Whether the program answers as the model at `size`; None where neither ran, or the claim has it not. `sizes`:
        of all symbols, if not the example's. `dear`: with more time, as given alone."""
        key = size, how
        if self.verdicts.get(key) is None if dear else key not in self.verdicts:
            claim = self.program.signature
            sizes = sizes or fit(claim, find_base(claim, self.far, self.symbol), {self.symbol: size})
            self.verdicts[key] = self._compare(size, sizes, how, share, dear)
        return self.verdicts[key]

    def _compare(self, size: int, sizes: dict[str, int] | None, how: str, share: float, dear: bool) -> bool | None:
        claim = self.program.signature
        answer = None if sizes is None else self.far.ask(claim, self.symbol, sizes, how=how, share=share, dear=dear)
        if answer is None:
            return None
        self.answers[size, how] = answer
        # many pairs are tried in little time, and where one is another way the answers differ by more than rounding
        seen = replace(answer.seen, arbitrate=None) if self.symbol == PAIRED else answer.seen
        with self.far.allowance(self.symbol).charging():
            verdict, *_ = find_verdict(self.program, seen)
        if verdict == "agrees" and how == GIVEN and self.symbol != PAIRED and not dear:
            return self.agrees(size, sizes=sizes, how=SMALL, share=share) is not False
        return None if verdict == "outside" or (how != GIVEN and not answer.answered) else verdict == "agrees"

    def is_plain(self, size: int) -> bool:
        """Whether the program agrees at `size`, and the user's code takes no new step there."""
        return self.agrees(size) is True and not self.takes_new_steps(size)

    def takes_new_steps(self, size: int) -> bool:
        answer = self.answers.get((size, GIVEN))
        return answer is not None and not answer.edges <= self.known


def walk_sizes(walk: SizeWalk, numbers: Sequence[int]) -> ReachedSizes:
    """From the example's size up to the largest that time allows, and down to the numbers of the code below it."""
    dim = walk.program.signature.dims[walk.symbol]
    here = find_base(walk.program.signature, walk.far, walk.symbol)[walk.symbol]
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
    found = walk.agrees(here, dear=walk.agrees(here) is None)
    if not found:
        asked = found is not None
        return ReachedSizes(low=dim.min, high=here, parts=False, branches=False, probes=(), asked=asked)
    walk.known |= walk.answers[here, GIVEN].edges
    low = dim.min
    for size in reversed([size for size in shares if size < here]):
        if walk.agrees(size, share=shares[size]) is False:
            low = find_edge(lambda size: walk.agrees(size) is True, here, size, dim.multiple_of)
            break
    reached = [here]
    parts = branches = False
    for size in (size for size in shares if size > here):
        found = walk.agrees(size, share=shares[size])
        if found is False:
            reached.append(find_edge(lambda size: walk.agrees(size) is True, reached[-1], size, dim.multiple_of))
            parts = True
            break
        if found and walk.takes_new_steps(size):
            branches = True
            border = find_edge(walk.is_plain, reached[-1], size, dim.multiple_of)
            if any(walk.agrees(near) is False for near in (border, border + dim.multiple_of)):
                reached.append(border)
                parts = True
                break
            walk.known |= walk.answers[size, GIVEN].edges
        if found:
            reached.append(size)
    if parts or branches or max(walk.answers)[0] >= FIRST:  # the keys are a size and the kind of records
        return _with_order(walk, low, reached, parts=parts, branches=branches)
    return _ask_once(walk, low, reached)


def _ask_once(walk: SizeWalk, low: int, reached: list[int]) -> ReachedSizes:
    """The same where no far size was tried, each call being too dear: one is, if there is any room for it. Without one
    the claim ends at what was compared."""
    claim = walk.program.signature
    dim, base = claim.dims[walk.symbol], find_base(claim, walk.far, walk.symbol)
    larger = (size for size in far_sizes(dim.multiple_of) if size > reached[-1] and dim.allows(size))
    size = next((size for size in larger if fit(claim, base, {walk.symbol: size})), 0)
    nearer = NEARER - NEARER % dim.multiple_of
    if walk.answers[reached[0], GIVEN].cost[0] * size > DEAREST_S * reached[0] and reached[-1] < nearer < size:
        size = nearer if dim.allows(nearer) and fit(claim, base, {walk.symbol: nearer}) else size
    found = walk.agrees(size, dear=True) if size else None
    if found is False:
        border = find_edge(lambda size: walk.agrees(size, dear=True) is True, reached[-1], size, dim.multiple_of)
        return replace(_with_order(walk, low, reached, parts=True, branches=False), high=border)
    branches = bool(found) and walk.takes_new_steps(size)
    asked = found is not None or not size
    return replace(_with_order(walk, low, reached, parts=False, branches=branches), asked=asked)


def _with_order(walk: SizeWalk, low: int, reached: list[int], *, parts: bool, branches: bool) -> ReachedSizes:
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
    return ReachedSizes(low=low, high=reached[-1], parts=parts, branches=branches, probes=tuple(probes))
