"""How a program is run: measured on this machine, with its golden examples, before it is ready.

Three questions, answered by trying: may requests be run together (does an answer depend on its neighbours), how long
does a run take, and is that short enough to run on the event loop itself. A hop to a thread and back costs about
50 us of processor time; a run shorter than INLINE_S is cheaper without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trueline import events
from trueline.bundle.golden import Golden
from trueline.bundle.padding import Padding, fill_up
from trueline.bundle.signature import Dim, Signature
from trueline.runtime.compare import compare
from trueline.runtime.session import Session
from trueline.serve.batching.row_independence import fit, neighbours_matter

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

INLINE_S = 150e-6
_SIZES = (1, 8, 32)
_RUNS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one version runs. `why` says what decided about batching."""

    batch: bool
    why: str
    max_batch: int
    inline_values: int
    """Requests of at most this many input values run on the event loop; 0: none does."""
    latency_s: dict[int, float]
    padding: Padding | None = None
    """How requests of several lengths share a run, where the bundle says that they may and it was found so here."""
    """Median time of a run by rows."""


def batch_symbol(signature: Signature) -> tuple[str | None, str]:
    """The symbol that counts rows in every input and output, or None and why there is none.

    >>> from trueline.bundle.signature import TensorSpec
    >>> x = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
    >>> batch_symbol(Signature(inputs=(x,), outputs=(x,), dims={"batch": Dim()}))
    ('batch', "dimension 'batch' leads every input and output")
    """
    heads = set()
    for spec in (*signature.inputs, *signature.outputs):
        head = spec.shape[0] if spec.shape else None
        if not isinstance(head, str):
            return None, f"'{spec.name}' has no symbolic first dimension"
        if head in spec.shape[1:]:
            return None, f"'{head}' stands in further dimensions of '{spec.name}'"
        heads.add(head)
    if len(heads) != 1:
        return None, f"first dimensions differ: {', '.join(sorted(heads))}"
    symbol = heads.pop()
    return symbol, f"dimension '{symbol}' leads every input and output"


BY_RECORD = "the program goes through a batch one record after the other: alone a request is answered sooner"


def draw_up(session: Session, cases: Sequence[Golden], *, max_batch: int, by_record: bool = False) -> Plan:
    """Measures `session` with golden examples that it has already answered rightly. `by_record`: its maker says that it
    takes a batch no faster than single requests.
    """
    signature = session.signature
    symbol, why = batch_symbol(signature)
    if symbol is None:
        latency = {1: median_s(session, cases[0].inputs)}
        inline = _values(cases[0].inputs) if latency[1] < INLINE_S else 0
        return Plan(batch=False, why=why, max_batch=1, inline_values=inline, latency_s=latency)
    dim = signature.dims[symbol]
    neighbours = BY_RECORD if by_record else neighbours_matter(session, cases, dim)
    bound = max_batch if dim.max is None else min(max_batch, dim.max)
    latency, inline = _curve(session, cases[0].inputs, dim)
    return Plan(
        batch=not neighbours and bound > 1,
        why=neighbours or why,
        max_batch=bound,
        inline_values=inline,
        latency_s=latency,
        padding=None if neighbours else padding_of(session, cases),
    )


def padding_of(session: Session, cases: Sequence[Golden]) -> Padding | None:
    """The bundle's leave to fill sequences up, if the golden examples, twice as long, are answered as before here."""
    signature, tried = session.signature, 0
    if not signature.padded:
        return None
    padding = Padding(signature)
    for case in cases:
        more = {symbol: 2 * size for symbol, size in padding.sizes(case.inputs).items()}
        if not signature.allows({**signature.sizes(case.inputs), **more}):
            continue
        found = padding.cut(session.run(fill_up(signature, case.inputs, more)), case.inputs)
        verdict = compare(case.outputs, {name: found[name] for name in case.outputs})
        if not verdict.agrees:
            events.emit("padding.refused", case=case.case, why=verdict.reason)
            return None
        tried += 1
    return padding if tried else None


def _curve(session: Session, inputs: Mapping[str, Array], dim: Dim) -> tuple[dict[int, float], int]:
    latency: dict[int, float] = {}
    inline = 0
    for wanted in _SIZES:
        rows = fit(wanted, dim)
        if rows is None or rows in latency:
            continue
        sized = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in inputs.items()}
        latency[rows] = median_s(session, sized)
        if latency[rows] >= INLINE_S:
            break
        inline = _values(sized)
    return latency, inline


def median_s(session: Session, inputs: Mapping[str, Array], *, budget_s: float = 0.05) -> float:
    """Median seconds of a run, over a few runs or as many as fit into `budget_s`, to which the longest does not count:
    one run that something else on the machine held up does not decide how all are run.
    """
    session.run(inputs)
    times: list[float] = []
    while len(times) < _RUNS and sum(times) - max(times, default=0.0) < budget_s:
        began = time.perf_counter()
        session.run(inputs)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _values(inputs: Mapping[str, Array]) -> int:
    return sum(array.size for array in inputs.values())
