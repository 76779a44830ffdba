"""A trace at other sizes, where that of the example leaves out sizes that the eager model answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from trueline.bundle.signature import Signature
from trueline.capture.export.exported import Exported, Fixed
from trueline.capture.export.torch_export import LoadedProgram
from trueline.capture.model.signature import BATCH
from trueline.capture.proof.far_sizes import FarSizes
from trueline.capture.proof.prove import judge
from trueline.capture.size_limits import find_excluded, settle
from trueline.errors import CaptureError

TRIED = (1, 2, 3, 6, 7, 11, 64)
"""Sizes at which the programs of two traces are compared."""
LARGER = (16, 2)
"""Times the size of the example."""


def widen(far: FarSizes, exported: Exported, export_at: Callable[[Mapping[str, int]], Exported]) -> Exported:
    """`exported`, or the program of a trace at larger sizes where that holds for more: what is 0 or 1 at the example's
    sizes (`int(0.15 * length)`) torch takes for a constant. So it does with what fills up a size (`-height % 8`), where
    the sizes of another example are traced."""
    claim = exported.signature
    base = claim.sizes(far.example)
    missed = {symbol: sizes for symbol in base if (sizes := _find_missed(far, claim, symbol))}
    if not missed:
        return exported
    names = _names(claim, far.eager.calling.presumed)
    for larger in _sizes_to_trace(far, claim, missed):
        try:
            other = settle(
                far, export_at({names[symbol] or symbol: size for symbol, size in {**base, **larger}.items()})
            )
        except CaptureError:
            continue
        claims = [one for one in other.claims if one.allows(one.sizes(far.example)) and _is_as_free(one, claim)]
        for place, widest in enumerate(claims):  # of small sizes the strictest of them may be the right one
            found = replace(other, claims=tuple(claims[place:]), signature=widest)
            loses = find_excluded(widest, far.eager.calling) and not find_excluded(claim, far.eager.calling)
            if not loses and _holds_for_more(far, found, claim, missed):
                return found
    return exported


def _sizes_to_trace(
    far: FarSizes, claim: Signature, missed: Mapping[str, Sequence[int]]
) -> Iterator[Mapping[str, int]]:
    """Those of another example first where the claim is of multiples, of which every larger size is one too."""
    given = {symbol: {*sizes} & far.sizes_of_examples(claim, symbol) for symbol, sizes in missed.items()}
    others = {symbol: max(sizes) for symbol, sizes in given.items() if sizes}
    if any(claim.dims[symbol].multiple_of > 1 for symbol in others):
        yield others
    for factor in LARGER:
        yield {symbol: size for symbol in missed if (size := _enlarge(far, claim, symbol, factor))}


def trace_other_examples(
    far: FarSizes, error: CaptureError, export_at: Callable[[Mapping[str, int]], Exported]
) -> Exported | None:
    """A program traced at the size of another example, after torch.export fixed that of the first: there the code may
    take a special way (`if n != len(self.table): table = interpolate(table, n)`). None where none is free there."""
    presumed = far.eager.calling.presumed
    if not isinstance(error, Fixed) or error.symbol == BATCH or error.symbol not in presumed.symbols:
        return None
    base = presumed.sizes(far.example)
    for size in sorted(far.sizes_of_examples(presumed, error.symbol) - {base[error.symbol]}, reverse=True):
        try:
            return export_at({**base, error.symbol: size})
        except CaptureError:
            continue
    return None


def _holds_for_more(far: FarSizes, other: Exported, claim: Signature, missed: Mapping[str, Sequence[int]]) -> bool:
    """Whether `other` holds for more sizes than `claim`, and agrees with the model at all that are tried."""
    base, program, gained = claim.sizes(far.example), LoadedProgram(other), 0
    for symbol in base:
        for size in {*TRIED, *missed.get(symbol, ()), base[symbol], *far.sizes_of_examples(claim, symbol)}:
            for sizes in _resize(far, claim, symbol, size):
                inside = other.signature.allows(_rename(sizes, claim, other.signature))
                answer = far.ask(claim, symbol, sizes) if inside else None
                if answer is not None and answer.answered and not judge(program, [answer.seen]).proven:
                    return False
                gained += int(answer is not None and answer.answered) - int(claim.allows(sizes))
    return gained > 0


def _is_as_free(other: Signature, claim: Signature) -> bool:
    """Whether `other` has a symbol wherever `claim` has one; those of one name may be two, with a guard on them."""
    return [[isinstance(size, str) for size in spec.shape] for spec in other.inputs] == [
        [isinstance(size, str) for size in spec.shape] for spec in claim.inputs
    ] and all(_names(other, claim).values())


def _names(other: Signature, claim: Signature) -> dict[str, str]:
    """Symbol of `other` -> that of `claim` at its places; empty where it stands at places of several."""
    found: dict[str, str] = {}
    for one, theirs in zip(other.inputs, claim.inputs, strict=True):
        for symbol, name in zip(one.shape, theirs.shape, strict=True):
            if isinstance(symbol, str) and found.setdefault(symbol, str(name)) != name:
                found[symbol] = ""
    return found


def _rename(sizes: Mapping[str, int], claim: Signature, other: Signature) -> dict[str, int]:
    """`sizes` of the symbols of `claim`, by those of `other`."""
    return {symbol: sizes[name] for symbol, name in _names(other, claim).items()}


def _find_missed(far: FarSizes, claim: Signature, symbol: str) -> list[int]:
    """Sizes near the example's, of the other examples and just beyond `claim` that it leaves out, and that the eager
    model answers."""
    base = claim.sizes(far.example)
    step = claim.dims[symbol].multiple_of
    beyond = (claim.dims[symbol].max or 0) // step * step + step
    near = {step, base[symbol] + step, 2 * base[symbol], beyond, *far.sizes_of_examples(claim, symbol)}
    return [
        size
        for size in sorted(near)
        if any(_is_missed(far, claim, symbol, sizes) for sizes in _resize(far, claim, symbol, size))
    ]


def _is_missed(far: FarSizes, claim: Signature, symbol: str, sizes: Mapping[str, int]) -> bool:
    answer = None if claim.allows(sizes) else far.ask(claim, symbol, sizes)
    return answer is not None and answer.answered


def _resize(far: FarSizes, claim: Signature, symbol: str, size: int) -> Iterator[dict[str, int]]:
    """The sizes of the example with another one for `symbol`, alone and with those that are equal to it in all
    examples: a text and its mask."""
    base, names = claim.sizes(far.example), _names(claim, far.eager.calling.presumed)
    yield {**base, symbol: size}
    alike = [other for other, name in names.items() if name and name == names[symbol]]
    if len(alike) > 1:
        yield {**base, **dict.fromkeys(alike, size)}


def _enlarge(far: FarSizes, claim: Signature, symbol: str, factor: int) -> int:
    """`factor` times the example's size, or as much of it as the eager model answers; 0 where that is none."""
    size = claim.sizes(far.example)[symbol]
    while factor > 1:
        answers = (far.ask(claim, symbol, sizes) for sizes in _resize(far, claim, symbol, factor * size))
        if any(answer is not None and answer.answered for answer in answers):
            return factor * size
        factor //= 2
    return 0
