"""Captures a model as a user does, and judges what was sealed. Runs in a process that may be ended at any time."""

from __future__ import annotations

import io
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

from bench.attack.judge import CALLS, Judge, judge
from bench.attack.subject import Answer, Array, Subject

from trueline import events
from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.doctor.api import doctor
from trueline.errors import RequestError, TruelineError
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program
from trueline.runtime.session import Session

GRAPHS = ("onnx", "torch_export")
WARNED = re.compile(r"warning|examples?\b[^.;]*\b(outside|excluded|left out|refused)|batch (of )?1\b[^.;]*refused")
"""How capture says that a claim leaves out what the user showed it."""

Record = dict[str, Any]


class Sealed:
    """A program of a bundle, as the judge asks it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.named = {spec.name.rpartition(".")[2]: spec.name for spec in session.signature.inputs}

    @property
    def dims(self) -> Mapping[str, Sequence[int | str]]:
        return {spec.name.rpartition(".")[2]: spec.shape for spec in self.session.signature.inputs}

    def _given(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {self.named[name]: array for name, array in arrays.items()}

    def claims(self, arrays: Mapping[str, Array]) -> bool:
        try:
            self.session.signature.check(self._given(arrays))
        except RequestError:
            return False
        return True

    def answer(self, arrays: Mapping[str, Array]) -> Answer:
        try:
            return list(self.session.run(self._given(arrays)).values())
        except Exception as error:  # noqa: BLE001 - whatever it raises: it does not answer
            return f"{type(error).__name__}: {error}"[:300]


def attempt(text: str, *, seed: int = 0, rewrite: bool = False, edges: bool = False, calls: int = CALLS) -> Record:
    """Captures and judges the recipe file `text`; with `rewrite` as `trueline doctor` leaves it, with `edges` also at
    the ends of what numbers are."""
    subject = Subject(text)
    why = _eager(subject)
    if why:
        return {"eager": why}
    record: Record = {"formats": [], "wrong": [], "wrong_nonfinite": [], "narrow": [], "refusal": ""}
    work = Path(tempfile.mkdtemp(prefix="trueline-attack-"))
    try:
        recipe = work / "recipe.py"
        recipe.write_text(text)
        started = time.process_time()
        with _quiet(), _listening() as words:
            if rewrite:
                doctor(load_recipe(recipe), apply=work / "rewritten", keep=False)
                recipe = work / "rewritten" / "recipe.py"
                if recipe.read_text() == text:
                    return record | {"refusal": "the doctor has no rewrite"}
            done = capture(
                load_recipe(recipe), None, work / "bundle", formats=GRAPHS if rewrite else None, one_is_enough=rewrite
            )
            words += [attempt.summary for attempt in done.programs]
            refused = {one.format: one.reason[:300] for one in done.programs if one.verdict == "refused"}
            record |= {"refused": refused} if refused else {}
        record["capture_cpu_s"] = round(time.process_time() - started, 3)
        judging = partial(judge, seed=seed, words="\n".join(words), extremes=edges, calls=calls)
        _judge(subject, work / "bundle", record, "\n".join(words), judging)
    except TruelineError as error:
        record["refusal"] = f"{type(error).__name__}: {error}"[:600]
    except Exception as error:  # noqa: BLE001 - a bug of capture, which is a finding too
        record["crash"] = f"{type(error).__name__}: {error}"[:600]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return record


def _judge(subject: Subject, path: Path, record: Record, words: str, judging: Judge) -> None:
    bundle, started = open_bundle(path), time.process_time()
    served = bundle.manifest.serve
    for entry in bundle.manifest.programs:
        program = Sealed(open_program(bundle, entry.format, threads=1))
        verdict = judging(subject, program)
        record["formats"].append(entry.format)
        record["wrong"] += [f"{what} ({entry.format})" for what in verdict.wrong]
        record["wrong_nonfinite"] += [f"{what} ({entry.format})" for what in verdict.wrong_nonfinite]
        record["asked"] = record.get("asked", 0) + verdict.asked
        if entry.format == served and verdict.narrow and not WARNED.search(words):
            record["narrow"] = verdict.narrow
    record["range"] = next((line for line in words.splitlines() if "proven for" in line), "")[:300]
    record["judge_cpu_s"] = round(time.process_time() - started, 3)


def _eager(subject: Subject) -> str:
    """Why the model is no model: it does not answer its own examples."""
    try:
        examples = subject.examples()
        model = subject.model()
    except Exception as error:  # noqa: BLE001 - a composition that does not fit together
        return f"{type(error).__name__}: {error}"[:300]
    answers = [model.answer(example) for example in examples]
    return next((answer for answer in answers if isinstance(answer, str)), "")


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What capture says meanwhile."""
    words: list[str] = []
    with events.listening(lambda name, fields: words.append(events.render(name, fields))):
        yield words
