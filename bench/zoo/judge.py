"""Is a captured program right? Compares it with the eager model on a hundred fresh inputs (questions) inside its claim.

Questions for which the eager model raises or returns numbers that are not finite are left out. So are questions at
which the model is ill-conditioned: where rounding its parameters and inputs by one part in ten million changes the
eager output by as much as the program is off, neither can be called right. Both are counted.

Where the model draws random numbers, one output for the same seed is compared first; where it differs, many outputs of
both, by the Kolmogorov-Smirnov test of each element and of some measures of the whole.

A program with explicit state is compared in conversations: the state that it returns goes into the next question, and a
stateful model gets the same questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bench.zoo import fresh
from bench.zoo.entry import Architecture, Array
from scipy import stats
from torch.utils import _pytree as pytree

from trueline.capture.model.signature import as_trained
from trueline.errors import RequestError
from trueline.runtime.session import Session

ATOL, RTOL = 1e-4, 2e-4
"""A number may be off by ATOL + RTOL * the largest magnitude in its record: a little more than the prover allows."""
HALF = 100
"""Times as much of half precision."""
ULP = 1e-7
TRIES = 50
LONGEST = 12
"""Questions of a conversation before it begins again."""
DRAWS, LEVEL = 30, 1e-6
"""Answers of each to one random question, and the chance that equal distributions are taken for different ones."""


@dataclass(slots=True)
class Judgement:
    """What became of the questions put to one program."""

    asked: int = 0
    wrong: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first: str = ""
    """The first wrong answer: sizes, values, difference."""
    sizes: set[tuple[int, ...]] = field(default_factory=set)

    def as_dict(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "wrong": self.wrong,
            "left_out": dict(self.left_out),
            "first": self.first,
            "distinct_sizes": len(self.sizes),
        }


Answer = list[Array] | str
"""The outputs in order, or what was raised."""


class Oracle:
    """The eager model, built separately: changes that capture made to its own copy do not affect it."""

    def __init__(self, architecture: Architecture, *, random: bool = False) -> None:
        self.architecture = architecture
        self.module = architecture.module()
        self.random = random
        self._shaken: list[torch.nn.Module] = []
        self._remembers = not random and self._changes()

    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        """As the model answers first: what it would remember of earlier questions is forgotten."""
        return self._asked(self.architecture.module() if self._remembers else self.module, arrays)

    def remembering(self) -> Callable[[Mapping[str, Array]], Answer]:
        """A model that keeps its state from one question to the next."""
        twin = self.architecture.module()
        return lambda arrays: self._asked(twin, arrays)

    def _changes(self) -> bool:
        """Whether the same question has two answers."""
        twin, arrays = self.architecture.module(), fresh.example(self.architecture)
        first, second = self._asked(twin, arrays), self._asked(twin, arrays)
        if isinstance(first, str) or isinstance(second, str):
            return True
        return any(off(a, b) > 0 for a, b in zip(first, second, strict=True))

    def _asked(self, module: torch.nn.Module, arrays: Mapping[str, Array]) -> Answer:
        given = self.architecture.arguments(arrays)
        try:
            with torch.no_grad(), as_trained():
                if isinstance(given, dict):
                    found = module(**given)
                else:
                    found = module(*given) if isinstance(given, tuple) else module(given)
            leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            return [leaf.detach().numpy().copy() for leaf in leaves]
        except Exception as error:  # noqa: BLE001 - whatever the model raises: it does not answer
            return f"{type(error).__name__}: {error}"

    def moved(self, arrays: Mapping[str, Array], expected: Sequence[Array]) -> list[float]:
        """How far each output moves, relative to its bound, when parameters and inputs are rounded otherwise."""
        if not self._shaken:
            self._shaken = [_shaken(self.architecture.module(), seed) for seed in range(3)]
        farthest = [0.0] * len(expected)
        for seed, module in enumerate(self._shaken):
            random = np.random.default_rng(seed)
            turned = {
                name: (array * (1 + ULP * random.choice((-1, 1), array.shape))).astype(array.dtype)
                if array.dtype.kind == "f"
                else array
                for name, array in arrays.items()
            }
            found = self._asked(module, turned)
            if isinstance(found, str):
                return [np.inf] * len(expected)
            for i, (a, b) in enumerate(zip(expected, found, strict=True)):
                farthest[i] = max(farthest[i], off(a, b))
        return farthest


def _shaken(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                sign = torch.randint(0, 2, weight.shape, generator=random) * 2 - 1
                weight.mul_(1 + ULP * sign)
    return module


def off(expected: Array, found: Array) -> float:
    """The largest error in units of what is allowed; infinite where form or type differ."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if expected.dtype.kind != "f":
        return float("inf") if (expected != found).any() else 0.0
    if not expected.size:
        return 0.0
    a, b = expected.astype(np.float64), found.astype(np.float64)
    if not np.isfinite(b).all():
        return float("inf")
    axes = tuple(range(1, a.ndim))
    bound = ATOL + RTOL * np.abs(a).max(axis=axes, keepdims=True)
    return float((np.abs(a - b) / bound).max()) / (HALF if expected.dtype == np.float16 else 1)


class Conversation:
    """Questions to a program and to a model that remembers, some in a row before both begin again."""

    def __init__(self, session: Session, oracle: Oracle, beginning: Mapping[str, Array]) -> None:
        self.session, self.oracle, self.beginning = session, oracle, beginning
        self.anew()

    def anew(self) -> None:
        self._ask, self.state, self.asked = self.oracle.remembering(), dict(self.beginning), 0

    def expected(self, arrays: Mapping[str, Array]) -> Answer:
        if self.asked == LONGEST:
            self.anew()
        self.asked += 1
        return self._ask(arrays)

    def answer(self, arrays: Mapping[str, Array]) -> list[Array]:
        found = self.session.run({**arrays, **self.state})
        pairs = self.session.signature.state
        self.state = {given: found[left] for given, left in pairs.items()}
        return [array for name, array in found.items() if name not in pairs.values()]


def judged(
    architecture: Architecture,
    oracle: Oracle,
    sessions: Mapping[str, Session],
    *,
    questions: int,
    seed: int,
    beginning: Mapping[str, Array],
) -> dict[str, Judgement]:
    """Puts `questions` fresh questions to every session, each inside what that session claims.

    `beginning` is the state that the model begins with, of a program whose state is explicit.
    """
    found = {name: Judgement() for name in sessions}
    for name, session in sessions.items():
        random = np.random.default_rng([seed, len(architecture.name), *architecture.name.encode()])
        talk = Conversation(session, oracle, beginning) if beginning else None
        for number in range(questions):
            sizes = fresh.sizes_inside(architecture, _inside(session, talk.state if talk else {}), random)
            if sizes is None:
                found[name].left_out["no size is inside"] += questions - number
                break
            for _ in range(TRIES):  # values that the claim excludes are drawn again: a mask that hides a record
                arrays, family = fresh.question(architecture, sizes, random)
                if _inside(session, talk.state if talk else {}, values=True)(arrays):
                    break
            else:
                found[name].left_out["no values are inside"] += 1
                continue
            _put(talk or session, oracle, arrays, f"{sizes}, {family}", found[name])
            found[name].sizes.add(tuple(sizes.values()))
    return found


def _inside(
    session: Session, state: Mapping[str, Array], *, values: bool = False
) -> Callable[[Mapping[str, Array]], bool]:
    """Whether the sizes, or else also the `values`, are what the session claims to hold for."""
    claim = session.signature if values else session.signature.with_rows({})

    def inside(arrays: Mapping[str, Array]) -> bool:
        try:
            claim.check({**arrays, **state})
        except RequestError:
            return False
        return True

    return inside


def _put(asked: Session | Conversation, oracle: Oracle, arrays: dict[str, Array], what: str, found: Judgement) -> None:
    talk = asked if isinstance(asked, Conversation) else None
    torch.manual_seed(found.asked)
    expected = talk.expected(arrays) if talk else oracle.answer(arrays)
    numbers = not isinstance(expected, str) and all(np.isfinite(a).all() for a in expected if a.dtype.kind == "f")
    if isinstance(expected, str) or not numbers:
        found.left_out["eager raises" if isinstance(expected, str) else "eager answers no numbers"] += 1
        if talk:
            talk.anew()
        return
    torch.manual_seed(found.asked)
    found.asked += 1
    try:
        answer = asked.answer(arrays) if isinstance(asked, Conversation) else list(asked.run(arrays).values())
    except Exception as error:  # noqa: BLE001 - where eager answers, whatever a program raises is wrong
        _wrong(found, f"{what}: raises {type(error).__name__}: {str(error)[:300]}")
        return
    if len(answer) != len(expected):
        _wrong(found, f"{what}: {len(answer)} outputs, eager has {len(expected)}")
        return
    errors = [off(a, b) for a, b in zip(expected, answer, strict=True)]
    if max(errors, default=0.0) <= 1:
        return
    if oracle.random and not isinstance(asked, Conversation):
        unlike = _unlike(asked, oracle, arrays)
        if unlike:
            _wrong(found, f"{what}: {unlike}")
        return
    moves = [0.0] if talk else oracle.moved(arrays, expected)  # of a conversation every difference counts
    if not talk and all(error <= 1 or move >= error / 4 for error, move in zip(errors, moves, strict=True)):
        found.asked -= 1
        found.left_out["ill-conditioned"] += 1
        return
    _wrong(found, f"{what}: off by {max(errors):.3g} times the tolerance (eager itself moves by {max(moves):.2g})")


def _unlike(session: Session, oracle: Oracle, arrays: Mapping[str, Array]) -> str:
    """How many answers of the program are drawn otherwise than the model's; empty when no test says so."""
    ours = [oracle.answer(arrays) for _ in range(DRAWS)]
    theirs = [list(session.run(arrays).values()) for _ in range(DRAWS)]
    if any(isinstance(one, str) for one in ours):
        return ""
    least, tests = 1.0, 0
    for at in range(len(ours[0])):
        found = [np.stack([np.asarray(one[at], dtype=np.float64).ravel() for one in many]) for many in (ours, theirs)]
        if found[0].shape != found[1].shape or not np.isfinite(found[1]).all():
            return f"output {at} has another shape, or no numbers"
        bound = ATOL + RTOL * np.abs(found[0]).max(initial=0.0)
        a, b = (np.hstack([one, _measures(one)]) for one in found)
        for moved, way in ((b - bound, "greater"), (b + bound, "less")):  # within the bound nothing counts
            p = stats.ks_2samp(a, moved, axis=0, method="asymp", alternative=way).pvalue
            least, tests = min(least, float(np.min(p, initial=1.0))), tests + p.size
    return f"other distributions (p = {least:.2g} of {tests} tests)" if least < LEVEL / max(tests, 1) else ""


def _measures(many: Array) -> Array:
    """Of each answer: its mean, its extremes, and its middle value."""
    return np.stack([many.mean(1), many.min(1), many.max(1), np.median(many, 1)], 1)


def _wrong(found: Judgement, what: str) -> None:
    found.wrong += 1
    found.first = found.first or what
