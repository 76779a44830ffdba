"""Which operators stay in float32, where a method for the whole program loses too much.

First by sensitivity: the 1, 2, 4, ... operators, of all kinds, that alone change the answers most are left out. Then a
Bayesian search (Optuna's tree of Parzen estimators, by ask and tell) chooses for each of the most sensitive operators.
What it has learnt is in the rows that were tried, so a search that was killed continues with all of it. Without Optuna
the first part is all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import msgspec

from trueline import events
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.candidate import CompressedCandidate
from trueline.compress.measure.reference import Reference
from trueline.compress.method import CompressMethod
from trueline.compress.sensitivity import Blame, rank_operators

Rows = dict[str, CompressedCandidate]
REFINED = ("static", "openvino")
"""Kinds of which operators can be left out."""
BLAMED = 5
"""Operators that a row names."""
TRIALS = 24
"""Choices that the Bayesian search tries of one method."""
_CHOSEN = 24
"""Operators that it chooses for; less sensitive ones stay quantized."""
_STARTUP = 4
_REPEATED = 50
"""Choices in a row that were tried before, after which there is nothing new."""
_FAILED, _MOST_OVER = 200.0, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refiner:
    reference: Reference
    rows: Rows
    """Of the search, which tries each method before it takes the next one."""
    cost: Callable[[CompressedCandidate], float]
    """Of a row that keeps the budget, as a share of the parent's."""
    open_program: Callable[[str], ParentProgram]
    """Of a base."""
    ends: float
    clock: Callable[[], float]

    def propose(self, tried: Sequence[CompressMethod]) -> Iterator[CompressMethod]:
        """Methods with operators left out, for each kind and base of `tried` of which no row keeps the budget."""
        for best in self._list_losing(tried):
            yield from self._refine(best)

    def is_needed(self, tried: Sequence[CompressMethod]) -> bool:
        """Whether `propose` has anything to mend, as far as they were tried."""
        return bool(self._list_losing(tried))

    def _list_losing(self, tried: Sequence[CompressMethod]) -> list[CompressedCandidate]:
        """The row that loses least, of each kind and base of which none keeps the budget."""
        groups: dict[tuple[str, str], list[CompressedCandidate]] = {}
        for row in filter(None, (self.rows.get(method.name) for method in tried)):
            if row.kind in REFINED and row.loss is not None:
                groups.setdefault((row.base, row.kind), []).append(row)
        losing = [rows for rows in groups.values() if all(row.verdict == "over budget" for row in rows)]
        return [min(rows, key=lambda row: _or_infinite(row.loss_high)) for rows in losing]

    def _refine(self, best: CompressedCandidate) -> Iterator[CompressMethod]:
        method = CompressMethod(best.kind, best.words, base=best.base)
        half = self.clock() + (self.ends - self.clock()) / 2  # the other half is for trying what is found
        blame = rank_operators(self.reference, self.open_program(best.base), method, half, self.clock)
        ranked = list(blame.operators)
        self.rows[best.name] = msgspec.structs.replace(best, why=f"{best.why}; {describe_blame(blame)}")
        for count in (1, 2, 4, 8, 16, 32):
            if count >= len(ranked):
                break
            fewer = replace(method, exclude=tuple(ranked[:count]))
            yield fewer
            if fewer.name in self.rows and self.rows[fewer.name].verdict == "offered":
                break
        yield from self._choose(method, ranked[:_CHOSEN])

    def _choose(self, method: CompressMethod, operators: Sequence[str]) -> Iterator[CompressMethod]:
        """Asks for which of `operators` stay quantized, and tells what that has cost."""
        if find_spec("optuna") is None:
            events.emit("search.narrowed", why="optuna is not installed: pip install 'trueline[search]'")
            return
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        choices = {name: optuna.distributions.CategoricalDistribution([True, False]) for name in operators}
        known = self._list_known(method, operators)
        done = sum(row.trial > 0 for row in known)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=done, n_startup_trials=_STARTUP))
        for row in known:
            params = {name: name not in row.exclude for name in operators}
            study.add_trial(
                optuna.trial.create_trial(params=params, distributions=choices, value=self._cost_of(row))  # type: ignore[arg-type]  # a dict is invariant
            )
        costs = {frozenset(row.exclude): self._cost_of(row) for row in known}
        repeated = 0
        while done < TRIALS and repeated < _REPEATED:
            trial = study.ask(choices)  # type: ignore[arg-type]  # as above
            left_out = tuple(name for name in operators if not trial.params[name])
            key = frozenset(left_out)
            if key in costs or len(left_out) == len(operators):
                study.tell(trial, costs.get(key, _FAILED))
                repeated += 1
                continue
            repeated, done = 0, done + 1
            asked = replace(method, exclude=left_out, trial=done)
            yield asked
            costs[key] = self._cost_of(self.rows[asked.name])
            study.tell(trial, costs[key])

    def _list_known(self, method: CompressMethod, operators: Sequence[str]) -> list[CompressedCandidate]:
        return [
            row for row in self.rows.values()
            if (row.kind, row.words, row.base) == (method.kind, method.words, method.base)
            and set(row.exclude) <= set(operators)
        ]  # fmt: skip

    def _cost_of(self, row: CompressedCandidate) -> float:
        """Small is good: what keeps the budget by its cost, what does not by how far it is over."""
        if row.verdict in ("offered", "no gain"):
            return self.cost(row)
        if row.loss_high is None:
            return _FAILED
        return 2.0 + min(row.loss_high / self.reference.budget.amount, _MOST_OVER)


def describe_blame(blame: Blame) -> str:
    """Which operators change the answers most.

    >>> describe_blame(Blame({"conv3": 0.5, "conv1": 0.01, "conv2": float("nan")}, {"Conv": 0.6, "Sigmoid": 0.2}))
    'quantized alone, these operators change the answers most: conv3 (0.5), conv1 (0.01); there was time for 2 of 3; \
all of a kind: Conv (0.6), Sigmoid (0.2)'
    >>> describe_blame(Blame({"conv1": float("nan")}))
    'there was no time to quantize operators alone, which would say which ones are to blame: give it more --minutes'
    """
    errors = blame.operators
    measured = [name for name, error in errors.items() if not math.isnan(error)]
    kinds = "; all of a kind: " * bool(blame.kinds) + _list_errors(blame.kinds, list(blame.kinds))
    if not measured:
        return (
            "there was no time to quantize operators alone, which would say which ones are to blame: give it more "
            f"--minutes{kinds}"
        )
    partly = f"; there was time for {len(measured)} of {len(errors)}" if len(measured) < len(errors) else ""
    blamed = _list_errors(errors, measured)
    return f"quantized alone, these operators change the answers most: {blamed}{partly}{kinds}"


def _list_errors(errors: Mapping[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{name} ({errors[name]:.2g})" for name in names[:BLAMED])


def _or_infinite(value: float | None) -> float:
    return float("inf") if value is None else value
