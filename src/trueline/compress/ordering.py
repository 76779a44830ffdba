"""In which order a search tries what it could, so that a search that ends early has found what matters most.

1. one method of each kind, of the parent's own program: nothing has to be trained for these
2. the models that are trained, those that can be faster first; after each the methods that were best so far
3. all other methods, each of all models before the next
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from trueline.compress.method import BY_HAND, MINUTES, UNCHANGED, CompressMethod, Target
from trueline.errors import CaptureError

if TYPE_CHECKING:
    from trueline.compress.apply.contract import ParentProgram
    from trueline.compress.derive.plan import DerivePlan
    from trueline.compress.search import Search

PROMISING = 2
"""Methods that a model that was just trained is quantized by before the next one is trained."""
TRAINING, EARLY = 2 / 3, 1 / 6
"""Of a time limit: for models that are trained, and at most for candidates before and between these."""
_SMALLER = ("channels", "taught")
"""Kinds of plans whose model is smaller than its parent."""
_STORED = ("float16", "bfloat16")
"""Kinds by which a program gets smaller, and never faster."""


@dataclass(frozen=True, slots=True)
class CandidateOrder:
    """What `search` tries. `methods`: what the user named; `budgeted`: whether a budget lets all compete."""

    search: Search
    methods: Sequence[CompressMethod]
    derives: bool
    """Whether models are trained, too."""
    budgeted: bool

    @property
    def competes(self) -> bool:
        """Whether the parent's own program is one of the candidates, beside those of models that are trained."""
        return self.derives and self.budgeted and not self.methods

    def list_early(self) -> list[CompressMethod]:
        """Before anything is trained: the first method of each kind."""
        return _first_of_kinds(list_usual(self.search.program(), self.search.target)) if self.competes else []

    def list_next(self, base: str) -> list[CompressMethod]:
        """As soon as the model `base` is there: itself, and what was best so far of the programs before it."""
        if not (self.derives and self.budgeted):
            return []
        ways = self.methods or self._list_best() or list_usual(self.search.program(base), self.search.target)[:1]
        return [CompressMethod(UNCHANGED, base=base), *(replace(one, base=base) for one in ways)][: 1 + PROMISING]

    def _list_best(self) -> list[CompressMethod]:
        best: dict[str, CompressMethod] = {}
        offered = [row for row in self.search.rows.values() if row.verdict == "offered" and row.kind != UNCHANGED]
        for row in sorted(offered, key=self.search.cost):
            best.setdefault(row.kind, CompressMethod(row.kind, row.words))
        return list(best.values())

    def list_all(self) -> list[CompressMethod]:
        """By hand: the derived models alone, or quantized as the user says. Else every way, of every model; each way of
        all models before the next way, as the time may end."""
        search = self.search
        bases = list(search.bases if self.budgeted else search.finals)
        if self.methods:
            return [replace(method, base=base) for base in (bases if self.derives else [""]) for method in self.methods]
        alone = [CompressMethod(UNCHANGED, base=base) for base in bases]
        if self.derives and not self.budgeted:
            return alone
        ways = [
            [replace(one, base=base) for one in list_usual(search.program(base), search.target)]
            for base in ("", *search.bases)
        ]
        return alone + [one for turn in zip_longest(*ways) for one in turn if one is not None]


def list_usual(program: ParentProgram, target: Target) -> list[CompressMethod]:
    """What a search tries of a program: the first variant of each kind before the second of any. Of a program that has
    its own scales no second way to choose them; what cannot be faster comes last, unless the target is size."""
    from trueline.compress.apply.own_scales import keeps_scales
    from trueline.compress.apply.quantizers import QUANTIZERS
    from trueline.compress.refine import REFINED

    try:
        own = keeps_scales(program)
    except CaptureError:  # each row will say why
        own = False
    usual = {kind: quantizer.list_variants() for kind, quantizer in QUANTIZERS.items() if kind not in BY_HAND}
    ways = {kind: (found[:1] if own and kind in REFINED else found) for kind, found in usual.items()}
    last = [] if target == "size" else [one for kind in _STORED for one in ways.pop(kind, ())]
    return [one for turn in zip_longest(*ways.values()) for one in turn if one is not None] + last


def _first_of_kinds(methods: Sequence[CompressMethod]) -> list[CompressMethod]:
    found: dict[str, CompressMethod] = {}
    for method in methods:
        found.setdefault(method.kind, method)
    return list(found.values())


def sort_chains(chains: Sequence[Sequence[DerivePlan]]) -> list[Sequence[DerivePlan]]:
    """The models that can be faster than the parent's own int8 first: those that are smaller."""
    return sorted(chains, key=lambda chain: not any(plan.kind in _SMALLER for plan in chain))


@dataclass(slots=True)
class TimeShares:
    """Of the time of a search: two thirds are for trainings, the rest for candidates, of which half may be used before
    and between trainings. These end as much later. Without a limit from the user only candidates have one."""

    began: float
    minutes: float | None
    clock: Callable[[], float]
    early_s: float = 0.0
    """That candidates took before and between trainings."""

    @property
    def _limit_s(self) -> float:
        return 60 * (MINUTES if self.minutes is None else self.minutes)

    @property
    def _shift_s(self) -> float:
        return min(self.early_s, EARLY * self._limit_s)

    @property
    def trainings_end(self) -> float:
        return math.inf if self.minutes is None else self.began + TRAINING * self._limit_s + self._shift_s

    @property
    def end(self) -> float:
        """When no further candidate is tried."""
        return self.clock() - self._shift_s + self._limit_s if self.minutes is None else self.began + self._limit_s

    def try_early(self, attempt: Callable[[float], None]) -> None:
        """Calls `attempt` with the time at which it has to end."""
        started = self.clock()
        attempt(started + EARLY * self._limit_s - self._shift_s)
        self.early_s += self.clock() - started
