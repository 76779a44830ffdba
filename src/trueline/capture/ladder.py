"""The rungs: each format is emitted, opened as it will be served, and proven; every attempt is on record."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trueline import events
from trueline.bundle.describe import range_text
from trueline.bundle.signature import Signature
from trueline.capture import claims, size_limits
from trueline.capture.export import aotinductor, torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.export.torch_export import LoadedProgram
from trueline.capture.export_subject import export_and_observe
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.capture.onnx import offload as offload_emit
from trueline.capture.proof import determinism, jumps, limits, stateful
from trueline.capture.proof.disagreement import UNEXPLAINED, Explanation, explain, shrink
from trueline.capture.proof.far_sizes import FarSizes
from trueline.capture.proof.frozen import UNFOLLOWED, find_unfollowed
from trueline.capture.proof.narrowing import judge_and_narrow, takes
from trueline.capture.proof.observe import Observation, hidden_state
from trueline.capture.proof.prove import Proof, judge
from trueline.capture.proof.torchscript import DEPRECATED, climb_scripted
from trueline.capture.rung import Rung, find_probe, make_rung, refuse, size_of, with_how, with_line
from trueline.capture.size_walk import FarProbe
from trueline.capture.subject import Subject
from trueline.capture.time_limit import OutOfTime, TimeLimit
from trueline.errors import BundleError, CaptureError, NotProven, TruelineError, UsageError, join_names
from trueline.runtime import offload
from trueline.runtime.open import open_session
from trueline.runtime.session import Format, Session, SessionSettings

EMITTERS: dict[Format, Callable[[Exported, Path], Path]] = {
    "onnx": emit.emit,
    "openvino": emit.emit,
    "offload": offload_emit.emit,
    "torch_export": torch_export.emit,
    "aotinductor": aotinductor.emit,
}
"""All but torchscript, which needs the module and no exported program."""
TORCH_KERNELS: tuple[Format, ...] = ("torch_export", "torchscript")
FOR_QUESTIONS = SessionSettings(keeps_memory=False)
EXACT = "sigmoids by their formula, which is exact where they are small"


@dataclass(frozen=True, slots=True)
class FormatTrial:
    """What a format is emitted from, compared with, and written to."""

    format: Format
    exported: Exported | CaptureError
    observations: Sequence[Observation]
    far: FarSizes
    folder: Path
    started: float
    """The time of the attempt's start, less the seconds that all attempts share."""

    def refuse(self, error: TruelineError, *, emitting: bool = False, emitted: bool = False) -> Rung:
        """The rung of the format where it is not proven because of `error`."""
        given = self.observations, self.folder, self.started
        return refuse(self.format, error, *given, emitting=emitting, emitted=emitted)


@limits.set_aside()
def climb(
    subject: Subject,
    formats: Sequence[Format],
    work: Path,
    *,
    otherwise: Sequence[Format] = (),
    opset: int | None = None,
    limit: TimeLimit | None = None,
) -> list[Rung]:
    """Tries `formats`, and where none is proven `otherwise`; a refusal is a Rung, not an exception, and so is a format
    that `limit` leaves no time for. Raises NotProven for a model that is no function of its inputs, which no format can
    hold, and OutOfTime where the model itself takes too long."""
    limit = limit or TimeLimit()
    started = time.monotonic()
    eager = subject.eager
    events.emit("model.examined")
    far = FarSizes(eager)
    exported, observations = export_and_observe(subject, far, limit, random=_check_first_calls(subject, limit))
    if isinstance(exported, Exported):
        exported = replace(exported, opset=opset)
    hidden = hidden_state(observations)  # two runs in a row gave the same answer
    unsteady = limit.run(
        "the search for a state",
        lambda: determinism.find_cause(eager, hidden) if hidden else determinism.check_order(eager, observations),
    )
    if unsteady is not None:
        raise unsteady.as_error()
    decisive = () if any(seen.draws for seen in observations) else _find_jumps(eager, observations, limit)
    exported, extended = _extend(exported, far, observations, limit)
    observations += size_limits.observations_of(extended, observations[0])
    shared_s = time.monotonic() - started

    def attempt(exported: Exported | CaptureError, format: Format, folder: Path, share: float) -> Rung:
        trial = FormatTrial(format, exported, observations, far, folder, time.monotonic() - shared_s)
        try_it = _try_torchscript if format == "torchscript" else _try
        try:
            return limit.run(f"the {format} program", lambda: try_it(trial), share=share)
        except OutOfTime as error:
            return trial.refuse(error)

    def climb_all(exported: Exported | CaptureError, formats: Sequence[Format], number: int) -> list[Rung]:
        folders = [work / (f"{format}-{number}" if number else format) for format in formats]
        shares = [1 / left for left in range(len(formats), 0, -1)]
        return [attempt(exported, *one) for one in zip(formats, folders, shares, strict=True)]

    rungs = _climb_stand_ins(exported, eager, climb_all, formats, otherwise) or _climb_claims(
        exported, extended, climb_all, formats, otherwise
    )
    limits.release_memory(subject.num_bytes)  # of the last program, before the bundle is written
    return [_with_jumps(_with_excluded(rung, eager), decisive) for rung in rungs]


def _extend(
    exported: Exported | CaptureError, far: FarSizes, observations: Sequence[Observation], limit: TimeLimit
) -> tuple[Exported | CaptureError, tuple[FarProbe, ...]]:
    """The claims up to where model and program were compared, and the comparisons to repeat for each format."""
    if isinstance(exported, CaptureError):
        return exported, ()
    program = LoadedProgram(exported)
    try:
        return limit.run("the model at larger sizes", lambda: size_limits.extend(far, exported, program, observations))
    except OutOfTime:
        return size_limits.cut_to_usual(exported, observations), ()


def _climb_stand_ins(
    exported: Exported | CaptureError,
    eager: EagerSession,
    climb_all: Callable[[Exported | CaptureError, Sequence[Format], int], list[Rung]],
    formats: Sequence[Format],
    otherwise: Sequence[Format],
) -> list[Rung]:
    """The rungs of `otherwise` where one takes all of the user's examples and the exported program does not; else
    none."""
    left_out = size_limits.find_excluded(exported.signature, eager.calling) if isinstance(exported, Exported) else ""
    if not left_out or not isinstance(exported, Exported):
        return []
    narrow = CaptureError(
        f"torch.export's program holds for {range_text(exported.signature)} only, which leaves out {left_out}"
    )
    rungs = climb_all(narrow, otherwise, 1)
    takes_all = [
        rung.signature is not None
        and rung.attempt.verdict == "proven"
        and not size_limits.find_excluded(rung.signature, eager.calling)
        for rung in rungs
    ]
    return [*climb_all(narrow, formats, 0), *rungs] if any(takes_all) else []


def _with_excluded(rung: Rung, eager: EagerSession) -> Rung:
    """A proven rung whose claim leaves out one of the user's examples, with a warning."""
    if rung.attempt.verdict != "proven" or rung.signature is None:
        return rung
    left_out = size_limits.find_excluded(rung.signature, eager.calling)
    if not left_out:
        return rung
    events.emit("example.excluded", format=rung.attempt.format, example=left_out, range=rung.attempt.range)
    return with_how(rung, f"warning: it refuses your {left_out}", "")


def _find_jumps(eager: EagerSession, seen: Sequence[Observation], limit: TimeLimit) -> tuple[jumps.Jump, ...]:
    try:
        found = limit.run("numbers that decide", lambda: jumps.find_jumps(eager, seen))
    except OutOfTime:
        return ()
    for jump in found[: jumps.NAMED]:
        events.emit("answers.jump", place=f"{jump.place}", seen=jump.seen)
    return found


def _with_jumps(rung: Rung, found: Sequence[jumps.Jump]) -> Rung:
    """A proven rung whose runtime rounds otherwise than torch, with the lines where a rounded number decides."""
    if rung.attempt.verdict != "proven" or not found:
        return rung
    rounds_as_torch = rung.attempt.format in TORCH_KERNELS and not rung.attempt.max_abs_error
    return rung if rounds_as_torch else with_how(rung, "", jumps.describe(found))


def _check_first_calls(subject: Subject, limit: TimeLimit) -> bool:
    """Whether the model draws random numbers, as it may. Raises NotProven for another one that is no function."""
    eager = subject.eager
    unsteady = limit.run(
        "the first calls of the model", lambda: determinism.check_twice(eager) or determinism.check_rare(eager)
    )
    if unsteady is not None and not (unsteady.random and subject.random):
        raise unsteady.as_error()
    if unsteady is not None and eager.signature.state:
        raise NotProven(
            f"{unsteady.why}; and it keeps a state ({join_names(eager.signature.state)})",
            hint="what random answers do to a state cannot be compared: take the random numbers as an input",
        )
    return unsteady is not None


def _climb_claims(
    exported: Exported | CaptureError,
    extended: Sequence[FarProbe],
    climb_all: Callable[[Exported | CaptureError, Sequence[Format], int], list[Rung]],
    formats: Sequence[Format],
    otherwise: Sequence[Format],
) -> list[Rung]:
    """The rungs under the widest claim that proves as many programs as any narrower one: a program that is refused
    under each of them narrows none of the others."""
    tried: list[list[Rung]] = []
    for number in itertools.count():
        rungs = climb_all(exported, formats, number)
        stricter = _narrow(exported, rungs, extended)
        if stricter is None and not _any(rungs, "proven"):
            rungs += climb_all(exported, otherwise, number)
            stricter = _narrow(exported, rungs, extended)
        tried.append(rungs)
        if stricter is None:
            break
        events.emit("claim.tried", range=range_text(stricter.signature))
        exported = stricter
    best = max(tried, key=_count_proven)
    if not _count_proven(best):
        return tried[-1]
    if best is not tried[-1]:
        events.emit("claim.kept")
    return best


def _count_proven(rungs: Sequence[Rung]) -> int:
    return sum(rung.attempt.verdict == "proven" for rung in rungs)


def _any(rungs: Sequence[Rung], verdict: str) -> bool:
    return any(rung.attempt.verdict == verdict for rung in rungs)


def _narrow(exported: Exported | CaptureError, rungs: Sequence[Rung], extended: Sequence[FarProbe]) -> Exported | None:
    """The next stricter claim, where an emitted program disagrees on what only the present claim covers; else None."""
    if isinstance(exported, CaptureError):
        return None
    names = {rung.disagreeing.name for rung in rungs if rung.disagreeing is not None}
    far = next((one for one in extended if one.seen.probe.name in names), None)
    if far is not None:
        return size_limits.shorten(exported, far)
    strict = exported.claims[-1]
    if exported.signature == strict:
        return None
    if all(rung.disagreeing is None or claims.allows(strict, rung.disagreeing) for rung in rungs):
        return None
    return claims.narrower(exported, [rung.disagreeing for rung in rungs if rung.disagreeing is not None])


def _try_torchscript(trial: FormatTrial) -> Rung:
    exported, observations, folder, far = trial.exported, trial.observations, trial.folder, trial.far
    guarded = isinstance(exported, Exported) and not exported.unrolled
    signature = exported.signature if isinstance(exported, Exported) else None
    if isinstance(exported, Exported) and exported.keyed is not None:
        signature = exported.claims[0]  # narrower ones are of a program that a text of a size decided
    tried = climb_scripted(far.eager, signature, observations, folder)
    if tried.path is None or tried.proof is None:
        return trial.refuse(CaptureError(tried.why, hint=tried.line), emitted=tried.proof is not None)
    made = folder / tried.path.relative_to(folder).parts[0]
    proof = tried.proof
    if proof.proven and not guarded:
        proof, observations = _extend_scripted(far, tried.path, proof, observations, scripted=tried.way == "script")
    rung = make_rung("torchscript", proof, observations, tried.path, made, trial.started)
    return with_how(rung, tried.how, DEPRECATED)


def _extend_scripted(
    far: FarSizes, path: Path, proof: Proof, observations: Sequence[Observation], *, scripted: bool
) -> tuple[Proof, Sequence[Observation]]:
    """The proof with the claim cut to what was compared. A script keeps the branches of the code, a trace one way."""
    far.unrolled = frozenset() if scripted else frozenset(proof.signature.symbols)
    session = open_session("torchscript", path, proof.signature)
    claim, extended = size_limits.cut_to_compared(far, session, observations, branches=not scripted)
    seen = size_limits.observations_of(extended, observations[0])
    if not seen:
        return replace(proof, signature=claim), observations
    more = judge(open_session("torchscript", path, claim), seen)
    worst = max(proof.max_abs_error, more.max_abs_error)
    evidence = (*proof.evidence, *more.evidence)
    return replace(proof, signature=claim, evidence=evidence, max_abs_error=worst), (*observations, *seen)


def _try(trial: FormatTrial) -> Rung:
    """What ONNX Runtime's own sigmoid spoils is computed by its formula."""
    rung, exported = _try_once(trial), trial.exported
    if trial.format not in ("onnx", "openvino") or rung.disagreeing is None or isinstance(exported, CaptureError):
        return rung
    if not emit.may_be_exact(exported):
        return rung
    exact = replace(exported, exact_tails=True, how="; ".join(filter(None, (exported.how, EXACT))))
    again = _try_once(replace(trial, exported=exact, folder=trial.folder.with_name(f"{trial.folder.name}-exact")))
    return again if again.attempt.verdict == "proven" else rung


def _try_once(trial: FormatTrial) -> Rung:
    format, exported, eager, folder = trial.format, trial.exported, trial.far.eager, trial.folder
    path, onnx = None, format in ("onnx", "openvino")
    limits.release_memory(0 if isinstance(exported, CaptureError) else exported.weight_bytes)
    try:
        if isinstance(exported, CaptureError):
            raise exported
        if exported.only_torch and format not in TORCH_KERNELS:
            raise CaptureError(
                exported.only_torch,
                hint="take the torch_export program, or capture the model before it is quantized and compress that",
            )
        events.emit("program.emitting", format=format)
        began = time.monotonic()
        path = EMITTERS[format](exported, folder)
        events.emit("program.emitted", format=format, size_bytes=size_of(path), seconds=time.monotonic() - began)
        limits.release_memory()
        proof, explanation = _prove(format, path, exported, trial.observations, eager)
    except (CaptureError, BundleError, UsageError) as error:
        own = error is not exported
        if path is not None and isinstance(error, BundleError) and isinstance(exported, Exported) and onnx:
            error = _locate(error, path, exported)
        return trial.refuse(error, emitting=own, emitted=path is not None)
    if proof.signature != exported.signature and onnx:
        emit.restate(path, proof.signature)
    rung = make_rung(format, proof, trial.observations, path, folder, trial.started, explanation=explanation)
    parts = str(offload.read(path)) if format == "offload" else ""
    return with_how(with_line(rung, eager, exported.keyed), exported.how, parts)


def _locate(error: BundleError, path: Path, exported: Exported) -> CaptureError:
    """`error` of a program that its runtime does not open, with the dtypes and the line of the node that it names."""
    node = emit.node_name(error.message)
    kinds = emit.node_dtypes(path, node) if node else []
    place = emit.node_line(exported.program, node) if node else None
    computes = f"; it computes in {join_names(kinds)} there" if kinds else ""
    return CaptureError(error.message + computes, hint=f"{place}" if place else error.hint)


def _prove(
    format: Format, path: Path, exported: Exported, observations: Sequence[Observation], eager: EagerSession
) -> tuple[Proof, Explanation]:
    def progress(done: int, total: int) -> None:
        events.emit("proof.advanced", format=format, done=done, total=total)

    def open_with(signature: Signature) -> Session:
        return open_session(format, path, signature, native=True, settings=FOR_QUESTIONS)  # emitted here

    session, proof, observations = judge_and_narrow(
        open_with, exported.signature, eager, observations, examples=eager.examples, progress=progress
    )
    if session.signature != exported.signature:
        events.emit("claim.narrowed", to=range_text(session.signature))
        _check_followed(session.signature, exported, observations, eager)
    proof = stateful.prove_sequences(proof, session, eager)
    probe = find_probe(observations, proof.disagreeing)
    refused = any(seen.outputs is None and seen.probe is probe for seen in observations)
    if probe is None or refused or any(seen.draws is not None for seen in observations):
        return proof, UNEXPLAINED  # of two random answers none is wrong
    shrunk = shrink(session, eager, probe)
    del session  # its weights are not needed twice
    limits.release_memory()
    explanation = explain(format, exported, eager, probe, shrunk=shrunk, work=path.parent.parent)
    return explanation.amend(proof), explanation


def _check_followed(
    claim: Signature, exported: Exported, observations: Sequence[Observation], eager: EagerSession
) -> None:
    """Raises CaptureError where only probes outside of the narrowed `claim` decide otherwise by a value that a trace
    does not see: other values inside of it may do so too, a sum of more of them."""
    inside = [seen for seen in observations if takes(claim, seen.probe.inputs)]
    random = any(seen.draws is not None for seen in observations)
    place = None if random or len(inside) == len(observations) else find_unfollowed(eager, inside, exported)
    if place is not None:
        raise CaptureError(UNFOLLOWED, hint=f"{place}")
