"""Records a real run for README's picture: `make docs RECORD=1` writes docs/img/first-hour.json.

The digits of examples/digits are trained by three workers; one is killed, later the job is scaled to two. The result is
captured, registered in MLflow and served, and all held-out records are answered by each of the four.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from worlds.waiting import until

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "img" / "first-hour.json"
RECIPE = ROOT / "examples" / "digits" / "recipe.py"
KILL_AT, SCALE_AT = 70, 180


def _trueline(folder: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("trueline")), *arguments]
    return subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout


def events(job: Path) -> list[dict[str, Any]]:
    """The events of a job so far; a line that is being written is left out."""
    path = job / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _fields(job: Path, name: str) -> list[dict[str, Any]]:
    return [{**event["fields"], "at": event["at"]} for event in events(job) if event["name"] == name]


def train(folder: Path) -> Path:
    """The folder of the finished job."""
    kill = f"{KILL_AT}:1"
    _trueline(folder, "train", str(RECIPE), "--workers", "2:3", "--kill", kill, "--job", "digits", "--detach")
    job = folder / "digits"
    until(lambda: len(_fields(job, "step.applied")) > SCALE_AT, "the step at which the job is scaled")
    _trueline(folder, "scale", "digits", "2")
    until((job / "summary.json").exists, "the end of the job")
    return job


def _largest(answers: list[list[float]], others: list[list[float]]) -> float:
    return max(abs(a - b) for row, other in zip(answers, others, strict=True) for a, b in zip(row, other, strict=True))


def _predicted(folder: Path, source: str) -> list[list[float]]:
    name = f"{source}.jsonl"
    _trueline(folder, "predict", str(RECIPE), source, "--out", name, "--mode", "evaluation")
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [next(value for value in row.values() if isinstance(value, list)) for row in rows]


def prove(folder: Path) -> dict[str, Any]:
    """The answers to all held-out records: of the trained model, the bundle, MLflow's and the server's."""
    import mlflow
    import numpy as np

    from trueline import load_recipe
    from trueline.serve import start

    _trueline(folder, "capture", str(RECIPE), "digits", "--out", "digits.bundle")
    store = f"sqlite:///{folder}/mlflow.db"
    _trueline(folder, "register", "digits.bundle", "--tracking-uri", store)
    mlflow.set_tracking_uri(store)
    held_out = load_recipe(RECIPE).dataset("evaluation")
    x = np.stack([held_out[at][0].numpy() for at in range(len(held_out))])
    trained, captured = _predicted(folder, "digits"), _predicted(folder, "digits.bundle")
    registered = mlflow.pyfunc.load_model("models:/digits@champion").predict(x).tolist()
    with start(folder / "digits.bundle") as server:
        body = json.dumps(x.tolist()).encode()
        served = json.load(urllib.request.urlopen(f"{server.url}/predictions/digits", body))
    evidence = [json.loads(line) for line in (folder / "digits.bundle" / "evidence.jsonl").read_text().splitlines()]
    given = [one for one in evidence if one["format"] == "onnx" and one["origin"] == "given"]
    bounds = [float(number) for one in given for number in re.findall(r"\d\.\d+e-\d+", one["tolerance"])]
    others = {"captured": captured, "loaded from MLflow": registered, "served": served}
    return {
        "records": len(trained),
        "digit": int(np.argmax(trained[0])),
        "answers": {name: max(rows[0]) for name, rows in {"trained": trained, **others}.items()},
        "differences": {name: _largest(trained, rows) for name, rows in others.items()},
        "changed": sum(
            int(np.argmax(a) != np.argmax(b)) for rows in others.values() for a, b in zip(trained, rows, strict=True)
        ),
        "tolerance": max(bounds),
    }


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="first-hour-"))
    job = train(folder)
    steps = _fields(job, "step.applied")
    began = steps[0]["at"]
    record = {
        "steps": [
            [step["step"] + 1, round(step["at"] - began, 3), round(step["loss"], 4), step["workers"]] for step in steps
        ],
        "views": [
            [round(view["at"] - began, 3), view["workers"], view["why"]] for view in _fields(job, "view.published")
        ],
        "certificates": json.loads((job / "summary.json").read_text()).get("certificates"),
        "proof": prove(folder),
    }
    OUT.write_text(json.dumps(record) + "\n")
    shutil.rmtree(folder)
    print(os.path.relpath(OUT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
