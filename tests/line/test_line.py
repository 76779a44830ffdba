"""The whole line as a user runs it, in a folder of its own: `make test` runs this after the fast suite."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

RECIPE = Path(__file__).parents[2] / "examples" / "digits" / "recipe.py"
pytestmark = [pytest.mark.line, pytest.mark.timeout(900)]
pytest.importorskip("sklearn", reason="scikit-learn, which ships the digits, is not installed")


ASK_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
run = client.get_run(client.get_model_version_by_alias("digits", "champion").run_id)
print(json.dumps([run.data.metrics, run.data.params]))
"""


def trueline(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "trueline", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, "TRUELINE_DEBUG": ""}, **pipes)


def told_by(folder: Path, *arguments: str) -> str:
    """What a command that succeeds says on stdout."""
    process = trueline(folder, *arguments)
    out, log = process.communicate()
    assert process.returncode == 0, log
    return out


def left(folder: Path) -> list[psutil.Process]:
    """Processes that work in `folder` or speak of it, and do not end."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        here = process.info["cwd"] == str(folder) or str(folder) in line
        if here and "pytest" not in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return psutil.wait_procs(found, timeout=100)[1]


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob(".partial-*"))


@pytest.fixture(scope="module")
def shipped_twice(tmp_path_factory):
    """A folder in which the digits were shipped after four epochs and after all; what the command said of each."""
    folder = tmp_path_factory.mktemp("shipped")
    told = []
    for options in (["--epochs", "4"], []):
        told.append(json.loads(told_by(folder, "ship", str(RECIPE), "--json", *options)))
        assert left(folder) == []
    return folder, told


def test_one_command_goes_from_a_recipe_to_proven_answers_twice(shipped_twice):
    folder, told = shipped_twice
    for version, (shipped, epochs, accuracy) in enumerate(zip(told, (4, 12), (0.9, 0.97), strict=True), 1):
        assert shipped["evaluation"]["metrics"]["accuracy"] >= accuracy
        assert shipped["version"] == f"models:/digits/{version}"
        assert (shipped["served"]["records"], shipped["served"]["decisions_changed"]) == (360, 0)
        certificates = shipped["summary"]["certificates"]
        assert [c["records"] for c in certificates] == [1437] * epochs
        assert {(c["tally_min"], c["tally_max"]) for c in certificates} == {(1, 1)}
        reasons = [regroup["reason"] for regroup in shipped["summary"]["regroups"]]
        assert "worker-1.0 is gone: killed by SIGKILL" in reasons
    assert "worker-1.1 joins" in reasons  # of the longer one, which cannot be over before
    assert partials(folder) == []


def test_what_was_shipped_can_be_inspected_predicted_with_and_found_in_mlflow(shipped_twice):
    folder, _ = shipped_twice
    told = told_by(folder, "inspect", "models:/digits@champion")
    assert "proven  batch from 1 up" in told
    assert "epochs 0 to 11 (12): 1437 records in 23 steps, each 1 to 1 times" in told
    for source in ("runs/digits-1", "runs/digits-1/digits.bundle"):
        out = f"{Path(source).name}.jsonl"
        told_by(folder, "predict", str(RECIPE), source, "--out", out)
        assert len((folder / out).read_text().splitlines()) == 360
    asked = subprocess.run([sys.executable, "-c", ASK_MLFLOW], cwd=folder, capture_output=True, text=True, check=True)
    metrics, params = json.loads(asked.stdout.splitlines()[-1])
    assert metrics["accuracy"] >= 0.97
    assert (params["epochs"], params["records"]) == ("12", "1437")


LONG = [pytest.param(stage, marks=pytest.mark.long) for stage in ("[1/6] train", "[3/6] capture", "[6/6] compare")]


@pytest.mark.parametrize("stage", ["training", "[5/6] serve", *LONG])
def test_ctrl_c_leaves_no_process_and_no_torn_file(tmp_path, stage):
    process = trueline(tmp_path, "ship", str(RECIPE), "--epochs", "2")
    for line in process.stderr:
        if line.startswith(stage):
            break
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode in (130, 0)  # 0: it was done before the signal came
    assert left(tmp_path) == []
    assert partials(tmp_path) == []
