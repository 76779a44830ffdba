"""The proof: a program answers as the eager model does on every probe inside the range that it claims.

`observe` asks the eager model once, `judge` asks a program the same and compares; `prove` does both. A
probe that the signature refuses is outside the claim and is recorded as such: the Session that serves
will refuse it in the same words. Nothing here knows a program format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from trueline.bundle.schema import Evidence
from trueline.capture.model import code_paths
from trueline.capture.proof import hostile_values
from trueline.capture.proof.probes import Probe
from trueline.errors import CaptureError, RequestError
from trueline.runtime import compare
from trueline.runtime import distribution as draws
from trueline.runtime.session import Session

if TYPE_CHECKING:
    from trueline.bundle.signature import Array
    from trueline.capture.model.code_paths import Event, Place

SEED = 0
Progress = Callable[[int, int], None]
"""Called with probes done and probes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the eager model answered on a probe, or why it did not, and the way its code took."""

    probe: Probe
    outputs: dict[str, Array] | None
    error: str
    way: Sequence[Event]
    draws: Mapping[str, Array] | None = None
    """Many answers, stacked, of a model that draws random numbers; `outputs` is the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The verdict over all probes, with one piece of evidence for each."""

    format: str
    proven: bool
    reason: str
    """Empty when proven; else the smallest probe that disagrees, and how."""
    disagreeing: str
    """Name of that probe."""
    evidence: tuple[Evidence, ...]
    max_abs_error: float
    """Over the probes that agree."""


def prove(
    program: Session, eager: Session, probes: Iterable[Probe], *, versions: Mapping[str, str] | None = None
) -> Proof:
    """Proves `program` against `eager` on `probes`."""
    return judge(program, observe(eager, probes), versions=versions)


def observe(eager: Session, probes: Iterable[Probe], *, num_draws: int = 0) -> tuple[Observation, ...]:
    """Asks the eager model, watching which way its code goes. Whatever it raises is recorded, not raised.

    A model that draws random numbers is asked `num_draws` times. Raises CaptureError, with the line, for one that
    returns other outputs on a probe than on its example: no program can.
    """
    seen: list[Observation] = []
    for probe in probes:
        one = _observe_one(eager, probe, seen[0].way if seen else None)
        if probe.wild and one.outputs is None:
            continue  # the model does not take these values: nothing is asked of the program
        same = next((earlier.way for earlier in seen if earlier.way == one.way), None)
        one = one if same is None else replace(one, way=same)  # most go one way: keep it once
        if num_draws and one.outputs is not None:
            with care(probe), _seeded():
                one = replace(one, draws=draws.sample(eager, probe.inputs, num_draws))
        seen.append(one)
    return tuple(seen)


def _observe_one(eager: Session, probe: Probe, first: Sequence[Event] | None) -> Observation:
    with code_paths.watching(ends=True) as way, care(probe):
        try:
            outputs, error = eager.run(probe.inputs), ""
        except CaptureError as raised:
            place = code_paths.divergence(first, way) if first is not None else None
            where = f"; see {place}" if place else ""
            raise CaptureError(f"on probe '{probe.name}' {raised.message}{where}", hint=raised.hint) from raised
        except Exception as raised:  # noqa: BLE001 - this is the user's forward on made-up values: anything may come
            outputs, error = (
                None,
                f"raises {type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}",
            )
    if outputs is not None and probe.wild and not all(_finite(array) for array in outputs.values()):
        outputs, error = None, "answers no numbers"
    return Observation(probe=probe, outputs=outputs, error=error, way=way)


def care(probe: Probe) -> AbstractContextManager[object]:
    """Where the values of `probe` are no numbers, none of them reaches LAPACK."""
    return hostile_values.Careful() if probe.wild else nullcontext()  # type: ignore[no-untyped-call]


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def hidden_state(observations: Sequence[Observation]) -> str:
    """How the eager model answers otherwise to equal inputs; empty when no probe shows that it does."""
    answers: dict[str, Observation] = {}
    for seen in observations:
        earlier = answers.setdefault(_digest(seen.probe.inputs), seen)
        if earlier.outputs is None or seen.outputs is None or seen.draws is not None:
            continue
        found = compare.compare(earlier.outputs, seen.outputs)
        if not found.agrees:
            return found.reason
    return ""


def judge(
    program: Session,
    observations: Sequence[Observation],
    *,
    versions: Mapping[str, str] | None = None,
    progress: Progress = lambda done, total: None,
) -> Proof:
    """Asks `program` every probe that the eager model was asked, and compares."""
    evidence = []
    for done, seen in enumerate(observations, 1):
        evidence.append(_judge_one(program, seen, dict(versions or {}), draws.LEVEL / len(observations)))
        progress(done, len(observations))
    hidden, disagreeing = hidden_state(observations), ""
    reason = f"the model answers differently when it is asked the same again: {hidden}" if hidden else ""
    wrong = [(_volume(seen.probe), one) for seen, one in zip(observations, evidence, strict=True) if _bad(one)]
    if wrong and not reason:
        _, worst = min(wrong, key=lambda pair: pair[0])
        reason, disagreeing = f"on probe '{worst.probe}': {worst.reason}", worst.probe
    if not reason and not any(one.verdict == "agrees" for one in evidence):
        reason = "no probe could be compared: each is outside the program's range, or the eager model raises"
    errors = [one.max_abs_error for one in evidence if one.verdict == "agrees" and one.max_abs_error is not None]
    return Proof(
        format=program.format,
        proven=not reason,
        reason=reason,
        disagreeing=disagreeing,
        evidence=tuple(evidence),
        max_abs_error=max(errors, default=0.0),
    )


def _volume(probe: Probe) -> tuple[int, int]:
    return probe.num_records, sum(array.size for array in probe.inputs.values())


def _bad(one: Evidence) -> bool:
    """A given record that the eager model cannot answer at some size counts:

    the program would claim that size.
    """
    return one.verdict == "disagrees" or (one.verdict == "unanswered" and one.origin == "given")


def disagreement(program: Session, probe: Probe, expected: Mapping[str, Array]) -> str:
    """How `program` answers otherwise than `expected` on the probe; empty when it agrees."""
    return _asked(program, probe, lambda: _once(program, probe, expected)).reason


def _judge_one(program: Session, seen: Observation, versions: dict[str, str], level: float) -> Evidence:
    probe = seen.probe
    found: compare.Comparison | None = None
    try:
        program.signature.check(probe.inputs)
    except RequestError as refused:
        verdict, reason = "outside", refused.message
    else:
        if seen.outputs is None:
            verdict, reason = "unanswered", f"the eager model {seen.error}"
        else:
            found = _asked(program, probe, lambda: _compared(program, seen, level))
            verdict, reason = ("agrees" if found.agrees else "disagrees"), found.reason
    return Evidence(
        format=program.format,
        against="eager",
        probe=probe.name,
        origin=probe.origin,
        inputs_sha256=_digest(probe.inputs),
        shapes={name: tuple(array.shape) for name, array in probe.inputs.items()},
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason,
        max_abs_error=found.max_abs_error if found else None,
        max_rel_error=found.max_rel_error if found else None,
        tolerance=(found.how or _tolerance(seen)) if found else "",
        versions=versions,
    )


def _asked(program: Session, probe: Probe, question: Callable[[], compare.Comparison]) -> compare.Comparison:
    """A program that hands wild values to LAPACK, where the model took another way, must not end this process."""
    try:
        with care(probe):
            return question()
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises where eager answers is a disagreement
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return compare.refusal(f"the program raises {type(error).__name__}: {first}")


def _compared(program: Session, seen: Observation, level: float) -> compare.Comparison:
    if seen.draws is None:
        return _once(program, seen.probe, seen.outputs or {})
    with _seeded():
        answers = draws.sample(program, seen.probe.inputs, len(next(iter(seen.draws.values()))))
    found = draws.compare_seeded(seen.draws, answers, level=level)
    misfit = _misfit(program, seen.probe, {name: array[0] for name, array in answers.items()}) if found.agrees else ""
    return compare.refusal(misfit) if misfit else found


def _once(program: Session, probe: Probe, expected: Mapping[str, Array]) -> compare.Comparison:
    answer = program.run(probe.inputs)
    found = compare.compare(expected, answer)
    misfit = _misfit(program, probe, answer) if found.agrees else ""
    return compare.refusal(misfit) if misfit else found


def _misfit(program: Session, probe: Probe, answer: Mapping[str, Array]) -> str:
    """Why the answer has not the shape that the signature promises (`x.squeeze()` at batch 1); empty when it has."""
    sizes = program.signature.sizes(probe.inputs)
    for spec in program.signature.outputs:
        shape = answer[spec.name].shape
        wanted = [sizes.get(dim) if isinstance(dim, str) else dim for dim in spec.shape]
        fits = len(shape) == len(wanted) and all(w is None or w == s for w, s in zip(wanted, shape, strict=True))
        if not fits:
            return f"output '{spec.name}' has shape {list(shape)}, the signature promises {list(spec.shape)}"
    return ""


@contextmanager
def _seeded() -> Iterator[None]:
    """What torch draws on the CPU in the block begins with the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _tolerance(seen: Observation) -> str:
    dtypes = dict.fromkeys(array.dtype for array in (seen.outputs or {}).values())
    return ", ".join(f"{dtype}: {compare.TOLERANCES.get(dtype, 'equal')}" for dtype in dtypes)


def _digest(inputs: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(inputs.items()):
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def parting(observations: Sequence[Observation], disagreeing: str = "") -> tuple[Place, str, str] | None:
    """The line where two probes part, with the names of the two; None when all took the same way.

    The probe that disagrees is held against one that went another way, of the same sizes if there is one: then
    it is the values that steer the branch, not the shape.
    """
    suspects = [seen for seen in observations if seen.probe.name == disagreeing] or observations[:1]
    for suspect in suspects:
        shapes = _shapes(suspect.probe)
        ranked = sorted(observations, key=lambda seen: _shapes(seen.probe) != shapes)
        for other in ranked:
            if other.outputs is None:
                continue  # its way was cut short by what it raised
            place = code_paths.divergence(other.way, suspect.way)
            if place is not None:
                return place, other.probe.name, suspect.probe.name
    return None


def _shapes(probe: Probe) -> list[tuple[int, ...]]:
    return [array.shape for array in probe.inputs.values()]
