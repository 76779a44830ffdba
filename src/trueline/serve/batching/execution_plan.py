"""Measures a program with its golden records before it is ready, and plans from that how it runs.

Three questions: may requests share a run, how long does a run take, and is that short enough for the event loop. A hop
to a thread and back costs about 50 us of processor time, so a run shorter than INLINE_S is cheaper without it.

Rows share a run only after a test shows that a row's answer does not depend on the other rows. The proof at capture
does not cover that, and some programs depend on them only in certain cases: one value too large for all (a scale taken
from the whole batch, as of activations quantized at run time), a NaN, or many equal rows (a mixture of experts of
limited capacity). Requests do not choose what they run with, so all of these are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline import events
from trueline.bundle.golden import Golden
from trueline.bundle.padding import Padding, fill_up
from trueline.bundle.signature import Dim, Signature
from trueline.errors import TruelineError
from trueline.runtime.compare import compare
from trueline.runtime.openvino import get_general
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

INLINE_S = 150e-6
LOUD = 1e3
"""How many times as large as an example the values of another row may be."""
CROWD = 8
"""Equal requests tried in one run."""
BY_RECORD = "the program computes a batch one record after the other: single requests are answered sooner"
_SIZES = (1, 8, 32)
_RUNS = 9
Piece = dict[str, "Array"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """How one version runs. `why` is the reason for `batch`."""

    batch: bool
    why: str
    max_batch: int
    inline_values: int
    """Requests of at most this many input values run on the event loop."""
    latency_s: dict[int, float]
    """Median time of a run by rows."""
    cuts: bool = False
    """Whether rows are independent, so that a request with more rows than a run may have is cut."""
    padding: Padding | None = None
    """How requests of several lengths share a run; None: they do not."""


def batch_symbol(signature: Signature) -> tuple[str | None, str]:
    """The symbol that counts rows in every input and output, or None; and why.

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
            return None, f"'{head}' is used by further dimensions of '{spec.name}'"
        heads.add(head)
    if len(heads) != 1:
        return None, f"first dimensions differ: {', '.join(sorted(heads))}"
    symbol = heads.pop()
    return symbol, f"dimension '{symbol}' leads every input and output"


def draw_up(session: Session, cases: Sequence[Golden], *, max_batch: int, by_record: bool = False) -> ExecutionPlan:
    """Measures `session` with golden records that it has reproduced. `by_record`: a batch takes as long as its records
    one by one, as the bundle notes.
    """
    signature = session.signature
    symbol, why = batch_symbol(signature)
    if symbol is None:
        latency = {1: median_s(session, cases[0].inputs)}
        inline = _num_values(cases[0].inputs) if latency[1] < INLINE_S else 0
        return ExecutionPlan(batch=False, why=why, max_batch=1, inline_values=inline, latency_s=latency)
    dim, general = signature.dims[symbol], get_general(session)  # two forms round otherwise, and no row is to blame
    depends = row_dependence(general, cases, dim)
    dependent = BY_RECORD if by_record else depends
    bound = max_batch if dim.max is None else min(max_batch, dim.max)
    latency, inline = _measure(session, cases[0].inputs, dim)
    return ExecutionPlan(
        batch=not dependent and bound > 1,
        why=dependent or why,
        max_batch=bound,
        inline_values=inline,
        latency_s=latency,
        cuts=not depends,
        padding=None if dependent else padding_of(general, cases),
    )


def padding_of(session: Session, cases: Sequence[Golden]) -> Padding | None:
    """The bundle's padding, if the golden records, padded to twice their length, have the same answers here."""
    signature, tried = session.signature, 0
    if not signature.padded:
        return None
    padding = Padding(signature)
    for case in cases:
        more = {symbol: 2 * size for symbol, size in padding.sizes(case.inputs).items()}
        if not signature.allows({**signature.sizes(case.inputs), **more}):
            continue
        outputs = padding.cut(session.run(fill_up(signature, case.inputs, more)), case.inputs)
        verdict = compare(case.outputs, {name: outputs[name] for name in case.outputs}, bounds=case.bounds)
        if not verdict.agrees:
            events.emit("padding.refused", case=case.case, why=verdict.reason)
            return None
        tried += 1
    return padding if tried else None


def _measure(session: Session, inputs: Mapping[str, Array], dim: Dim) -> tuple[dict[int, float], int]:
    latency: dict[int, float] = {}
    inline = 0
    for size in _SIZES:
        rows = fit(size, dim)
        if rows is None or rows in latency:
            continue
        sized = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in inputs.items()}
        latency[rows] = median_s(session, sized)
        if latency[rows] >= INLINE_S:
            break
        inline = _num_values(sized)
    return latency, inline


def median_s(session: Session, inputs: Mapping[str, Array], *, budget_s: float = 0.05) -> float:
    """Median seconds of a few runs, or of as many as fit into `budget_s`; the longest run does not count towards it, as
    another process may have delayed it.
    """
    session.run(inputs)
    times: list[float] = []
    while len(times) < _RUNS and sum(times) - max(times, default=0.0) < budget_s:
        began = time.perf_counter()
        session.run(inputs)
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _num_values(inputs: Mapping[str, Array]) -> int:
    return sum(array.size for array in inputs.values())


def fit(rows: int, dim: Dim) -> int | None:
    """The smallest allowed size of at least `rows`; None: there is none.

    >>> fit(1, Dim(min=2, multiple_of=4)), fit(9, Dim(max=8))
    (4, None)
    """
    size = max(rows, dim.min)
    size += -size % dim.multiple_of
    return None if dim.max is not None and size > dim.max else size


def row_dependence(session: Session, cases: Sequence[Golden], dim: Dim) -> str:
    """Why requests must not share a run; empty: they may.

    Runs pieces of the golden records alone, together, and with rows that are made from them.
    """
    unit = fit(1, dim)
    pieces = [] if unit is None else _pieces(cases, unit)
    if not pieces or unit is None:
        return "the golden records are too few rows to try it"
    pieces = pieces[:4] if len(pieces) > 1 else pieces * 2
    most = CROWD if dim.max is None else dim.max // unit
    apart = [session.run(piece) for piece in pieces]
    for what, places in _batches(pieces, most):
        members = [place if isinstance(place, dict) else pieces[place] for place in places]
        try:
            together = session.run({name: np.concatenate([one[name] for one in members]) for name in pieces[0]})
        except (TruelineError, RuntimeError):
            if not what:
                raise
            continue  # such a batch fails as a whole, and runs again request by request
        for at, place in enumerate(places):
            if isinstance(place, dict):
                continue
            verdict = compare(apart[place], {k: value[at * unit : (at + 1) * unit] for k, value in together.items()})
            if not verdict.agrees:
                return f"an answer depends on the other rows of its batch{what}: {verdict.reason}"
    return ""


def _batches(pieces: Sequence[Piece], most: int) -> Iterator[tuple[str, list[int | Piece]]]:
    """What is special, and what is in the batch: numbers of pieces, and pieces whose answers are not compared."""
    all_pieces: list[int | Piece] = [*range(len(pieces))]
    yield "", all_pieces[:most]
    if most > 1:
        yield ", when many are equal", [0] * min(most, CROWD)
    special = [
        (", when one of them is large", _replace_floats(pieces[-1], lambda value: value * value.dtype.type(LOUD))),
        (", when one of them is NaN", _replace_floats(pieces[-1], lambda value: np.full_like(value, np.nan))),
    ]
    for what, piece in special:
        if piece is not None and most > 1:
            yield what, [0, piece, *all_pieces[1:]][:most]


def _replace_floats(piece: Piece, replace: Callable[[Any], Any]) -> Piece | None:
    """None for a piece without floating-point inputs."""
    floats = {name for name, value in piece.items() if value.dtype.kind == "f"}
    with np.errstate(over="ignore", invalid="ignore"):  # FP16 may overflow: infinite is large as well
        return {name: replace(value) if name in floats else value for name, value in piece.items()} if floats else None


def _pieces(cases: Sequence[Golden], unit: int) -> list[Piece]:
    shapes = {name: array.shape[1:] for name, array in cases[0].inputs.items()}
    pieces = []
    for case in cases:
        rows = len(next(iter(case.inputs.values())))
        if {name: array.shape[1:] for name, array in case.inputs.items()} != shapes:
            continue
        for at in range(0, rows - unit + 1, unit):
            pieces.append({name: array[at : at + unit] for name, array in case.inputs.items()})
    return pieces
