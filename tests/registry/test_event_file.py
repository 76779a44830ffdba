"""A job's event file is what TensorBoard reads, complete and without repetitions whatever happened to its writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trueline.registry import event_file
from trueline.registry.event_file import EventFile
from worlds.curves import curves

Event = tuple[str, dict[str, Any]]


def step(number: int, loss: float = 0.5, **more: Any) -> Event:
    fields = {"step": number, "total": 10, "loss": loss, "workers": 2, "records": 8, **more}
    return "step.applied", fields


def say(folder: Path, *told: Event) -> None:
    with (folder / "events.jsonl").open("a") as log:
        for at, (name, fields) in enumerate(told):
            log.write(json.dumps({"at": 1000.0 + at, "name": name, "fields": fields}) + "\n")


def write(folder: Path) -> bytes:
    file = EventFile(folder)
    while file.update():
        pass
    return file.path.read_bytes()


def test_tensorboard_reads_loss_evaluations_and_what_a_loop_logs(tmp_path: Path) -> None:
    logged = ("loop.logged", {"step": 1, "reward": -0.25})
    evaluated = ("evaluation.done", {"step": 2, "loss": 0.125, "metrics": '{"accuracy": 0.75}'})
    say(tmp_path, step(0, 4.0, learning_rate=0.5), step(1, 2.0), logged, evaluated)
    write(tmp_path)
    found = curves(tmp_path)
    assert found["train/loss"] == [(0, 4.0), (1, 2.0)]
    assert (found["reward"], found["eval/accuracy"]) == ([(1, -0.25)], [(2, 0.75)])
    assert found["learning_rate"] == [(0, 0.5)]


def test_tensorboard_reads_the_settings_that_change_what_is_learned_as_hyperparameters(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    from tensorboard.plugins.hparams import metadata

    settings = {"epochs": 3, "clip_norm": 0.5, "shuffle": "full", "listen": "host:1", "faults": []}
    (tmp_path / "job.json").write_text(json.dumps(settings))
    say(tmp_path, step(0), step(1))
    write(tmp_path)
    values = [
        one for event in loader.EventFileLoader(str(tmp_path / event_file.NAME)).Load() for one in event.summary.value
    ]
    (found,) = [one for one in values if one.tag == metadata.SESSION_START_INFO_TAG]
    started = metadata.parse_session_start_info_plugin_data(found.metadata.plugin_data.content)
    assert started.start_time_secs == 1000.0
    assert {name: getattr(one, one.WhichOneof("kind")) for name, one in started.hparams.items()} == {
        "epochs": 3.0, "clip_norm": 0.5, "shuffle": "full",
    }  # fmt: skip


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e300])
def test_a_loss_that_float32_does_not_hold_is_a_point_too(tmp_path: Path, loss: float) -> None:
    say(tmp_path, step(0, loss), step(1, 0.5))
    write(tmp_path)
    assert [at for at, _ in curves(tmp_path)["train/loss"]] == [0, 1]


def test_steps_that_were_rolled_back_are_not_in_the_curve(tmp_path: Path) -> None:
    say(tmp_path, *[step(number, 1.0) for number in range(6)], *[step(number, 2.0) for number in range(3, 7)])
    write(tmp_path)
    found = curves(tmp_path)
    assert found["train/loss"] == [(0, 1.0), (1, 1.0), (2, 1.0), *[(number, 2.0) for number in range(3, 7)]]
    assert [at for at, _ in found["members"]] == list(range(7)), "each step once in every curve"


def test_a_writer_that_died_anywhere_is_continued_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "SLICE", 3)
    (tmp_path / "whole").mkdir()
    told = [step(number, 1 / (number + 1)) for number in range(8)]
    say(tmp_path / "whole", *told)
    whole = write(tmp_path / "whole")
    for cut in (*range(0, len(whole), 97), len(whole)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / event_file.NAME).write_bytes(whole[:cut])
        say(folder, *told)
        assert write(folder) == whole


def test_a_file_that_does_not_follow_from_the_events_is_written_anew(tmp_path: Path) -> None:
    say(tmp_path, step(0), step(1))
    whole = write(tmp_path)
    (tmp_path / event_file.NAME).write_bytes(whole[:40] + b"\0" * 400)
    assert write(tmp_path) == whole


def test_a_disk_that_is_full_for_a_while_loses_no_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(tmp_path, step(0), step(1))
    file, pwrite = EventFile(tmp_path), event_file.os.pwrite

    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(event_file.os, "pwrite", refuse)
    file.update()
    monkeypatch.setattr(event_file.os, "pwrite", pwrite)
    file.update()
    assert [at for at, _ in curves(tmp_path)["train/loss"]] == [0, 1]


def test_the_file_is_kept_while_a_block_runs_and_complete_after_it(tmp_path: Path) -> None:
    with event_file.writing(tmp_path):
        say(tmp_path, *[step(number) for number in range(5)])
    assert [at for at, _ in curves(tmp_path)["train/loss"]] == list(range(5))
