"""Is a sealed bundle right? Judged without the project's own comparison, by questions it was never asked.

The reference is a fresh copy of the eager model; its answer in float64, those of copies whose weights and inputs were
rounded otherwise, and those with each operator's result rounded otherwise, show its own error. A program may be off by
a small multiple of that error, or by some units in the last place of the column's own scale. Questions have sizes
inside the claim far beyond those of an example, come in any order, hundreds of times, with NaN and infinity, and with
indices outside of tables.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from bench.attack.edges import edges
from bench.attack.subject import FAMILIES, Answer, Array, Model, Subject, draw, shake

OWN, FLOOR, HALF_FLOOR = 16, 64, 8
"""A number may be off by OWN times the model's own error in its column, or by FLOOR units in the last place of the
column's largest number (HALF_FLOOR of half precision)."""
PARTED = 2.0**-4
ROUNDED = 6
"""Answers with each operator's result rounded at random."""
JUMPS, BORDERS = re.compile(r"answers (may )?jump"), 48
"""How capture says that a rounded number decides an answer; then this many more answers tell whether one does here."""
SIZES = (1, 2, 3, 5, 8, 16, 31, 33, 48, 50, 51, 64, 65, 77, 100, 101, 128, 129, 151, 257, 1000, 4096)
CALLS = 400
SLOW_S = 1.0
"""Sizes that would take longer, at a cost that grows with their square, are left out."""


class Program(Protocol):
    """A sealed program: what it claims, and its answers."""

    @property
    def dims(self) -> Mapping[str, Sequence[int | str]]:
        """The shape of each input."""
        ...

    def claims(self, arrays: Mapping[str, Array]) -> bool:
        """Whether it claims to answer `arrays`."""
        ...

    def answer(self, arrays: Mapping[str, Array]) -> Answer: ...


@dataclass
class Verdict:
    """What is wrong with a program; empty lists for one that is right."""

    wrong: list[str] = field(default_factory=list)
    """`kind: what`: values, state, claim, index or fast path."""
    wrong_nonfinite: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)
    """Examples of the user, and batch 1, outside the claim."""
    asked: int = 0

    @property
    def kinds(self) -> set[str]:
        return {what.partition(":")[0] for what in self.wrong}


def judge(
    subject: Subject, program: Program, *, seed: int = 0, calls: int = CALLS, words: str = "", extremes: bool = False
) -> Verdict:
    """Puts all questions; stops at the first wrong answer of each kind. `words` is what capture said; with `extremes`
    numbers at the ends of what floats and integers are, too."""
    return _Judge(subject, program, np.random.default_rng(seed), Verdict(), words).all(calls, extremes=extremes)


@dataclass
class _Judge:
    subject: Subject
    program: Program
    random: np.random.Generator
    found: Verdict
    words: str

    def all(self, calls: int, *, extremes: bool = False) -> Verdict:
        self.examples = self.subject.examples()
        self.symbols = self._symbols(self.examples[0])
        self.narrow()
        self.base = next((dict(e) for e in self.examples if self.program.claims(e)), None)
        for part in (self.sizes, lambda: self.calls(calls), self.indices, self.nonfinite):
            part()
        for what, arrays in edges(self.base, self.random) if extremes and self.base else ():
            self.put(arrays, what)
        return self.found

    def _symbols(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        return {
            symbol: arrays[name].shape[axis]
            for name, shape in self.program.dims.items()
            for axis, symbol in enumerate(shape)
            if isinstance(symbol, str)
        }

    def make(self, sizes: Mapping[str, int], how: str) -> dict[str, Array]:
        """Inputs of the family `how`; sizes by the symbols of the program."""
        fields, made = self.subject.fields, {}
        shapes = {
            name: [sizes[d] if isinstance(d, str) else d for d in shape] for name, shape in self.program.dims.items()
        }
        named = {
            axis: size
            for name, shape in shapes.items()
            for axis, size in zip(fields[name].split()[1:], shape, strict=True)
        }
        for name, shape in shapes.items():
            made[name] = draw(fields[name], shape, named, self.random, how)
        return made

    # -- parts

    def narrow(self) -> None:
        for at, example in enumerate(self.examples):
            if not self.program.claims(example):
                self.found.narrow.append(f"example {at + 1}: {_shapes(example)}")
        if self.found.narrow or not self.symbols:
            return
        one = {name: array[:1] for name, array in self.examples[0].items()}
        if not self.program.claims(one) and not isinstance(self.subject.model().answer(one), str):
            self.found.narrow.append("batch 1")

    def sizes(self) -> None:
        """Every symbol far beyond the examples, alone and with others."""
        for example in self.examples:
            if self.program.claims(example):
                self.put(example, "example")
        if not self.symbols:
            for how in FAMILIES:
                self.put(self.make({}, how), how)
        for sizes in self._sizes():
            how = FAMILIES[self.random.integers(len(FAMILIES))]
            self.put(self.make(sizes, how), how)
        for how in dict.fromkeys(FAMILIES):
            self.put(self.make({**self.symbols}, how), how)

    def _sizes(self) -> Iterator[dict[str, int]]:
        for symbol in self.symbols:
            spent, before = 0.0, 1
            for size in SIZES:
                if spent * (size / before) ** 2 > SLOW_S:
                    break
                started = time.process_time()  # neighbours do not change what is asked
                for base in (self.symbols, {**self.symbols, next(iter(self.symbols)): 2}):
                    yield {**base, symbol: size}
                spent, before = time.process_time() - started, size
        for _ in range(12):
            yield {symbol: int(self.random.choice(SIZES[:16])) for symbol in self.symbols}

    def put(self, arrays: Mapping[str, Array], what: str) -> None:
        """One question of finite numbers."""
        if self.found.wrong and "state" not in self.found.kinds:
            return
        if not self.program.claims(arrays):
            return
        self.found.asked += 1
        answer, expected = self.program.answer(arrays), self.subject.fresh(arrays)
        where = f"{what}, {_shapes(arrays)}"
        if isinstance(expected, str):
            if not isinstance(answer, str):
                self.wrong("claim", f"{where}: answers, and the model raises {expected}")
            elif not answer.startswith("RequestError") or self.never(arrays):
                self.wrong("claim", f"{where}: is inside the claim, and the model raises {expected}")
            return
        if isinstance(answer, str):
            self.wrong("claim", f"{where}: the model answers, and the program raises {answer}")
            return
        why = differ(expected, answer)
        if why:
            why = self.compare(arrays, expected, answer)
        if why:
            self.wrong("values" if _finite(expected) else "nonfinite", f"{where}: {why}")
            return
        self.fast_path(arrays, expected, answer, where)

    def never(self, arrays: Mapping[str, Array]) -> bool:
        """Whether the model answers nothing of these sizes: other values, and the example repeated, are refused too."""
        made = [self.make(self._symbols(arrays), how) for how in ("usual", "positive")]
        example = self.examples[0]
        made.append({name: _repeat(example[name], array.shape) for name, array in arrays.items()})
        return all(isinstance(self.subject.fresh(one), str) for one in made)

    def compare(self, arrays: Mapping[str, Array], expected: list[Array], answer: list[Array]) -> str:
        """Why `answer` is wrong by the model's own error; empty when it is right."""
        own = [np.zeros(e.shape) for e in expected]
        why = ""
        for other in self.others(arrays):
            if isinstance(other, str) or [o.shape for o in other] != [e.shape for e in expected]:
                continue
            for at, (e, o) in enumerate(zip(expected, other, strict=True)):
                with np.errstate(invalid="ignore", over="ignore"):
                    own[at] = np.fmax(own[at], np.abs(e.astype(np.float64) - o.astype(np.float64)))
            why = differ(expected, answer, own)
            if not why:
                return ""
        return why or differ(expected, answer)

    def others(self, arrays: Mapping[str, Array]) -> Iterator[Answer]:
        """What the model might as well have answered: in float64, with results rounded otherwise, with inputs and
        weights rounded otherwise, and these more coarsely, where a threshold may be near."""
        for at in range(ROUNDED + 1):
            wide = self.subject.model().widened()
            if wide is not None:
                yield wide.answer(arrays, wide=True, rounded=at)
        for at in range(12):
            scale = 1.0 if at < 4 else 3.0
            yield self.subject.model().shaken(at, scale).answer(shake(arrays, at, scale))
        if JUMPS.search(self.words):  # said to depend on rounding: is it so here?
            for at in range(12, 12 + BORDERS):
                scale = float(2 ** (at % 4))
                yield self.subject.model().shaken(at, scale).answer(shake(arrays, at, scale))
        for at in range(ROUNDED + 1, ROUNDED + 1 + BORDERS):  # `x > 0` of many numbers, some of them near 0
            wide = self.subject.model().widened()
            if wide is not None:
                yield wide.answer(arrays, wide=True, rounded=at)

    def fast_path(self, arrays: Mapping[str, Array], expected: list[Array], answer: list[Array], where: str) -> None:
        """Evaluated as a user does, torch may take another path; capture has to say that it does not."""
        if "Transformer" not in self.subject.text or "fast path" in self.words.replace("fastpath", "fast path"):
            return
        fast = self.subject.model().answer(arrays, fast=True)
        if isinstance(fast, str) or differ(fast, answer, [1e-3 * np.abs(e) + 1e-4 for e in expected]):
            self.wrong("fast path", f"{where}: the model as the user calls it answers otherwise")

    def calls(self, count: int) -> None:
        """A copy that is called `count` times, in changing order, answers as it did first; so does the program."""
        asked = [e for e in self.examples if self.program.claims(e)]
        first_symbol = next(iter(self.symbols), "")
        sizes = [{**self.symbols, first_symbol: size} for size in range(1, 25)] if first_symbol else []
        asked += [a for a in (self.make(one, "usual") for one in sizes) if self.program.claims(a)]
        if self.found.wrong or not asked:
            return
        first = [self.subject.fresh(arrays) for arrays in asked]
        told = [self.program.answer(arrays) for arrays in asked]
        twin = self.subject.model()
        for turn in range(count):
            at = int(self.random.integers(len(asked)))
            again = twin.answer(asked[at])
            if _unlike(first[at], again):
                self.wrong("state", f"call {turn + 1} of one copy answers otherwise than a fresh one")
                return
            if turn < 20 and _unlike(told[at], self.program.answer(asked[at])):
                self.wrong("state", f"call {turn + 1} of the program answers otherwise than its first")
                return

    def indices(self) -> None:
        """What the eager model refuses, a program must not answer; where both answer, they agree."""
        if self.base is None or self.found.wrong:
            return
        for name, kind in self.subject.fields.items():
            if not kind.startswith(("ids", "lengths")):
                continue
            top = int(kind.split()[0].partition(":")[2]) if kind.startswith("ids") else self.base[name].max()
            for value in (-1, -2, -int(top), -int(top) - 1, int(top), int(top) + 1, 10**6, -(10**6), 2**33):
                for everywhere in (False, True):
                    arrays = {n: a.copy() for n, a in self.base.items()}
                    arrays[name][... if everywhere else (0,) * arrays[name].ndim] = value
                    self.outside(arrays, f"{name} = {value}")

    def outside(self, arrays: Mapping[str, Array], what: str) -> None:
        if self.found.wrong or not self.program.claims(arrays):
            return
        answer = self.program.answer(arrays)
        expected = self.subject.fresh(arrays)
        if isinstance(answer, str):  # refused, which the client sees
            return
        if isinstance(expected, str):
            self.wrong("index", f"{what}: answers, and the model raises {expected}")
        elif differ(expected, answer) and _finite(expected):
            why = self.compare(arrays, expected, answer)
            if why:
                self.wrong("index", f"{what}: {why}")

    def nonfinite(self) -> None:
        """NaN and infinities are where the eager model has them, or the program claims finite numbers only."""
        if self.base is None or self.found.wrong:
            return
        for name, array in self.base.items():
            if array.dtype.kind != "f":
                continue
            for value in (np.nan, np.inf, -np.inf):
                for place in _places(array):
                    arrays = {n: a.copy() for n, a in self.base.items()}
                    arrays[name][place] = value
                    self.put_nonfinite(arrays, f"{value} at {name}{_place(place)}")

    def put_nonfinite(self, arrays: Mapping[str, Array], what: str) -> None:
        if self.found.wrong_nonfinite or not self.program.claims(arrays):
            return
        answer, expected = self.program.answer(arrays), self.subject.fresh(arrays)
        if isinstance(answer, str):
            return
        if isinstance(expected, str):
            self.found.wrong_nonfinite.append(f"{what}: answers, and the model raises {expected}")
            return
        why = differ(expected, answer)
        if why:
            why = self.compare(arrays, expected, answer)
        if why:
            self.found.wrong_nonfinite.append(f"{what}: {why}")

    def wrong(self, kind: str, what: str) -> None:
        if kind == "nonfinite":
            if not self.found.wrong_nonfinite:
                self.found.wrong_nonfinite.append(what)
        elif kind not in self.found.kinds:
            self.found.wrong.append(f"{kind}: {what}")


def _repeat(array: Array, shape: Sequence[int]) -> Array:
    """`array` at another shape: its elements again and again along each axis."""
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size) % max(array.shape[axis], 1), axis)
    return array


def differ(expected: Sequence[Array], answer: Sequence[Array], own: Sequence[Array] | None = None) -> str:
    """Where `answer` is not `expected`, in words; empty if it is within the bound."""
    if len(expected) != len(answer):
        return f"{len(answer)} outputs, the model has {len(expected)}"
    for at, (e, a) in enumerate(zip(expected, answer, strict=True)):
        if e.shape != a.shape or e.dtype != a.dtype:
            return f"output {at} is {a.dtype}{list(a.shape)}, the model's {e.dtype}{list(e.shape)}"
        error = None if own is None else own[at]
        why = _differ_floats(e, a, error) if e.dtype.kind == "f" else _differ_exactly(e, a, error)
        if why:
            return f"output {at} {why}"
    return ""


def _differ_exactly(expected: Array, answer: Array, own: Array | None) -> str:
    wrong = expected != answer
    if own is not None:
        wrong &= own == 0
    if not wrong.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"at {list(place)} is {answer[place]}, the model's {expected[place]}"


def _differ_floats(expected: Array, answer: Array, own: Array | None) -> str:
    with np.errstate(all="ignore"):
        good = np.isfinite(expected)
        placed = good | (np.isnan(expected) & np.isnan(answer)) | (expected == answer)
        unclear = np.zeros(expected.shape, bool) if own is None else ~np.isfinite(own)
        wrong = ~placed | (good & ~np.isfinite(answer))
        e = np.where(good, expected, 0).astype(np.float64)
        error = np.abs(np.where(good & np.isfinite(answer), answer, e) - e)
        axes = tuple(range(max(e.ndim - 1, 1))) if e.ndim else ()
        scale = np.abs(e).max(axis=axes, keepdims=True, initial=0.0)
        floor = (HALF_FLOOR if expected.dtype == np.float16 else FLOOR) * np.finfo(expected.dtype).eps * scale
        bound = floor + np.finfo(expected.dtype).tiny
        if own is not None:
            bound = bound + OWN * _spread(np.where(np.isfinite(own), own, 0), scale, axes)
        wrong = (wrong | (error > bound)) & ~unclear
    if not wrong.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    far = float((error / np.broadcast_to(bound, error.shape)).max())
    return f"at {list(place)} is {answer[place]:.9g}, the model's {expected[place]:.9g} ({far:.3g} times what it may)"


def _spread(own: Array, scale: Array, axes: tuple[int, ...]) -> Array:
    """The largest error in the column of each element. One that took another way (PARTED of the scale) excuses itself
    alone."""
    parted = own > PARTED * scale
    spread: Array = np.where(parted, 0, own).max(axis=axes, keepdims=True, initial=0.0)
    return np.maximum(spread, np.where(parted, own, 0))


def _unlike(first: Answer, again: Answer) -> bool:
    if isinstance(first, str) or isinstance(again, str):
        return isinstance(first, str) != isinstance(again, str)
    return bool(differ(first, again))


def _finite(answer: Sequence[Array]) -> bool:
    return all(np.isfinite(a).all() for a in answer if a.dtype.kind == "f")


def _shapes(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


def _places(array: Array) -> list[tuple[Any, ...]]:
    """One number, the last number, a record, a column, everything."""
    zero = (0,) * array.ndim
    return [zero, tuple(size - 1 for size in array.shape), (0,), (..., min(1, array.shape[-1] - 1)), (...,)]


def _place(place: tuple[Any, ...]) -> str:
    return "[" + ", ".join("..." if part is ... else str(part) for part in place) + "]"


Judge = Callable[[Subject, Program], Verdict]
__all__ = ["Judge", "Model", "Program", "Verdict", "differ", "judge"]
