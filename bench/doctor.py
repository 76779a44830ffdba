"""For how many dynamic models does the doctor name the blocking line, and rewrite it? Run: python -m bench.doctor

For each model of bench/zoo/dynamic.py: is the blocking line named, is a rewrite proven, is that program right as ONNX
too. The last line is JSON. `python -m bench.doctor NAME …` runs some of them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from bench.zoo.dynamic import DYNAMIC, EXAMPLES

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.examine import prove_onnx
from trueline.doctor.report import Row
from trueline.doctor.survey import survey


def examined(model: type[torch.nn.Module]) -> list[Row]:
    """The rows of one model of the zoo."""
    torch.manual_seed(0)
    module = model().eval()
    declared = {name: {axis: f"{name}.{axis}" for axis in axes} for name, axes in DYNAMIC.get(model, {}).items()}
    calls = calls_of(EagerSession(module, EXAMPLES[model](), dynamic_shapes=declared))
    return list(survey(module, calls, onnx=prove_onnx, base=Path.cwd()).rows.values())


def main(names: list[str]) -> None:
    """Prints a line for each model, and the counts."""
    counts = dict.fromkeys(("models", "ready", "blocked", "named_line", "rewritten", "onnx"), 0)
    for model in EXAMPLES:
        if names and model.__name__ not in names:
            continue
        started = time.monotonic()
        rows = examined(model)
        causes = [row.cause for row in rows if row.cause is not None]
        rewrites = [row.rewrite for row in rows if row.rewrite is not None]
        counts["models"] += 1
        counts["ready"] += all(row.status == "ready" for row in rows)
        counts["blocked"] += any(row.status == "blocked" for row in rows)
        counts["named_line"] += bool(causes) and all(cause.kind != "exporter" and cause.line for cause in causes)
        healed = bool(rewrites) and all(row.status != "blocked" for row in rows)
        counts["rewritten"] += healed
        counts["onnx"] += healed and all(rewrite.onnx == "proven" for rewrite in rewrites)
        status = "rewritten" if healed else "ready" if not causes else "blocked"
        places = ", ".join(f"{Path(cause.file).name}:{cause.line} {cause.kind}" for cause in causes[:1])
        onnx = "; ".join(rewrite.onnx for rewrite in rewrites)
        print(f"{model.__name__:20} {status:10} {places:32} {time.monotonic() - started:6.1f} s  {onnx}", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
