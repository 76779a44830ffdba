"""The whole line as a user runs it, in a folder of its own: `make test` runs this after the fast suite."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trueline.cli.app import run
from trueline.registry import store
from worlds.waiting import until_ended

RECIPE = Path(__file__).parents[2] / "examples" / "digits" / "recipe.py"
pytestmark = [pytest.mark.line, pytest.mark.timeout(900)]
pytest.importorskip("sklearn", reason="scikit-learn, which ships the digits, is not installed")


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


def until_none_is_left(folder: Path) -> None:
    """Returns once no process works in `folder` or speaks of it."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        here = process.info["cwd"] == str(folder) or str(folder) in line
        if here and "pytest" not in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    until_ended(process.pid for process in found)


def partials(folder: Path) -> list[Path]:
    return list(folder.rglob(".partial-*"))


def interrupted(folder: Path, stage: str, *options: str) -> int:
    """How `ship` ends that is interrupted in `stage`, with nothing left of it."""
    process = trueline(folder, "ship", str(RECIPE), *options)
    for line in process.stderr:
        if line.startswith(stage):
            break
    process.send_signal(signal.SIGINT)
    process.communicate()
    until_none_is_left(folder)
    assert partials(folder) == []
    return process.returncode


def shipped(folder: Path, *options: str) -> dict:
    """What `ship` says of itself, with nothing left of it but its files."""
    told = json.loads(told_by(folder, "ship", str(RECIPE), "--json", *options))
    until_none_is_left(folder)
    assert partials(folder) == []
    return told


def went_the_whole_way(told: dict, *, version: int, epochs: int, accuracy: float) -> None:
    assert told["evaluation"]["metrics"]["accuracy"] >= accuracy
    assert told["version"] == f"models:/digits/{version}"
    assert (told["served"]["records"], told["served"]["decisions_changed"]) == (360, 0)
    certificates = told["summary"]["certificates"]
    assert [c["records"] for c in certificates] == [1437] * epochs
    assert {(c["tally_min"], c["tally_max"]) for c in certificates} == {(1, 1)}
    assert "worker-1.0 is gone: killed by SIGKILL" in [regroup["reason"] for regroup in told["summary"]["regroups"]]


@pytest.fixture(scope="module")
def shipment(tmp_path_factory):
    """A folder in which the digits were shipped, and what `ship` said."""
    folder = tmp_path_factory.mktemp("shipped")
    return folder, shipped(folder)


def test_one_command_goes_from_a_recipe_to_proven_answers(shipment):
    _, told = shipment
    went_the_whole_way(told, version=1, epochs=12, accuracy=0.97)
    assert "worker-1.1 joins" in [regroup["reason"] for regroup in told["summary"]["regroups"]]


@pytest.mark.jobs
def test_ctrl_c_while_a_server_starts_leaves_no_process_and_no_torn_file(tmp_path):
    """The version that was registered before the signal stays, and the next one follows it."""
    assert interrupted(tmp_path, "[5/6] serve", "--epochs", "2") in (130, 0)  # 0: it was done before the signal came
    went_the_whole_way(shipped(tmp_path), version=2, epochs=12, accuracy=0.97)


def test_what_was_shipped_can_be_inspected_predicted_with_and_found_in_mlflow(shipment, monkeypatch, capsys):
    folder, _ = shipment
    monkeypatch.chdir(folder)
    assert run(["bundle", "inspect", "models:/digits@champion"]) == 0
    told = capsys.readouterr().out
    assert "proven  batch from 1 up" in told
    assert "epochs 0 to 11 (12): 1437 records in 23 steps, each once" in told
    for source in ("runs/digits-1", "runs/digits-1/digits.bundle"):
        out = Path(f"{Path(source).name}.jsonl")
        assert run(["predict", str(RECIPE), source, "--out", str(out), "-q"]) == 0
        assert len(out.read_text().splitlines()) == 360
    with store.open_store(None) as client:
        found = client.get_run(client.get_model_version_by_alias("digits", "champion").run_id).data
    assert found.metrics["accuracy"] >= 0.97
    assert (found.params["epochs"], found.params["records"]) == ("12", "1437")


@pytest.mark.long
def test_one_command_goes_from_a_recipe_to_proven_answers_twice(tmp_path):
    went_the_whole_way(shipped(tmp_path, "--epochs", "4"), version=1, epochs=4, accuracy=0.9)
    went_the_whole_way(shipped(tmp_path), version=2, epochs=12, accuracy=0.97)


LONG = [pytest.param(stage, marks=pytest.mark.long) for stage in ("[1/6] train", "[3/6] capture", "[6/6] compare")]


@pytest.mark.parametrize("stage", ["training", *LONG])
def test_ctrl_c_leaves_no_process_and_no_torn_file(tmp_path, stage):
    assert interrupted(tmp_path, stage, "--epochs", "2") in (130, 0)  # 0: it was done before the signal came
