"""Sizes far beyond the usual probes: the eager model runs at 64, 128, … up to 4,096, and around the numbers that its
own code compares sizes with.

A call is made only if time and memory are left for it, judged by the smaller ones. The model is called on its example's
records, repeated, and on the same 64 times smaller, where a loop or a bound for large values hides no factor; at the
largest size on the same in a random order, so that an answer which depends on a record's position shows.
"""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from trueline.bundle.signature import Array, Signature
from trueline.capture.model import code_paths
from trueline.capture.model.allowance import CHEAP_S, Allowance
from trueline.capture.model.code_paths import Edge
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.observe import Observation, observe_one, with_arbiter
from trueline.capture.proof.probes import Probe, counting, is_mask, resize

FIRST, LARGEST = 64, 4096
"""The first size that is far, and the last: larger ones take minutes."""
TOGETHER, PAIRED = "together", "paired"
"""In place of a symbol, where several are far: all, or two."""
GIVEN, MIXED, SMALL = "as given", "in another order", "64 times smaller"
"""The records of the example: as they are, they and their steps in a random order, their floats divided."""
MOST, LEAST = "with its largest whole numbers", "with its smallest whole numbers"
"""The same with each mask all 1 or all 0, and each other whole number the largest or smallest of its input: a position
that counts what a mask shows ends a length earlier than the example does."""
SMALLER = 64
FREE_S, UNROLLED_S = 0.5, 4.0
"""Seconds for the sizes of one symbol; where code was unrolled over it, the claim ends with them."""
CHEAP_CALLS = 600
"""Calls of model and program at sizes of one symbol that are made without time, where they are cheap."""
DEAR_S = 20.0
"""Seconds for the few calls of a symbol without which its claim had no end that was looked at, where one call alone
takes longer than all of its time."""
DEAR_TIMES = 8
"""How many times as large tensors such a call may have."""
MAX_VALUES = 1 << 24
"""Numbers in the inputs of one call."""
MAX_BYTES = 1 << 27
"""Bytes of the largest tensor in one call."""
NEAR = 1.25
"""Up to this many times a size at which the tensors of a call were measured, they are not measured again: to follow
each operator takes several times what a small one takes."""
_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class FarAnswer:
    """What the model did at far sizes."""

    seen: Observation
    edges: frozenset[Edge]
    """The steps of the user's code."""
    cost: tuple[float, int]
    """Seconds, and bytes of the largest tensor."""
    measured: bool
    """Whether its tensors were; else their bytes are those of a size near it."""

    @property
    def answered(self) -> bool:
        return self.seen.outputs is not None


class FarSizes:
    """The eager model at far sizes. It runs once at each."""

    def __init__(self, eager: EagerSession) -> None:
        self.eager = eager
        self.unrolled: frozenset[str] = frozenset()
        """Symbols that get more time."""
        self._allowances: dict[str, Allowance] = {}
        self._dear: dict[str, Allowance] = {}
        self._answers: dict[tuple[str, tuple[tuple[str, int], ...], str], FarAnswer] = {}

    @cached_property
    def example(self) -> dict[str, Array]:
        """The example by name."""
        return self.eager.example

    def sizes_of_examples(self, claim: Signature, symbol: str) -> set[int]:
        """The sizes of `symbol` in the user's examples."""
        name, axis = claim.symbols[symbol]
        at = [spec.name for spec in claim.inputs].index(name)
        return {int(batch[at].shape[axis]) for batch in self.eager.calling.batches}

    def allowance(self, symbol: str) -> Allowance:
        """What calls at sizes of `symbol` may still cost."""
        unrolled = bool(self.unrolled) if symbol in (TOGETHER, PAIRED) else symbol in self.unrolled
        found = self._allowances.setdefault(symbol, Allowance(FREE_S, CHEAP_CALLS))
        found.seconds = UNROLLED_S if unrolled else FREE_S
        return found

    def renew(self, symbol: str) -> None:
        """Gives `symbol` its whole time again."""
        self._allowances.pop(symbol, None)

    def time_left(self, symbol: str) -> float:
        """Seconds that are left for `symbol`; above 0 as long as cheap calls are."""
        allowance = self.allowance(symbol)
        return max(allowance.find_left(), CHEAP_S if allowance.allows() else 0.0)

    def ask(
        self,
        claim: Signature,
        symbol: str,
        sizes: Mapping[str, int],
        *,
        how: str = GIVEN,
        share: float = 1.0,
        dear: bool = False,
    ) -> FarAnswer | None:
        """The answer at `sizes`, which cost time of `symbol`; None where there is too little time or memory for it.
        `how`: GIVEN, MIXED, SMALL (None without floats), MOST or LEAST. `share`: of the time. Where several symbols are
        far, `symbol` is TOGETHER or PAIRED, and the largest of their sizes counts. `dear`: one of few calls, which have
        more time and memory."""
        key = (symbol, tuple(sizes.items()), how)
        if key not in self._answers:
            allowance, times = self.allowance(symbol), 1
            if dear:
                allowance, times = self._dear.setdefault(symbol, Allowance(DEAR_S, 0)), DEAR_TIMES
            seconds, largest = self._predict(symbol, _far_size(symbol, sizes))
            many = largest > times * MAX_BYTES or self._count_values(claim, sizes) > times * MAX_VALUES
            if many or not allowance.allows(seconds or None, share=share):
                return None
            inputs, left = self._lengthen(resize(self.example, claim, sizes), sizes), allowance.find_left(share)
            if how == SMALL and not any(_is_float(one) for one in inputs.values()):
                return None
            changed = self._change(inputs, claim, how)
            with allowance.charging():
                answer = self._call(sizes, changed, left, how, known=self._near(symbol, sizes))
            if answer is None:
                return None
            self._answers[key] = answer
        return self._answers[key]

    def _change(self, inputs: dict[str, Array], claim: Signature, how: str) -> Mapping[str, Array]:
        if how in (MOST, LEAST):
            return {name: _level(one, self.example[name], how) for name, one in inputs.items()}
        return {GIVEN: lambda: inputs, MIXED: lambda: _mix(inputs, claim), SMALL: lambda: _shrink(inputs)}[how]()

    @property
    def has_whole(self) -> bool:
        """Whether an input holds whole numbers or booleans."""
        return any(one.dtype.kind in "iub" and one.ndim for one in self.example.values())

    @cached_property
    def _lengths(self) -> dict[str, str]:
        """Inputs of one whole number for each record, whose largest is the size of a symbol in every example; of these
        the symbol. One example may be an accident."""
        presumed, examples = self.eager.calling.presumed, self.eager.examples
        all_sizes = [presumed.sizes(one) for one in examples]
        if not all_sizes[0]:
            return {}
        found = {}
        for spec in presumed.inputs:
            if spec.shape == (counting(all_sizes[0]),) and self.example[spec.name].dtype.kind in "iu":
                most = [int(one[spec.name].max(initial=0)) for one in examples]
                ends = (symbol for symbol in all_sizes[0] if most == [sizes[symbol] for sizes in all_sizes])
                symbol = next(ends, None) if len(set(most)) > 1 else None
                if symbol is not None:
                    found[spec.name] = symbol
        return found

    def _lengthen(self, inputs: dict[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
        """`inputs` with the largest length at its size, as in the examples."""
        for name, symbol in self._lengths.items():
            if symbol in sizes:
                numbers = inputs[name]
                inputs[name] = np.where(numbers == numbers.max(initial=0), sizes[symbol], numbers).astype(numbers.dtype)
        return inputs

    def _count_values(self, claim: Signature, sizes: Mapping[str, int]) -> int:
        """Of all inputs at `sizes`, before they are made: four far sizes of one input are 64 GiB."""
        total = 0
        for spec in claim.inputs:
            axes = zip(spec.shape, self.example[spec.name].shape, strict=True)
            total += math.prod(sizes.get(name, size) if isinstance(name, str) else size for name, size in axes)
        return total

    def _near(self, symbol: str, sizes: Mapping[str, int]) -> int | None:
        """Bytes of the largest tensor at `sizes`, by a size of the symbol that is nearly as large; None where none was
        measured, or several symbols are far."""
        if symbol in (TOGETHER, PAIRED):
            return None
        size, costs = sizes[symbol], self._costs(symbol)
        near = max((one for one in costs if one <= size <= NEAR * one), default=0)
        return costs[near][1] * size // near if near else None

    def _call(
        self, sizes: Mapping[str, int], inputs: Mapping[str, Array], left: float, how: str, *, known: int | None
    ) -> FarAnswer | None:
        named = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
        probe = Probe(
            name=f"{named}, {how}",
            origin="given" if how == GIVEN else "made",
            num_records=next(iter(sizes.values())),
            inputs=inputs,
            wild=how == MIXED,  # what a mask in another order hides may be everything
        )
        started, memory = time.thread_time(), _LargestTensor()
        try:
            with ExitStack() as stack:
                edges = stack.enter_context(code_paths.watch_edges(max(left, 0.1)))
                if known is None:
                    stack.enter_context(memory)
                seen = observe_one(self.eager, probe, watched=False)
        except code_paths.TooSlow:
            return None
        if any(word in seen.error for word in _MEMORY) or "MemoryError" in seen.error:
            return None
        # where the usual tolerance is not enough, float64 tells how far rounding takes the model
        cost = time.thread_time() - started, memory.num_bytes if known is None else known
        seen = with_arbiter(self.eager, seen)
        return FarAnswer(seen=seen, edges=frozenset(edges), cost=cost, measured=known is None)

    def _costs(self, symbol: str) -> dict[int, tuple[float, int]]:
        """By the size, of the calls whose tensors were measured: others take less time."""
        measured = (one for one in self._answers.items() if one[1].measured and one[1].answered)
        return {_far_size(symbol, dict(sizes)): one.cost for (other, sizes, _), one in measured if other == symbol}

    def _predict(self, symbol: str, size: int) -> tuple[float, float]:
        """Seconds and bytes of a call at `size`, from the calls at smaller sizes of the symbol, or else at the next."""
        asked = self._costs(symbol)
        below = [one for one in asked if one < size]
        if not below:
            return (asked[min(asked)][0] * size / min(asked), 0.0) if asked else (0.0, 0.0)
        last = max(below)  # of two sizes that are near each other, noise alone would tell
        before = max((one for one in below if 2 * one <= last), default=min(below))
        return tuple(  # type: ignore[return-value]
            _extrapolate((before, asked[before][i]), (last, asked[last][i]), size) for i in (0, 1)
        )


def _far_size(symbol: str, sizes: Mapping[str, int]) -> int:
    return max(sizes.values()) if symbol in (TOGETHER, PAIRED) else sizes[symbol]


def _extrapolate(before: tuple[int, float], last: tuple[int, float], size: int) -> float:
    """At `size`, of what grows by a power of the size, or linearly beside a constant part; linearly where one size is
    known."""
    steps, growth = last[0] - before[0], last[1] - before[1]
    if not steps:
        return float(last[1] * size / max(last[0], 1))
    if growth > 0 and before[0] > 0 and before[1] > 0.005:
        power = math.log(last[1] / before[1]) / math.log(last[0] / before[0])
        if power > 1:
            return float(last[1] * (size / last[0]) ** min(power, 4.0))
    return last[1] + max(growth, 0) / steps * (size - last[0])


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f"


def _level(array: Array, shown: Array, how: str) -> Array:
    """Whole numbers at one end of what is `shown`, also of a length that was made as large as its size."""
    if array.dtype.kind not in "iub" or not array.size or not shown.size:
        return array
    if is_mask(shown):
        return np.full_like(array, how == MOST)
    return np.full_like(array, array.max() if how == MOST else min(array.min(), shown.min()))


def _shrink(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.divide(one, SMALLER, dtype=one.dtype) if _is_float(one) else one for name, one in inputs.items()}


def _mix(inputs: Mapping[str, Array], claim: Signature) -> dict[str, Array]:
    """The same in a random order along each free dimension, equal for all inputs that have it."""
    random = np.random.default_rng(0)
    orders = {symbol: random.permutation(size) for symbol, size in claim.sizes(inputs).items()}
    mixed = dict(inputs)
    for spec in claim.inputs:
        for axis, symbol in enumerate(spec.shape):
            if isinstance(symbol, str) and symbol in orders:
                mixed[spec.name] = np.take(mixed[spec.name], orders[symbol], axis=axis)
    return mixed


class _LargestTensor(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes the bytes of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self.num_bytes = max(self.num_bytes, leaf.numel() * leaf.element_size())
        return result


def far_sizes(step: int = 1) -> tuple[int, ...]:
    """64, 128, … in multiples of `step`."""
    powers = (FIRST << power for power in range(LARGEST.bit_length()))
    return tuple(dict.fromkeys(size - size % step for size in powers if step <= size <= LARGEST))
