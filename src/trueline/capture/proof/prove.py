"""The proof: a program answers as the eager model does on every probe inside the range that it claims.

A probe that the signature rejects is outside the claim and is recorded as such: the Session that serves rejects it with
the same message. This module knows no program format.
"""

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata

import msgspec

from trueline.bundle.schema import Evidence
from trueline.bundle.signature import Array, Signature
from trueline.capture.model.stored import StoredArrays, read_by_parts
from trueline.capture.proof.bounds import ULPS, describe
from trueline.capture.proof.careful import CRASHING, Careful, care
from trueline.capture.proof.limits import release_memory
from trueline.capture.proof.observe import MORE_DRAWS, Observation, digest, fixed_seed, hidden_state, observe
from trueline.capture.proof.probes import Probe
from trueline.errors import RequestError
from trueline.runtime import compare
from trueline.runtime import distribution as draws
from trueline.runtime.session import NATIVE, Session

Progress = Callable[[int, int], None]
"""Called with probes done and probes in all."""
GIVEN_S = 1.0
"""Seconds of this thread for a first look at the exported program: each format then runs on all probes."""
REACH = 1000.0
"""Times its bound that a number may be off for another draw of the noise to be of use."""
ANSWERS = ", and the program answers"
"""Of a program where the model raises."""
PACKAGES = ("trueline", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "numpy")


@cache
def _find_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that emit, run and prove programs."""
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    return machine | {name: _find_version(name) for name in PACKAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The verdict over all probes, with one piece of evidence for each."""

    format: str
    signature: Signature
    """The claim of the program that was compared."""
    proven: bool
    reason: str
    """Empty when proven; else it names the smallest probe that disagrees, and how."""
    disagreeing: str
    """That probe's name."""
    evidence: tuple[Evidence, ...]
    max_abs_error: float
    """Over the probes that agree."""


def prove(program: Session, eager: Session, probes: Iterable[Probe]) -> Proof:
    """Proves `program` against `eager` on `probes`."""
    return judge(program, observe(eager, probes))


def judge(
    program: Session, observations: Sequence[Observation], *, progress: Progress = lambda done, total: None
) -> Proof:
    """Runs `program` on every probe that the eager model ran on, and compares the answers."""
    evidence = []
    for done, seen in enumerate(observations, 1):
        evidence.append(_judge_one(program, seen, draws.LEVEL / len(observations)))
        progress(done, len(observations))
    return conclude(program, observations, evidence)


def agrees_on_given(program: Session, observations: Sequence[Observation]) -> bool:
    """Whether `program` agrees on the user's own probes, the smallest first, as far as GIVEN_S lasts."""
    started = time.thread_time()
    given = [seen for seen in observations if seen.probe.origin == "given"]
    for seen in sorted(given, key=lambda one: one.probe.volume):
        if find_verdict(program, seen)[0] in ("disagrees", "unanswered"):
            return False
        if time.thread_time() - started > GIVEN_S:
            break
    return True


def judge_narrowed(program: Session, observations: Sequence[Observation], evidence: Sequence[Evidence]) -> Proof:
    """The proof of a program that was judged with a wider claim: what its signature now refuses is outside."""
    return conclude(
        program, observations, [_outside(program, seen, one) for seen, one in zip(observations, evidence, strict=True)]
    )


def _outside(program: Session, seen: Observation, evidence: Evidence) -> Evidence:
    try:
        program.signature.check(seen.probe.inputs)
    except RequestError as refused:
        return msgspec.structs.replace(
            evidence, verdict="outside", reason=refused.message, max_abs_error=None, max_rel_error=None, tolerance=""
        )
    return evidence


def conclude(program: Session, observations: Sequence[Observation], evidence: Sequence[Evidence]) -> Proof:
    """The verdict over `evidence`, one piece for each observation."""
    hidden, disagreeing = hidden_state(observations), ""
    reason = f"the model answers equal inputs differently: {hidden}" if hidden else ""
    wrong = [
        (bool(seen.probe.planted), seen.probe.volume, one)  # a range of values leaves out planted numbers
        for seen, one in zip(observations, evidence, strict=True)
        # a given record that the eager model cannot answer counts too: the program would claim its size
        if one.verdict == "disagrees" or (one.verdict == "unanswered" and one.origin == "given")
    ]
    if wrong and not reason:
        *_, worst = min(wrong, key=lambda found: found[:2])
        reason, disagreeing = f"on probe '{worst.probe}': {worst.reason}", worst.probe
    if not reason and not any(one.verdict == "agrees" for one in evidence):
        reason = "no probe could be compared: each is outside the program's range, or the eager model raises"
    errors = [one.max_abs_error for one in evidence if one.verdict == "agrees" and one.max_abs_error is not None]
    return Proof(
        format=program.format,
        signature=program.signature,
        proven=not reason,
        reason=reason,
        disagreeing=disagreeing,
        evidence=tuple(evidence),
        max_abs_error=max(errors, default=0.0),
    )


def disagreement(program: Session, seen: Observation) -> str:
    """How the answer of `program` on the probe differs from what was seen; empty when it agrees."""
    return _run_guarded(seen.probe, lambda: _compare_once(program, seen)).reason


def find_verdict(
    program: Session, seen: Observation, *, level: float = draws.LEVEL
) -> tuple[str, str, compare.Comparison | None]:
    """The verdict on one probe, its reason, and the comparison where there is one: what evidence is made of."""
    try:
        program.signature.check(seen.probe.inputs)
    except RequestError as refused:
        return "outside", refused.message, None
    if seen.outputs is None:
        return *_judge_refused(program, seen), None
    comparison = _run_guarded(seen.probe, lambda: _compare(program, seen, level))
    if isinstance(seen.outputs, StoredArrays):  # the next comparison begins without the memory of this one
        release_memory()
    return ("agrees" if comparison.agrees else "disagrees"), comparison.reason, comparison


def _judge_one(program: Session, seen: Observation, level: float) -> Evidence:
    probe = seen.probe
    verdict, reason, comparison = find_verdict(program, seen, level=level)
    return Evidence(
        format=program.format,
        against="eager",
        probe=probe.name,
        origin=probe.origin,
        inputs_sha256=digest(probe.inputs),
        shapes={name: tuple(array.shape) for name, array in probe.inputs.items()},
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason,
        max_abs_error=comparison.max_abs_error if comparison else None,
        max_rel_error=comparison.max_rel_error if comparison else None,
        tolerance=(comparison.how or _describe(seen)) if comparison else "",
        versions=versions(),
    )


def _judge_refused(program: Session, seen: Observation) -> tuple[str, str]:
    """Verdict and reason where the eager model raises: a program must not answer values that the model refuses."""
    refused = f"the eager model {seen.error}"
    if seen.probe.origin == "given" or program.format in NATIVE:  # machine code may not survive what it does not check
        return "unanswered", refused
    if seen.unsafe:
        return "disagrees", refused
    mode = Careful() if seen.probe.wild else Careful(CRASHING)
    try:
        with mode:
            program.run(seen.probe.inputs)
    except Exception:  # noqa: BLE001 - whatever a runtime raises: it refuses them too
        if mode.stopped and not seen.probe.wild:  # no claim of values excludes them, and nothing stops a served program
            return "disagrees", f"{refused}, and the program would end its process"
        return "unanswered", refused
    return "disagrees", f"{refused}{ANSWERS}"


def _run_guarded(probe: Probe, question: Callable[[], compare.Comparison]) -> compare.Comparison:
    """A program that passes wild values to LAPACK, where the model took another way, must not end this process."""
    try:
        with care(probe):
            return question()
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises where eager answers is a disagreement
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return compare.refusal(f"the program raises {type(error).__name__}: {first}")


def _compare(program: Session, seen: Observation, level: float) -> compare.Comparison:
    if seen.draws is None:
        return _compare_once(program, seen)
    with fixed_seed():
        answers = draws.sample(program, seen.probe.inputs, len(next(iter(seen.draws.values()))))
    comparison = draws.compare_seeded(seen.draws, answers, level=level)
    misfit = (
        _misfit(program, seen.probe, {name: array[0] for name, array in answers.items()}) if comparison.agrees else ""
    )
    return compare.refusal(misfit) if misfit else comparison


def _compare_once(program: Session, seen: Observation) -> compare.Comparison:
    answer, expected, arbitrate = program.run(seen.probe.inputs), read_by_parts(seen.outputs), seen.arbitrate
    comparison = compare.compare(expected, answer, bounds=seen.bounds)
    for step in range(3 + MORE_DRAWS if arbitrate is not None else 0):
        if not comparison.agrees and arbitrate is not None:
            if step > 1 and not 0 < comparison.times <= REACH:
                break
            alone = comparison.records if step == 2 else ()
            seen = arbitrate(every=step > 0, redraw=step > 2, records=alone)
            comparison = compare.compare(expected, answer, bounds=seen.bounds)
    misfit = _misfit(program, seen.probe, answer) if comparison.agrees else ""
    return replace(compare.refusal(misfit) if misfit else comparison, how=_describe(seen))


def _describe(seen: Observation) -> str:
    """The bounds, and by what they are bounds."""
    judged = "as near as rounding takes the model in float64" if seen.judged else "of its scale, without float64"
    return describe(
        read_by_parts(seen.outputs), seen.bounds, judged if seen.arbitrate is None else f"{ULPS:g} units of its scale"
    )


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
