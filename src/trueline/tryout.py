"""`trueline try`: the whole line on a table inside the package, in a minute, without a file, a network or a GPU.

    write ─▶ train, killing a worker ─▶ evaluate ─▶ capture ─▶ serve ─▶ compare ─▶ ask

It leaves the folder with recipe, table, job and bundle.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueline import events
from trueline.errors import TruelineError
from trueline.runtime.compare import TOLERANCES

if TYPE_CHECKING:
    from trueline.batch.evaluate import Evaluation
    from trueline.capture.proof.attempt import Captured
    from trueline.ship import ServerComparison
    from trueline.train.api import TrainResult

STAGES = ("write", "train", "evaluate", "capture", "serve", "ask")


@dataclass(frozen=True, slots=True, kw_only=True)
class TryoutResult:
    folder: Path
    trained: TrainResult
    evaluation: Evaluation
    captured: Captured
    served: ServerComparison
    curl: str
    """The command that asks the server; it is served again by the first of the next commands."""
    answer: Any
    """What the server answered, as JSON."""
    seconds: float

    @property
    def next_commands(self) -> tuple[str, ...]:
        recipe = self.folder / "recipe.py"
        return (
            f"trueline serve {self.captured.path}",
            f"trueline train {recipe} --workers 2",
            "trueline init mine my.csv --label COLUMN",
        )

    def as_dict(self) -> dict[str, Any]:
        served = self.served
        return {
            "folder": str(self.folder),
            "bundle": str(self.captured.path),
            "digest": self.captured.digest,
            "summary": self.trained.summary.as_dict(),
            "evaluation": self.evaluation.as_dict(),
            "served": {name: getattr(served, name) for name in served.__slots__},
            "curl": self.curl,
            "answer": self.answer,
            "seconds": self.seconds,
            "next": list(self.next_commands),
        }

    def as_text(self) -> str:
        proven = next(one for one in self.captured.programs if one.format == self.captured.serve)
        served, indent = self.served, "\n" + " " * 11
        rows = [
            ("train", self.trained.summary.as_text().replace("\n", indent)),
            ("evaluate", self.evaluation.as_text()),
            ("proof", f"trained = captured: {proven.summary}"),
            ("", f"captured = served: {served.records} records over two protocols, largest difference "
                 f"{served.max_abs_error:.1e}, {served.decisions_changed} decisions changed"),
            ("", f"tolerance of both: {TOLERANCES[np.dtype(np.float32)].rtol:g} of the size of an output's column"),
            ("ask", f"{self.curl}{indent}{json.dumps(self.answer)}"),
            ("seconds", f"{self.seconds:.0f}; the server is stopped, the folder {self.folder} stays"),
        ]  # fmt: skip
        text = "\n".join(f"{name:<11}{line}" for name, line in rows)
        return text + "\n\nNext:\n" + "\n".join(f"  {line}" for line in self.next_commands)


def tryout(name: str = "flats", *, into: str | Path = ".", drill: bool = True) -> TryoutResult:
    """Runs the line on the table of the tabular template, in the new folder `into/name`.

    `drill` kills one of two workers a third of the way. Raises UsageError when the folder exists, and the error of the
    stage that fails.
    """
    from trueline.batch.evaluate import evaluate
    from trueline.capture.api import capture
    from trueline.recipe.load import load_recipe
    from trueline.recipe.template import write_template
    from trueline.serve.api import start
    from trueline.ship import compare_served, train_with_kill

    began = time.monotonic()
    _announce("write")
    path = write_template(name, Path(into), "tabular").path
    folder, recipe = path.parent, load_recipe(path)
    _announce("train")
    trained = train_with_kill(recipe, path, 2, None, drill, folder / "job")
    _announce("evaluate")
    evaluation = evaluate(recipe, trained.chosen)
    _announce("capture")
    captured = capture(recipe, trained.chosen, folder / f"{recipe.name}.bundle", formats=("onnx",))
    _announce("serve")
    starting = time.monotonic()
    with start(captured.path, log=folder / "server.log") as server:
        ready_s = time.monotonic() - starting
        events.emit("server.started", url=server.url, model=server.model, version=server.version)
        served = compare_served(recipe, trained, server, ready_s)
        _announce("ask")
        curl, answer = _ask(server.url, server.model, captured.path)
    seconds = time.monotonic() - began
    return TryoutResult(
        folder=folder, trained=trained, evaluation=evaluation, captured=captured, served=served,
        curl=curl, answer=answer, seconds=seconds,
    )  # fmt: skip


def _announce(stage: str) -> None:
    events.emit("stage.started", stage=stage, number=STAGES.index(stage) + 1, of=len(STAGES))


def _ask(url: str, model: str, bundle: Path) -> tuple[str, Any]:
    """The command for port 8080, and the server's answer to its body."""
    import httpx

    from trueline.bundle.read import open_bundle
    from trueline.serve.models.example import curl_line, write_body, write_request

    opened = open_bundle(bundle)
    has_columns = opened.columns() is not None
    body = write_body(opened.golden_records()[:1]) if has_columns else write_request(opened.golden())
    with httpx.Client(timeout=60.0, trust_env=False) as client:
        reply = client.post(f"{url}/predictions/{model}", content=body, headers={"content-type": "application/json"})
    if reply.status_code != 200:
        raise TruelineError(f"the server answered {reply.status_code} to {body[:300]}: {reply.text[:300]}")
    return curl_line("http://127.0.0.1:8080", model, body), reply.json()
