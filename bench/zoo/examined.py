"""One architecture from end to end: captured as a user would, judged, rewritten where it was refused, timed.

Runs in a process of its own, which may be ended at any time; `note` is called after each stage with what is known.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.zoo import fresh
from bench.zoo.entry import Architecture, Array
from bench.zoo.judge import Oracle, judged

from trueline.bundle.describe import range_text
from trueline.capture.export.tracing import quiet
from trueline.capture.ladder import Rung, climb
from trueline.capture.model.eager import EagerSession
from trueline.capture.model.signature import TensorModule, as_trained
from trueline.capture.proof.determinism import RANDOM_HINT
from trueline.capture.subject import Subject, with_state
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.report import Row
from trueline.doctor.survey import survey
from trueline.errors import TruelineError
from trueline.runtime.open import open_session
from trueline.runtime.session import USUAL, Format, Session

GRAPHS: tuple[Format, ...] = USUAL
"""What capture makes when it is not told otherwise; both hold no Python."""
SCRIPTED: tuple[Format, ...] = ("torchscript",)
"""Asked for only where no graph is proven."""

Note = Callable[[dict[str, Any]], None]


def examined(
    architecture: Architecture,
    *,
    work: Path,
    questions: int,
    note: Note,
    formats: Sequence[Format] = GRAPHS,
    plain: bool = True,
) -> None:
    """Notes the record of one architecture, stage by stage; programs are left in `work`."""
    note({"name": architecture.name, "group": architecture.group})
    climbed = captured(architecture, architecture.module(), formats, work / "graphs")
    if climbed.draws:  # what the refusal says to do about it
        note({"allow_random": True})
        climbed = captured(architecture, architecture.module(), formats, work / "random", random=True)
    oracle = Oracle(architecture, random=climbed.draws)
    rungs = climbed.described()
    timed = {"capture_s": climbed.seconds, "capture_cpu_s": climbed.cpu_s}
    note({"stage": "captured", "rungs": rungs, "refusal": climbed.error, **timed})
    if not climbed.proven:
        scripted = captured(architecture, architecture.module(), SCRIPTED, work / "scripted")
        climbed.rungs += scripted.rungs
        note({"stage": "scripted", "rungs": rungs + scripted.described()})
    note({"stage": "judged", "judged": _judged(architecture, oracle, climbed, questions)})
    if not any(rung.attempt.format in GRAPHS for rung in climbed.proven):
        note({"stage": "doctored", "doctor": _doctored(architecture, oracle, questions, work / "rewritten")})
    if plain:
        seconds, error = plain_cpu_s(architecture)
        note({"plain_cpu_s": seconds, "plain_error": error})
    note({"stage": "done"})


class Climbed:
    """What a capture left."""

    def __init__(self) -> None:
        self.rungs: list[Rung] = []
        self.beginning: dict[str, Array] = {}
        """The state that the model begins with, by input."""
        self.error = ""
        self.draws = False
        """Whether the model draws random numbers."""
        self.seconds = 0.0
        self.cpu_s = 0.0
        """Of this process: other load on the machine does not affect it."""

    @property
    def proven(self) -> list[Rung]:
        return [rung for rung in self.rungs if rung.attempt.verdict == "proven"]

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "format": rung.attempt.format,
                "verdict": rung.attempt.verdict,
                "why": rung.attempt.why[:600],
                "line": rung.attempt.line,
                "how": rung.attempt.how,
                "seconds": round(rung.attempt.seconds, 2),
                "probes": rung.attempt.probes,
                "max_abs_error": rung.attempt.max_abs_error,
                "range": range_text(rung.signature) if rung.signature is not None else "",
            }
            for rung in self.rungs
        ]


def captured(
    architecture: Architecture,
    module: torch.nn.Module,
    formats: Sequence[Format],
    work: Path,
    *,
    explicit: bool = False,
    random: bool = False,
) -> Climbed:
    """As `trueline.capture` does it (with `--state explicit` or `--allow-random` where the architecture needs it),
    without sealing."""
    found, started, cpu = Climbed(), time.monotonic(), time.process_time()
    try:
        batches = [architecture.arguments(fresh.example(architecture))]
        if explicit:
            module, batches = with_state(module, batches)
        eager = EagerSession(module, batches[0], dynamic_shapes=architecture.dynamic_shapes)
        found.beginning = eager.initial_state
        found.rungs = climb(Subject(module=module, eager=eager, data={}, random=random), formats, work)
    except TruelineError as error:
        found.error, found.draws = str(error), error.hint == RANDOM_HINT
    found.draws = found.draws or any(rung.random for rung in found.rungs)
    found.seconds, found.cpu_s = round(time.monotonic() - started, 2), round(time.process_time() - cpu, 2)
    return found


def _judged(architecture: Architecture, oracle: Oracle, climbed: Climbed, questions: int) -> dict[str, Any]:
    """Compares proven programs on all fresh inputs; refused ones are forced open and compared too."""
    sessions: dict[str, Session] = {}
    for rung in climbed.rungs:
        if not rung.file or rung.signature is None:
            continue
        format, file = rung.attempt.format, rung.folder / rung.file
        try:
            sessions[format] = open_session(format, file, rung.signature, native=True)
        except TruelineError:
            if rung.attempt.verdict == "proven":
                raise
    found = judged(architecture, oracle, sessions, questions=questions, seed=11, beginning=climbed.beginning)
    return {name: one.as_dict() for name, one in found.items()}


def _doctored(architecture: Architecture, oracle: Oracle, questions: int, work: Path) -> dict[str, Any]:
    """The doctor's rows, and the capture of the rewritten model."""
    started = time.monotonic()
    module = architecture.module()
    try:
        eager = EagerSession(
            copy.deepcopy(module),
            architecture.arguments(fresh.example(architecture)),
            dynamic_shapes=architecture.dynamic_shapes,
        )
        survey_ = survey(module, calls_of(eager), onnx=None, base=Path.cwd())
    except TruelineError as error:
        return {"error": str(error), "seconds": round(time.monotonic() - started, 2)}
    rows = list(survey_.rows.values())
    found: dict[str, Any] = {
        "seconds": round(time.monotonic() - started, 2),
        "named": _named(rows),
        "rewrites": sum(row.rewrite is not None for row in rows),
        "steps": [step for row in rows if row.rewrite for step in row.rewrite.steps],
        "rows": [_row(row) for row in rows],
    }
    if not survey_.texts:
        return found
    state = sorted({name for rewrite in survey_.rewrites.values() for name in rewrite.state})
    climbed = captured(architecture, patch_module(module, survey_.texts), GRAPHS, work, explicit=bool(state))
    found |= {"state": state} if state else {}
    found |= {"rungs": climbed.described(), "refusal": climbed.error}
    found["judged"] = _judged(architecture, oracle, climbed, questions)
    return found


def _named(rows: Sequence[Row]) -> str:
    """`file:line: cause` of the first row that blocks and whose cause is one of the user's own lines."""
    for row in rows:
        if row.cause is not None and row.cause.kind != "exporter" and row.cause.line:
            return f"{row.cause.place}: {row.cause.words}"
    return ""


def _row(row: Row) -> dict[str, Any]:
    cause = row.cause
    return {
        "path": row.path,
        "class": row.class_name,
        "status": row.status,
        "cause": f"{cause.place} {cause.kind}: {cause.words}"[:400] if cause else "",
        "why_not": row.why_not[:400],
    }


def plain_cpu_s(architecture: Architecture) -> tuple[float | None, str]:
    """Processor time that torch.export and torch.onnx take for the same model and dimensions; nothing is compared.

    From the example on, as `captured` is measured; measured last, when everything has been loaded.
    """
    module = architecture.module()
    started = time.process_time()
    try:
        eager = EagerSession(
            module, architecture.arguments(fresh.example(architecture)), dynamic_shapes=architecture.dynamic_shapes
        )
        calling = eager.calling
        free = tuple(
            {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(spec.shape) if isinstance(size, str)}
            for spec in calling.signature.inputs
        )
        with torch.no_grad(), as_trained(), quiet(), tempfile.TemporaryDirectory() as folder:
            program = torch.export.export(
                TensorModule(module, calling), calling.example, dynamic_shapes=(free,), strict=False
            )
            made = torch.onnx.export(program, (), dynamo=True, verbose=False)
            assert made is not None
            made.save(f"{folder}/model.onnx")
            return round(time.process_time() - started, 2), ""
    except Exception as error:  # noqa: BLE001 - whatever the plain exporter raises: it has no time then
        return None, f"{type(error).__name__}: {error}"[:300]


def warm() -> None:
    """Loads what the first export of a process loads, so that no model pays for it."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        program = torch.export.export(torch.nn.Linear(2, 2).eval(), (torch.ones(2, 2),))
        made = torch.onnx.export(program, (), dynamo=True, verbose=False)
        assert made is not None
        made.save(f"{folder}/model.onnx")
