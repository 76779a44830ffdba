"""The verb `bench-serve`: how long runs of a bundle take by rows here, and the settings that suit a load best.

The curve is measured; what settings do under a load is rehearsed on it (`rehearse`), every setting of the grid and the
learned pace with the same clients. Whether a server keeps up with the rehearsal is what bench/serve.py measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueline.bundle.read import Bundle, open_bundle
from trueline.errors import UsageError
from trueline.runtime.session import Session, open_program, replay
from trueline.serve.batching.execution_plan import BY_RECORD, batch_symbol, median_s
from trueline.serve.batching.latency_model import Curve
from trueline.serve.batching.policy import Policy
from trueline.serve.batching.row_independence import fit, neighbours_matter
from trueline.serve.batching.simulator import Load, Outcome, Setting, grid, ratio, rehearse

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HOP_S = 100e-6
"""What a batch costs beside its run: to a thread and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured and rehearsed."""

    model: str
    why_alone: str
    """Why requests do not run together; empty when they do."""
    seconds: dict[int, float]
    """Median of a run, by rows."""
    load: Load
    learned: Outcome
    settings: list[Setting]
    """The best throughput first."""

    @property
    def ratio(self) -> float:
        """Throughput without settings over that of the best at the same p99."""
        return ratio(self.learned, self.settings)


def bench_serve(
    source: str | Path,
    *,
    load: Load | None = None,
    max_batch: int = 64,
    threads: int = 1,
    requests: int = 2000,
    program: str = "",
) -> Report:
    """Measures the bundle at `source`. Raises BundleError, NotProven, UsageError."""
    load = load or Load(clients=32, think_s=2e-4)
    if load.clients < 1 and load.per_second <= 0:
        raise UsageError("a load needs clients, or requests per second", hint="give --clients, or --per-second")
    bundle = open_bundle(Path(source))
    session = open_program(bundle, program or None, threads=threads)
    replay(bundle, session)
    by_record = bundle.program(program or None).by_record
    seconds, why_alone = curve_of(bundle, session, max_batch=max_batch, by_record=by_record)
    bound = max(seconds)
    known = Curve(seconds)

    def takes(rows: int) -> float:
        return known.at(rows) + HOP_S

    batches = [rows for rows in _SIZES if rows <= bound]
    return Report(
        model=bundle.name,
        why_alone=why_alone,
        seconds=seconds,
        load=load,
        learned=rehearse(takes, load, Policy(max_batch=bound), requests=requests),
        settings=grid(takes, load, requests=requests, batches=batches),
    )


def curve_of(
    bundle: Bundle, session: Session, *, max_batch: int, by_record: bool = False
) -> tuple[dict[int, float], str]:
    """Median seconds by rows, and why requests of this model do not run together (empty when they do)."""
    cases = bundle.golden()
    symbol, why = batch_symbol(session.signature)
    if symbol is None:
        return {1: median_s(session, cases[0].inputs, budget_s=0.5)}, why
    dim = session.signature.dims[symbol]
    apart = BY_RECORD if by_record else neighbours_matter(session, cases, dim)
    seconds: dict[int, float] = {}
    for wanted in (1,) if apart else _SIZES:
        rows = fit(wanted, dim)
        if rows is None or rows in seconds or (seconds and rows > max_batch):
            continue
        sized = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in cases[0].inputs.items()}
        seconds[rows] = median_s(session, sized, budget_s=0.5)
    return seconds, apart


def as_text(report: Report) -> str:
    """The curve and the settings, for people."""
    lines = [f"{report.model}: runs on this machine", "", "  rows       ms   rows/s"]
    longest = max(rows / took_s for rows, took_s in report.seconds.items())
    for rows, took_s in report.seconds.items():
        bar = "#" * max(1, round(40 * rows / took_s / longest))
        lines.append(f"  {rows:4d} {took_s * 1e3:8.3f} {rows / took_s:8.0f}  {bar}")
    if report.why_alone:
        return "\n".join([*lines, "", f"requests run alone: {report.why_alone}"])
    load, best = report.load, report.settings[0]
    who = f"{load.clients} clients" if load.clients else f"{load.per_second:g} requests a second"
    lines += ["", f"rehearsed with {who}:", "", "  settings                             req/s   p99 ms   rows a run"]
    static = f"--max-batch {best.max_batch} --max-delay {best.max_delay_s:.3g}"
    for name, outcome in ((static, best.outcome), ("none (learned)", report.learned)):
        lines.append(f"  {name:34s} {outcome.per_second:7.0f} {outcome.p99_s * 1e3:8.2f} {outcome.mean_rows:12.1f}")
    return "\n".join([*lines, "", f"learned / best at the same p99: {report.ratio:.2f}"])


def as_dict(report: Report) -> dict[str, Any]:
    """The same for a script."""
    best = report.settings[0]
    return {
        "model": report.model,
        "run_ms": {str(rows): round(took_s * 1e3, 4) for rows, took_s in report.seconds.items()},
        "runs_alone_because": report.why_alone,
        "best": {
            "max_batch": best.max_batch,
            "max_delay_s": best.max_delay_s,
            "per_second": round(best.outcome.per_second, 1),
            "p99_ms": round(best.outcome.p99_s * 1e3, 3),
        },
        "learned": {
            "per_second": round(report.learned.per_second, 1),
            "p99_ms": round(report.learned.p99_s * 1e3, 3),
        },
        "ratio": round(report.ratio, 3),
    }
