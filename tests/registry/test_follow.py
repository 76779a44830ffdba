"""A job's run in MLflow is complete, has nothing twice, and costs the job nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trueline.errors import MissingPackage, RegistryError, UsageError
from trueline.registry import RunFacts, follow, register, store, wandb_tracker
from trueline.registry.curves import MAX_POINTS, Curves, TrackedJob
from trueline.registry.machine import MachineLoad
from trueline.registry.mlflow_tracker import MlflowTracker
from worlds import bundles
from worlds.waiting import until

Event = tuple[str, dict[str, Any], float]


@pytest.fixture(scope="module", name="registry")
def _registry(tmp_path_factory: pytest.TempPathFactory, new_registry: Callable[[Path], str]) -> Path:
    """One store for all."""
    folder = tmp_path_factory.mktemp("mlflow")
    new_registry(folder)
    return folder


def steps(first: int, stop: int, *, total: int) -> Iterator[Event]:
    for step in range(first, stop):
        fields = {"step": step, "total": total, "loss": 1 / (step + 1), "workers": 2, "records": 8, "gap_ms": 0.0}
        yield "step.applied", fields, 1000.0 + step


def end(total: int, name: str = "job.finished") -> Iterator[Event]:
    yield "evaluation.done", {"step": total, "loss": 0.25, "metrics": '{"top-5 %": 0.9}', "best": True}, 1000.0 + total
    yield "epoch.certified", {"epoch": 0, "steps": total, "tally_min": 1, "tally_max": 1}, 1000.0 + total
    yield name, {"why": "because"}, 1000.0 + total


def job(folder: Path, *told: Event) -> Path:
    folder.mkdir()
    settings = {"name": folder.name, "epochs": 3, "seed": 0, "recipe_digest": "d" * 64, "faults": []}
    (folder / "job.json").write_text(json.dumps(settings))
    (folder / "summary.json").write_text(json.dumps({"certificates": [{"tally_max": 1}], "steps": 6}))
    (folder / "page.html").write_text("<!doctype html>")
    say(folder, *told)
    return folder


def say(folder: Path, *told: Event) -> None:
    with (folder / "events.jsonl").open("a") as log:
        for name, fields, at in told:
            log.write(json.dumps({"at": at, "seq": 1, "name": name, "fields": fields}) + "\n")


def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def found(folder: Path, run_id: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The run and all its curves."""
    with store.open_store(uri(folder)) as client:
        run = client.get_run(run_id)
        histories = {key: client.get_metric_history(run_id, key) for key in run.data.metrics}
    return run, {key: [(point.step, point.value) for point in history] for key, history in histories.items()}


@pytest.mark.slow
def test_a_finished_job_is_a_run_with_its_settings_curves_certificates_and_files(
    registry: Path, tmp_path: Path
) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 6, total=6), *end(6))
    run, curves = found(registry, follow.follow(folder, tracking_uri=uri(registry)))
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-1")
    assert run.data.params == {"name": "digits-1", "epochs": "3", "seed": "0", "recipe_digest": "d" * 64}
    assert curves["train/loss"] == [(step, 1 / (step + 1)) for step in range(6)]
    assert curves["records_per_second"] == [(step, 8.0) for step in range(1, 6)]
    assert curves["eval/top-5 _"] == [(6, 0.9)]
    assert json.loads(run.data.tags["trueline.certificate.0"])["steps"] == 6
    assert (run.data.tags["trueline.state"], run.data.tags["trueline.exactly_once"]) == ("finished", "true")
    with store.open_store(uri(registry)) as client:
        assert client.get_experiment_by_name("digits").experiment_id == run.info.experiment_id
        files = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert files == {"summary.json", "events.jsonl", "page.html", "job.json"}


@pytest.mark.parametrize("total", [10, MAX_POINTS, MAX_POINTS + 1, 40 * MAX_POINTS])
def test_a_curve_has_a_bounded_number_of_points_and_all_steps_are_in_their_means(total: int) -> None:
    curves = Curves()
    for event in steps(0, total, total=total):
        curves.hear(*event)
    curves.hear(*[*end(total)][-1])
    points = [value for key, value, _, _ in curves.points if key == "members"]
    assert min(total, MAX_POINTS // 2) <= len(points) <= MAX_POINTS
    assert set(points) == {2.0}


def test_steps_that_a_master_told_late_and_at_once_have_the_rate_at_which_they_were_made() -> None:
    curves = Curves()
    for name, fields, _ in steps(0, 5, total=5):
        curves.hear(name, {**fields, "at_ns": int((70 + fields["step"] / 4) * 1e9)}, 2000.0)
    assert [value for key, value, _, _ in curves.points if key == "records_per_second"] == [32.0] * 4


def test_how_a_job_ended_stays_when_its_launcher_tidies_up() -> None:
    curves = Curves()
    curves.hear("job.failed", {"why": "state lost"}, 1.0)
    curves.hear("job.stopping", {"why": "the launcher ends"}, 2.0)
    curves.hear("launcher.ended", {"outcome": "failed", "why": ""}, 3.0)
    assert (curves.end, curves.tags["trueline.why"]) == ("FAILED", "state lost")
    curves = Curves()
    curves.hear("launcher.ended", {"outcome": "stopped", "why": "SIGHUP"}, 3.0)
    assert (curves.end, curves.tags["trueline.why"]) == ("KILLED", "SIGHUP")


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("job.finished", {}, "FINISHED"),
        ("job.failed", {"why": "state lost"}, "FAILED"),
        ("job.stopping", {"why": "halt"}, "KILLED"),
        ("launcher.ended", {"outcome": "stopped", "why": "SIGHUP"}, "KILLED"),
        ("launcher.ended", {"outcome": "failed", "why": "its master died 11 times"}, "FAILED"),
        ("launcher.ended", {"outcome": "finished", "why": ""}, "FINISHED"),
        ("launcher.ended", {}, "KILLED"),
    ],
    ids=str,
)
def test_each_end_of_a_job_is_the_end_of_its_run(name: str, fields: dict[str, Any], status: str) -> None:
    curves = Curves()
    curves.hear(name, fields, 1.0)
    state = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}[status]
    assert (curves.end, curves.tags) == (status, {"trueline.state": state, "trueline.why": fields.get("why", "")})
    curves.hear("worker.started", {"worker": "worker-0.1"}, 2.0)
    assert (curves.end, curves.tags["trueline.state"]) == ("", "running"), "it was resumed"


class Client:
    """MLflow's client as far as a follower of a known run needs it: what was set last."""

    tracking_uri = "sqlite:////mlflow.db"

    def __init__(self) -> None:
        self.status, self.tags, self.files = "", dict[str, str](), list[str]()

    def update_run(self, run_id: str, status: str) -> None:
        self.status = status

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def log_batch(self, run_id: str, metrics: Any, tags: Any) -> None:
        self.tags |= {tag.key: tag.value for tag in tags}

    def log_artifact(self, run_id: str, path: str) -> None:
        self.files.append(Path(path).name)

    def set_terminated(self, run_id: str, status: str, end_time: int | None) -> None:
        self.status = status


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
@pytest.mark.parametrize("most", [1, -1, 2])
def test_a_run_is_closed_as_its_job_ended_and_only_a_finished_one_says_exactly_once(
    tmp_path: Path, status: str, most: int
) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 2, total=2))
    (folder / "summary.json").write_text(json.dumps({"certificates": [{"tally_max": 1}, {"tally_max": most}]}))
    (folder / "mlflow.json").write_text(json.dumps({"run_id": "r", "tracking_uri": Client.tracking_uri, "offset": 0}))
    client: Any = Client()
    follower = follow._Follower(folder, MlflowTracker(client))
    assert (follower.run_id, client.status) == ("r", "RUNNING")
    follower.close(status)
    once = {"trueline.exactly_once": "false" if most == 2 else "true"} if status == "FINISHED" else {}
    assert client.tags == {
        "trueline.state": {"FINISHED": "finished", "FAILED": "failed"}.get(status, "stopped"),
        **once,
    }
    assert (client.status, "events.jsonl" in client.files) == (status, True)


@pytest.mark.slow
@pytest.mark.long
def test_a_follower_that_is_killed_goes_on_with_the_same_run_and_logs_nothing_twice(
    registry: Path, tmp_path: Path
) -> None:
    stride = 7  # a point of so many steps is cut in two wherever the follower is killed here
    total = stride * MAX_POINTS
    folder = job(tmp_path / "digits-1", *steps(0, 1000, total=total))
    (folder / "master.json").write_text(json.dumps({"pid": os.getpid()}))  # the job lives
    process = follow.start(folder, tracking_uri=uri(registry))
    before = _logged(folder)
    say(folder, *steps(1000, 3000, total=total))

    def has_logged_more() -> bool:
        assert process.poll() is None, (folder / "logs" / "mlflow.log").read_text()
        return _logged(folder) > before

    until(has_logged_more, "the follower logs points")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    say(folder, *steps(3000, total, total=total), *end(total))
    run, curves = found(registry, follow.follow(folder, tracking_uri=uri(registry)))
    assert run.info.run_id == json.loads((folder / "mlflow.json").read_text())["run_id"]
    means = [sum(1 / (step + 1) for step in range(at, at + stride)) / stride for at in range(0, total, stride)]
    assert [step for step, _ in curves["train/loss"]] == list(range(stride - 1, total, stride))
    assert [value for _, value in curves["train/loss"]] == pytest.approx(means)
    assert run.info.status == "FINISHED"


def _logged(folder: Path) -> int:
    file = folder / "mlflow.json"
    return int(json.loads(file.read_text())["offset"]) if file.exists() else -1


@pytest.mark.slow
def test_what_was_logged_before_a_death_is_logged_again_without_a_trace(registry: Path, tmp_path: Path) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 5, total=9))
    with store.open_store(uri(registry)) as client:
        follower = follow._Follower(folder, MlflowTracker(client))
        saved = (folder / "mlflow.json").read_bytes()
        follower.read()
        follower.flush()
    (folder / "mlflow.json").write_bytes(saved)  # killed after it had logged and before it said so
    say(folder, *steps(5, 9, total=9), *end(9))
    run, curves = found(registry, follow.follow(folder, tracking_uri=uri(registry)))
    assert [step for step, _ in curves["train/loss"]] == list(range(9))
    assert run.info.run_id == json.loads(saved)["run_id"]


@pytest.mark.slow
def test_a_resumed_job_goes_on_in_its_run(registry: Path, tmp_path: Path) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 4, total=8), *end(4, "job.failed"))
    first = follow.follow(folder, tracking_uri=uri(registry))
    assert found(registry, first)[0].info.status == "FAILED"
    say(folder, ("worker.started", {"worker": "worker-0.1"}, 2000.0), *steps(3, 8, total=8), *end(8))
    assert follow.follow(folder, tracking_uri=uri(registry)) == first
    run, curves = found(registry, first)
    assert run.info.status == "FINISHED"
    assert {step for step, _ in curves["train/loss"]} == set(range(8))


@pytest.mark.slow
def test_a_job_that_vanished_without_an_end_was_killed(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "GONE_S", 0.0)
    folder = job(tmp_path / "digits-1", *steps(0, 4, total=8))
    assert found(registry, follow.follow(folder, tracking_uri=uri(registry)))[0].info.status == "KILLED"


@pytest.mark.slow
def test_a_store_that_is_away_is_asked_again_while_the_job_runs(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 4, total=4), *end(4))
    refusals = [RegistryError("away"), RegistryError("away")]
    opened = store.open_store

    def sometimes(tracking_uri: str | None) -> Any:
        if refusals:
            raise refusals.pop()
        return opened(tracking_uri)

    monkeypatch.setattr(store, "open_store", sometimes)
    monkeypatch.setattr(follow, "RETRY_S", 0.0)
    with pytest.raises(RegistryError):
        follow.follow(folder, tracking_uri=uri(registry))
    (folder / "launcher.json").write_text(json.dumps({"pid": os.getpid()}))
    follow.follow(folder, tracking_uri=uri(registry))


def test_a_tracker_that_is_not_installed_is_named_before_a_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow.check_tracker("mlflow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text("raise RuntimeError('a check imports nothing')")
    follow.check_tracker("ours:open_tracker")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingPackage, match="this needs the package wandb, which is not installed") as caught:
        follow.check_tracker("wandb")
    assert caught.value.hint == "pip install 'trueline[wandb]'"
    for name, words in (
        ("wandbb", "'wandbb' is no tracker"),
        ("theirs:f", "there is no module 'theirs'"),
        (":f", "no"),
    ):
        with pytest.raises(UsageError, match=words):
            follow.check_tracker(name)


def test_only_one_process_follows_a_job_and_only_a_job(tmp_path: Path) -> None:
    folder = job(tmp_path / "digits-1")
    with follow._alone(folder), pytest.raises(UsageError, match=r"logs .*digits-1 to MLflow already"):
        follow.follow(folder)
    with pytest.raises(UsageError, match=r"has no job\.json"):
        follow.follow(tmp_path)


@pytest.mark.slow
def test_a_registered_bundle_belongs_to_the_run_of_its_job(
    registry: Path, tmp_path: Path, new_registry: Callable[[Path], str]
) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 4, total=4), *end(4))
    run_id = follow.follow(folder, tracking_uri=uri(registry))
    bundles.scaled(tmp_path / "b.bundle")
    facts = RunFacts(params={"epochs": 4, "team": "vision"}, metrics={"loss": 0.5}, job_dir=folder)
    version = register(tmp_path / "b.bundle", tracking_uri=uri(registry), run=facts)
    assert version.run_id == run_id
    run, curves = found(registry, run_id)
    assert (run.data.params["epochs"], run.data.params["team"]) == ("3", "vision")
    assert curves["loss"] == [(0, 0.5)]
    assert run.data.tags[store.DIGEST_TAG] == version.digest
    other = tmp_path / "other"
    other.mkdir()
    new_registry(other)
    elsewhere = register(tmp_path / "b.bundle", tracking_uri=uri(other), run=facts)
    assert elsewhere.run_id != run_id
    assert follow.follow(folder, tracking_uri=uri(other)) == elsewhere.run_id


@pytest.mark.slow
def test_registering_logs_a_job_that_nothing_followed_with_its_own_times_and_curves(
    registry: Path, tmp_path: Path
) -> None:
    folder = job(tmp_path / "digits-1", *steps(0, 4, total=4), *end(4))
    ended = {"pid": os.getpid(), "started": 1000.0, "ended": 1004.0, "outcome": "finished"}
    (folder / "launcher.json").write_text(
        json.dumps(ended)
    )  # this process, as a notebook's kernel, trained and lives on
    bundles.scaled(tmp_path / "b.bundle")
    facts = RunFacts(params={"records": 32, "steps": 4}, job_dir=folder)
    version = register(tmp_path / "b.bundle", tracking_uri=uri(registry), run=facts)
    run, curves = found(registry, version.run_id)
    assert (run.info.start_time, run.info.end_time, run.info.status) == (1_000_000, 1_004_000, "FINISHED")
    assert run.data.tags["trueline.job_dir"] == str(folder)
    assert len(curves["train/loss"]) == 4
    with store.open_store(uri(registry)) as client:
        described = client.get_model_version(version.name, str(version.version))
    assert "job `digits-1`: 4 steps, 32 records" in described.description
    assert described.tags["trueline.job"] == "digits-1"


def test_what_a_loop_logs_is_a_curve() -> None:
    curves = Curves()
    curves.hear("loop.logged", {"step": 3, "top-5 (%)": 0.5}, 10.0)
    assert curves.points == [("top-5 ___", 0.5, 10_000, 3)]


def test_the_load_of_the_machine_is_read_as_mlflow_names_it(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 0 10 70 10 0 0 0 0 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 1024 kB\nHugePages_Total:       0\n")
    load = MachineLoad(tmp_path)
    (tmp_path / "stat").write_text("cpu  40 0 10 130 20 0 0 0 0 0\n")
    assert load.read() == {
        "system/cpu_utilization_percentage": 30.0,
        "system/system_memory_usage_megabytes": 3.0,
        "system/system_memory_usage_percentage": 75.0,
    }
    assert MachineLoad(tmp_path / "none").read() == {}


class Ours:
    """A tracker of a user's own, as docs/guides/see.md describes it."""

    place = "here"
    told: ClassVar[list[Any]] = []

    def begin(self, job: TrackedJob, run: str) -> str:
        self.told.append(("begin", job.group, run))
        return "run-1"

    def log(self, points: Any, tags: Any) -> None:
        self.told.extend([point[:2] for point in points])
        self.told.extend(tags.items())

    def end(self, status: str, at_ms: int | None, kept: Any) -> None:
        self.told.append(("end", status, at_ms, {path.name for path in kept}))


def open_ours(job_dir: Path) -> Any:
    return nullcontext(Ours())


def test_a_tracker_of_ones_own_gets_curves_and_the_end_and_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("ours")
    monkeypatch.setattr(module, "open", open_ours, raising=False)
    monkeypatch.setitem(sys.modules, "ours", module)
    monkeypatch.setattr(Ours, "told", [])
    folder = job(tmp_path / "digits-1", *steps(0, 2, total=2), *end(2))
    assert follow.follow(folder, tracker="ours:open") == "run-1"
    assert Ours.told[0] == ("begin", "digits", "")
    assert ("train/loss", 0.5) in Ours.told
    assert ("trueline.exactly_once", "true") in Ours.told
    assert Ours.told[-1][:3] == ("end", "FINISHED", 1_002_000)
    assert "events.jsonl" in Ours.told[-1][3]
    before = len(Ours.told)
    assert follow.follow(folder, tracker="ours:open") == "run-1"
    assert Ours.told[before] == ("begin", "digits", "run-1")
    assert "train/loss" not in [one[0] for one in Ours.told[before:]], "nothing comes twice"


@pytest.mark.parametrize("name", ["nowhere:open", "trueline.registry.curves:nothing", "weights", ""])
def test_a_tracker_that_does_not_exist_is_an_error_that_lists_the_others(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no tracker") as caught:
        follow.follow(job(tmp_path / "digits-1"), tracker=name)
    assert "wandb" in caught.value.hint


class Run:
    """W&B's run as far as a tracker needs it."""

    id = "abc"

    def __init__(self, told: list[Any]) -> None:
        self.told, self.summary = told, dict[str, str]()

    def define_metric(self, name: str, step_metric: str) -> None:
        self.told.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.told.append(row)

    def save(self, path: str, base_path: str, policy: str) -> None:
        self.told.append(Path(path).name)

    def finish(self, exit_code: int) -> None:
        self.told.append(exit_code)


def test_weights_and_biases_gets_a_row_for_each_step_by_a_step_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    run = Run(told)

    def init(**given: Any) -> Run:
        told.append(given)
        return run

    module: Any = types.ModuleType("wandb")
    module.init, module.Error = init, OSError
    monkeypatch.setitem(sys.modules, "wandb", module)
    folder = job(tmp_path / "digits-1", *steps(0, 2, total=2), *end(2, "job.failed"))
    assert follow.follow(folder, tracker="wandb") == "abc"
    assert (told[0]["project"], told[0]["name"], told[0]["resume"]) == ("digits", "digits-1", None)
    assert told[0]["config"]["epochs"] == 3
    assert told[1] == ("*", wandb_tracker.STEP)
    rows = [one for one in told[2:] if isinstance(one, dict)]
    assert (rows[0][wandb_tracker.STEP], rows[0]["train/loss"]) == (0, 1.0)
    assert (told[-1], run.summary["trueline.state"]) == (1, "failed")
