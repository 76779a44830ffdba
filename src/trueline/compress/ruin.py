"""A program that a user chose by hand is sealed whatever it loses. Where it has lost nearly everything, the result says
so: how much, how many decisions are other ones, and which operators are to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueline.compress import gate
from trueline.compress.method import CompressMethod
from trueline.compress.refine import describe_blame
from trueline.compress.sensitivity import rank_operators

if TYPE_CHECKING:
    from trueline.compress.candidate import CompressedCandidate
    from trueline.compress.method import Budget
    from trueline.compress.search import Search

LOST, GROWN = 0.1, 1.0
"""Shares of the parent's metric: a program that surely loses more of an accuracy, or adds more to an error, is
ruined."""
RANKED = ("static", "dynamic", "openvino", "weights")
"""Kinds of which operators can be quantized alone."""
_OWN = 0.9
"""Share of what is lost, from which on the model before quantization is to blame."""


def is_ruined(budget: Budget, parent: float, row: CompressedCandidate) -> bool:
    """Whether `row` has surely lost much of the parent's metric (`parent`)."""
    if row.loss_low is None:
        return False
    return not row.loss_low <= (LOST if budget.larger_is_better else GROWN) * abs(parent)


def explain_ruin(search: Search, row: CompressedCandidate) -> str:
    """What the row has ruined, and by which operators; empty: nothing. Half of the time that is left is for these."""
    reference = search.reference
    if not is_ruined(reference.budget, reference.value, row):
        return ""
    metric, count = reference.budget.metric, reference.count
    lost = f"'{metric}' is {row.metric:.4g}, the parent's is {reference.value:.4g}"
    if row.changed is not None:
        lost += f", and {row.changed} of {count} decisions are other ones"
    parts = [f"{row.name}: {lost}"]
    before = _measure_base(search, row)
    if before:
        parts.append(f"the model before it was quantized loses {before:.4g} of that")
    if row.kind in RANKED and (row.loss is None or before < _OWN * row.loss):
        method = CompressMethod(row.kind, row.words, base=row.base)
        ends = search.clock() + max(0.0, search.ends - search.clock()) / 2
        blame = rank_operators(reference, search.program(row.base), method, ends, search.clock)
        parts.append(describe_blame(blame))
    whole = [one for one in search.rows.values() if _is_better(search, one)]
    if whole:
        best = min(whole, key=search.cost)
        parts.append(f"{best.name} was tried too and loses {best.loss:.4g}")
    return "; ".join([*parts, f"with a budget (--budget {metric}=1%) no such program is sealed"])


def _is_better(search: Search, row: CompressedCandidate) -> bool:
    reference = search.reference
    return row.verdict == "offered" and not is_ruined(reference.budget, reference.value, row)


def _measure_base(search: Search, row: CompressedCandidate) -> float:
    """What the derived model itself has lost; 0 where there is none."""
    if not row.base:
        return 0.0
    reference = search.reference
    session = reference.open(search.bundle_of(row.base).program_path("onnx"), "onnx")
    return gate.judge(reference.budget, reference.answers.values, reference.answer(session).values).loss
