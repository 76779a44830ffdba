"""Whether a program is worth being compiled a second time, for the sizes that a single record has most often.

It has to be faster there for sure, by GAIN at least, keep the budget by itself, and answer every evaluation record of
these sizes like the form for all sizes, by the tolerance that is sealed with the bundle. A server has the weights of
both in memory, so a search for little memory or size does not ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.describe import sizes_text
from trueline.compress import gate
from trueline.compress.measure import accuracy
from trueline.compress.measure.accuracy import Answers
from trueline.compress.measure.latency import measure_alternately
from trueline.compress.measure.reference import Reference
from trueline.compress.measure.single_records import find_record, find_usual_sizes, run_alone, sizes_of_record
from trueline.compress.sealing import make_bound
from trueline.runtime.compare import compare
from trueline.runtime.openvino import MOST_BYTES, FixedSizesSession, compile_fixed, count_weights

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.runtime.session import Session

GAIN = 1.05
"""Times the speed of the form for all sizes that the other has to have."""


@dataclass(frozen=True, slots=True)
class FixedTrial:
    """The session that a bundle of the candidate would be served by, and what was found out in words."""

    session: Session
    sizes: Mapping[str, int]
    """Empty: there is no second form."""
    note: str = ""


def try_fixed(
    reference: Reference, path: Path, general: Session, answers: Answers, *, seconds: float, most_s: float
) -> FixedTrial:
    """Measures the second form of the candidate at `path`, whose first one has given `answers`. `seconds`: of timing;
    `most_s`: what answering records one by one may take."""
    signature = general.signature
    sizes = find_usual_sizes(signature, reference.batches)
    if not sizes or count_weights(path) > MOST_BYTES:
        return FixedTrial(general, {})
    fixed = compile_fixed(path, signature, sizes)
    speed, low = compare_speed(general, fixed, find_record(signature, reference.batches, sizes), seconds)
    name = sizes_text(sizes)
    if speed < GAIN or low <= 1.0:
        return FixedTrial(general, {}, f"compiled for {name} alone it is {speed:.2f} times as fast there: not used")
    why = _find_fault(reference, fixed, answers, sizes, most_s)
    if why:
        note = f"compiled for {name} alone it is {speed:.2f} times as fast there, and {why}: not used"
        return FixedTrial(general, {}, note)
    session = FixedSizesSession(general, partial(compile_fixed, path, signature, sizes), sizes)
    session.admit(fixed)
    return FixedTrial(session, sizes, f"compiled once more for {name}: {speed:.2f} times as fast there")


def reopen(general: Session, path: Path, sizes: Mapping[str, int]) -> Session:
    """As a server has it, of a candidate of which `try_fixed` has found `sizes`."""
    if not sizes:
        return general
    session = FixedSizesSession(general, partial(compile_fixed, path, general.signature, sizes), sizes)
    session.admit(session.compile_fixed())
    return session


def compare_speed(general: Session, fixed: Session, inputs: Mapping[str, Array], seconds: float) -> tuple[float, float]:
    """How many times as fast `fixed` answers `inputs`, and its lower bound, measured alternately."""
    runs = {"general": partial(general.run, inputs), "fixed": partial(fixed.run, inputs)}
    return measure_alternately(runs, seconds=seconds).speedup("fixed", "general")


def _find_fault(reference: Reference, fixed: Session, answers: Answers, sizes: Mapping[str, int], most_s: float) -> str:
    """Why the form for `sizes` may not answer; empty: it keeps the budget, and answers like the other form."""
    signature = fixed.signature
    errors = accuracy.largest_errors(reference.answers, answers, signature)
    own = [sizes_of_record(signature, batch) == sizes for batch in reference.batches]
    count = sum(batch.count for batch, taken in zip(reference.batches, own, strict=True) if taken)
    outputs, done, began = list(answers.outputs), 0, time.perf_counter()
    for at, batch in enumerate(reference.batches):
        if not own[at]:
            continue
        found = run_alone(fixed, batch.inputs)
        done += batch.count
        expected_s = (time.perf_counter() - began) * count / done
        if expected_s > most_s:
            return f"to answer {count} records one by one would take {expected_s:.0f} s"
        bounds = {name: make_bound(array, errors[name]) for name, array in outputs[at].items() if name in errors}
        comparison = compare(outputs[at], found, bounds=bounds)
        if not comparison.agrees:
            return f"answers otherwise: {comparison.reason}"
        outputs[at] = found
    values = [reference.metric.values(one, batch) for one, batch in zip(outputs, reference.batches, strict=True)]
    verdict = gate.judge(reference.budget, reference.answers.values, np.concatenate(values))
    return "" if verdict.keeps else f"loses {verdict.loss:.4g}, up to {verdict.high:.4g} (95 %)"
