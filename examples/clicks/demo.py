"""The whole line of the parameter server: `make demo-ps`.

    make the log ─▶ train with 2 servers and 3 workers, killing one of each ─▶ evaluate, beside one process
        ─▶ capture ─▶ serve ─▶ compare the server's answers with the model's

Ends with a line of JSON.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import make
import numpy as np
import torch

from trueline.serve.api import start

HERE = Path(__file__).parent
ASKED = 64  # records that the server is asked


def run(*command: object) -> dict:
    """The JSON that a command of trueline prints."""
    done = subprocess.run(["trueline", *map(str, command), "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def train(recipe: Path, job: Path, kill_at: int) -> dict:
    """Trains; worker 1 kills itself after a few minibatches, and server 1 is killed from here."""
    command = [
        "trueline", "train", recipe, "--strategy", "ps", "--servers", "2", "--workers", "3", "--kill", f"{kill_at}:1",
        "--job", job, "--json",
    ]  # fmt: skip
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE)
    address = job / "ps" / "server-1" / "address.json"
    killed = False
    while process.poll() is None:
        if not killed and address.exists() and count_steps(job) >= kill_at:
            os.kill(json.loads(address.read_text())["pid"], signal.SIGKILL)
            print("server-1 was killed", flush=True)
            killed = True
        time.sleep(0.5)
    if process.returncode or not killed:
        raise SystemExit(f"the training ended with {process.returncode}, and {killed=}")
    return json.loads(process.stdout.read().splitlines()[-1])


def count_steps(job: Path) -> int:
    live = run("status", job).get("live") or {}
    return int(live.get("committed", 0))


def ask(bundle: Path, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """What a server answers, over the Open Inference Protocol."""

    def as_json(name: str, value: torch.Tensor) -> dict:
        kind = "INT64" if value.dtype == torch.int64 else "FP32"
        return {"name": name, "shape": list(value.shape), "datatype": kind, "data": value.flatten().tolist()}

    with start(bundle) as server:
        body = json.dumps({"inputs": [as_json(name, value) for name, value in inputs.items()]}).encode()
        request = urllib.request.Request(f"{server.url}/v2/models/{server.model}/infer", body)
        with urllib.request.urlopen(request) as answer:
            return np.array(json.load(answer)["outputs"][0]["data"], dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="wide_and_deep", choices=["wide_and_deep", "dlrm"])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--values", type=int, default=make.VALUES)
    parser.add_argument("--out", type=Path, default=Path("runs") / "demo-ps")
    options = parser.parse_args()
    began = time.monotonic()
    shutil.rmtree(options.out, ignore_errors=True)
    data, job, bundle = options.out / "data", options.out / "job", options.out / "clicks.bundle"
    os.environ["CLICKS"] = str(data.resolve())
    best = make.write(data, options.records, options.values)
    print(f"{options.records} records; the best AUC that a model can reach is {best:.4f}", flush=True)
    recipe = HERE / f"{options.recipe}.py"
    trained = train(recipe, job, kill_at=options.records // 1024 // 4)

    import one_process

    from trueline.checkpoint.checkpoint import load_model
    from trueline.recipe.load import load_recipe

    model = load_model(load_recipe(recipe), trained["checkpoint"])
    ours = one_process.measure(model)
    print(f"AUC {ours:.4f} after {time.monotonic() - began:.0f} s", flush=True)
    theirs = one_process.measure(one_process.train(options.recipe, options.values))
    print(f"AUC {theirs:.4f} of the same model in one process", flush=True)
    run("capture", recipe, trained["checkpoint"], "--out", bundle)
    inputs, _ = next(one_process.batches("evaluation", ASKED))
    inputs["ids"][0] = -7  # of no field: ids without rows
    with torch.no_grad():
        expected = model(**inputs).numpy()
    difference = float(np.abs(ask(bundle, inputs) - expected).max())
    rows = {name: len(part.ids) for name, part in model.named_modules() if hasattr(part, "ids")}
    seconds = round(time.monotonic() - began, 1)
    print(f"{ASKED} answers of the server are off by {difference:.1e} at most")
    print(json.dumps({
        "auc": round(ours, 4), "auc_gap": round(theirs - ours, 4), "best_auc": round(best, 4), "rows": rows,
        "largest_difference": difference, "seconds": seconds,
    }))  # fmt: skip
    sys.exit(0 if difference < 1e-4 else 1)


if __name__ == "__main__":
    main()
