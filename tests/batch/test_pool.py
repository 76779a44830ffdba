"""Evaluating and predicting with several processes: the same numbers, whoever dies, and nobody left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from trueline import events
from trueline.batch import pool
from trueline.batch.evaluate import evaluate
from trueline.batch.predict import predict
from trueline.checkpoint import checkpoint
from trueline.errors import CheckpointError, DataError, StorageError, UsageError
from trueline.recipe.load import load_recipe
from worlds.jobs import MEASURED, checkpoint_of
from worlds.waiting import until, until_ended

pytestmark = pytest.mark.jobs


@pytest.fixture
def trained(tmp_path):
    return checkpoint_of(MEASURED, tmp_path / "checkpoints")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(tmp_path, monkeypatch):
    scratch = Path(tempfile.mkdtemp(prefix="tl-"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    left = psutil.Process().children(recursive=True)
    assert list(scratch.iterdir()) == []
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    scratch.rmdir()


def trouble(monkeypatch, how, record, marker=""):
    monkeypatch.setenv("MEASURED_TROUBLE", f"{how}:{record}:{marker}")


def test_the_numbers_are_bit_for_bit_those_of_one_process_for_any_number_of_them(trained):
    alone = evaluate(MEASURED, trained, batch=32)
    assert [evaluate(MEASURED, trained, batch=32, workers=workers) for workers in (2, 5)] == [alone, alone]
    assert (alone.records, alone.checkpoint) == (333, "step-00000003")


def test_the_numbers_are_means_over_all_records(trained):
    recipe = load_recipe(MEASURED)
    batch = recipe.source("evaluation").read(torch.arange(333).numpy())
    with torch.no_grad():
        error = checkpoint.load_model(recipe, trained)(batch.inputs) - batch.labels
    found = evaluate(MEASURED, trained, batch=100, workers=2)
    assert found.loss == pytest.approx(error.square().mean().item())
    assert found.metrics == pytest.approx({"absolute": error.abs().mean().item(), "mean": error.mean().item()})


def test_an_untrained_model_is_the_same_in_every_process():
    assert evaluate(MEASURED, None, batch=64, workers=3) == evaluate(MEASURED, None, batch=64)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_predictions_are_the_bytes_that_one_process_writes(trained, tmp_path, ending):
    predict(MEASURED, trained, tmp_path / f"one{ending}", batch=32)
    done = predict(MEASURED, trained, tmp_path / f"many{ending}", batch=32, workers=3)
    assert done.records == 333
    assert (tmp_path / f"many{ending}").read_bytes() == (tmp_path / f"one{ending}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", f"many{ending}", f"one{ending}"]


def test_a_worker_that_kills_itself_once_changes_no_number(trained, tmp_path, monkeypatch):
    alone = evaluate(MEASURED, trained, batch=32)
    trouble(monkeypatch, "die", 100, tmp_path / "died")
    said = []
    with events.listening(lambda name, fields: said.append((name, fields.get("why")))):
        assert evaluate(MEASURED, trained, batch=32, workers=2) == alone
    assert (tmp_path / "died").exists()
    assert ("pool.lost", "killed by SIGKILL") in said


def test_sigkills_from_outside_change_no_byte(trained, tmp_path, monkeypatch):
    predict(MEASURED, trained, tmp_path / "one.jsonl", batch=8)
    prison, records, killed = tmp_path / "prison", (16, 80, 150, 290), []  # of four chunks
    prison.mkdir()

    def kill():
        for record in records:
            until((prison / str(record)).exists, f"a worker reads record {record}")
            killed.append(int((prison / str(record)).read_text()))
            os.kill(killed[-1], signal.SIGKILL)
            (prison / f"{record}.killed").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    monkeypatch.setenv("MEASURED_PRISON", f"{prison}:{','.join(map(str, records))}")
    predict(MEASURED, trained, tmp_path / "many.jsonl", batch=8, workers=3)
    killer.join()
    assert len(set(killed)) == 4
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_a_worker_that_hangs_is_overtaken(trained, tmp_path, monkeypatch):
    alone = evaluate(MEASURED, trained, batch=32)
    trouble(monkeypatch, "hang", 100, tmp_path / "hung")
    assert evaluate(MEASURED, trained, batch=32, workers=2) == alone
    assert (tmp_path / "hung").exists()


def test_when_every_worker_hangs_they_are_replaced(trained, tmp_path, monkeypatch):
    alone = evaluate(MEASURED, trained, batch=333)
    trouble(monkeypatch, "hang", 100, tmp_path / "hung")
    monkeypatch.setattr(pool, "PATIENCE_S", 5.0)  # on a busy machine, too, a batch is done by then
    assert evaluate(MEASURED, trained, batch=333, workers=2) == alone


def test_a_record_that_always_raises_is_named(trained, monkeypatch):
    trouble(monkeypatch, "raise", 100)
    with pytest.raises(DataError, match="record 100 of dataset Troubled cannot be read: ValueError: an odd record"):
        evaluate(MEASURED, trained, batch=32, workers=2)


def test_a_record_that_raises_once_is_tried_again(trained, tmp_path, monkeypatch):
    alone = evaluate(MEASURED, trained, batch=32)
    trouble(monkeypatch, "raise", 100, tmp_path / "raised")
    assert evaluate(MEASURED, trained, batch=32, workers=2) == alone


def test_a_record_that_ends_every_process_is_named(trained, tmp_path, monkeypatch):
    trouble(monkeypatch, "die", 100)
    with pytest.raises(DataError, match=r"record 100 of dataset\('prediction'\) ends every process .* SIGKILL"):
        predict(MEASURED, trained, tmp_path / "out.jsonl", batch=32, workers=2)
    assert not (tmp_path / "out.jsonl").exists()


def test_what_every_worker_would_meet_is_one_error_of_its_own_kind(tmp_path):
    other = checkpoint.write(tmp_path, step=1, state={"model": {"w": torch.ones(2)}}, facts={})
    with pytest.raises(CheckpointError, match="does not fit the model of recipe 'measured'"):
        evaluate(MEASURED, other, workers=2)


def test_a_recipe_that_no_other_process_can_load_is_refused(trained):
    with pytest.raises(UsageError, match="has no file that worker processes could load"):
        evaluate(replace(load_recipe(MEASURED), path=None), trained, workers=2)


def test_a_disk_without_room_is_a_storage_error(trained, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        predict(MEASURED, trained, tmp_path / "file" / "out.jsonl", workers=2)


COMMAND = """
import sys
from trueline.cli import main
main()
"""


def started(trained, *arguments, slow_s=0.02):
    command = [sys.executable, "-c", COMMAND, "evaluate", str(MEASURED), str(trained), "--workers", "2", *arguments]
    environment = {**os.environ, "MEASURED_SLOW_S": str(slow_s), "TMPDIR": tempfile.gettempdir()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def descendants_once_at_work(process):
    """The agent and both workers, once they run."""

    def look():
        assert process.poll() is None, process.communicate()
        found = psutil.Process(process.pid).children(recursive=True)
        return found if len(found) >= 3 else []

    return until(look, "the agent and two workers run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_command_ends_its_processes_end(trained, number):
    process = started(trained, slow_s=1.0)  # it would be at work for long
    below = descendants_once_at_work(process)
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode != 0
    until_ended(one.pid for one in below)
    if number == signal.SIGKILL:  # who is killed cannot clean up; nothing else stays
        for left in Path(tempfile.gettempdir()).iterdir():
            shutil.rmtree(left)


def test_the_command_shares_out_the_work(trained):
    process = subprocess.run(
        [sys.executable, "-c", COMMAND, "evaluate", str(MEASURED), str(trained), "--workers", "2", "--json"],
        capture_output=True, text=True, check=True, env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )  # fmt: skip
    assert json.loads(process.stdout) == evaluate(MEASURED, trained).as_dict()
    assert "evaluating 333/333" in process.stderr


def test_a_notebooks_own_event_loop_is_no_obstacle(trained):
    import asyncio

    async def cell():
        return evaluate(MEASURED, trained, batch=64, workers=2)

    assert asyncio.run(cell()) == evaluate(MEASURED, trained, batch=64)
