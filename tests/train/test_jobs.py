"""Promises of whole jobs: real processes, real kills, injected by step. Each job takes a few seconds."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from trueline import errors, events
from trueline.checkpoint import checkpoint
from trueline.recipe.load import load_recipe
from trueline.train.api import train
from trueline.train.settings import Fault
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc
from worlds.curves import curves
from worlds.jobs import RECORDS, STEPS, TINY, JobGate, find_agent, plain_loop, seen_counts
from worlds.waiting import until_ended

pytestmark = pytest.mark.slow


class Heard:
    """The events of a job; `at(name, act)` acts on the first event of that name that `when` accepts."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict]] = []
        self.reactions: list = []

    def at(self, name, act, when=lambda fields: True) -> "Heard":
        self.reactions.append((name, when, act))
        return self

    def __call__(self, name: str, fields: dict) -> None:
        self.all.append((name, fields))
        for reaction in [r for r in self.reactions if r[0] == name and r[1](fields)]:
            self.reactions.remove(reaction)
            reaction[2](fields)

    def of(self, name: str) -> list[dict]:
        return [fields for found, fields in self.all if found == name]


def run(tmp_path, heard=None, *, lease_s=60.0, **options):
    """A job of which nobody is given up because the machine is slow: who hangs is told from who is slow below."""
    heard = heard or Heard()
    with events.listening(heard):
        result = train(TINY, job_dir=tmp_path / "job", lease_s=lease_s, **options)
    assert psutil_left(tmp_path) == []
    return result, heard


def psutil_left(tmp_path) -> list[str]:
    """Command lines of processes that still have to do with the job."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(tmp_path / "job") in line and process.info["status"] != psutil.STATUS_ZOMBIE and "pytest" not in line:
            found.append(line)
    return found


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Opens the gate of the recipe, before which the steps from the twentieth on are slow."""
    return JobGate(tmp_path, monkeypatch).open


class Usual:
    """One job of three workers, of which one is killed, for all tests that only look at one: what happened, and what
    was tried while it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.heard = folder, Heard()
        self.refused: list[grpc.StatusCode] = []
        self.modes: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            for act in (self.knock, self.look_at_the_secret, self.leave_a_part, JobGate(folder, patch).open):
                self.heard.at("step.applied", act)
            self.result, _ = run(folder, self.heard, workers=3, faults=[Fault(step=10, slot=1)], profile="3:5")

    def knock(self, _) -> None:
        address = json.loads((self.folder / "job" / "master.json").read_text())["address"]
        with grpc.insecure_channel(address) as channel:
            try:
                pb_grpc.MasterStub(channel).Stop(pb.StopRequest(why="a stranger"))
            except grpc.RpcError as error:
                self.refused.append(error.code())

    def look_at_the_secret(self, _) -> None:
        self.modes.append((self.folder / "job" / "secret").stat().st_mode & 0o777)

    def leave_a_part(self, _) -> None:
        (self.folder / "job" / "checkpoints" / ".partial-of-the-dead").mkdir(parents=True)


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> Usual:
    return Usual(tmp_path_factory.mktemp("usual"))


def test_three_workers_arrive_where_one_plain_loop_arrives(usual):
    expected = plain_loop(load_recipe(TINY), STEPS)
    found = checkpoint.read(usual.result.checkpoint).state["model"]
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-9, atol=1e-12)
    assert [fields["step"] for fields in usual.heard.of("step.applied")] == list(range(STEPS))
    assert {fields["records"] for fields in usual.heard.of("epoch.certified")} == {RECORDS}


def test_the_master_answers_nobody_without_the_jobs_secret(usual):
    assert usual.refused == [grpc.StatusCode.UNAUTHENTICATED]
    assert usual.modes == [0o600]
    assert not (usual.folder / "job" / "secret").exists()


def test_what_a_killed_writer_left_of_a_checkpoint_is_swept_away(usual):
    assert not list(usual.result.checkpoint.parent.glob(".partial-*"))


def test_resuming_with_other_settings_is_refused_with_what_changed(usual):
    with pytest.raises(errors.UsageError, match="another one: global_batch was 30"):
        train(TINY, job_dir=usual.folder / "job", global_batch=40, resume=True)


def test_a_death_in_every_phase_of_a_step_loses_no_record_and_repeats_none(tmp_path):
    phases = ("before", "backward", "allreduced", "applied")
    faults = [Fault(step=5 + 9 * n, slot=n % 3, incarnation=n // 3, phase=phase) for n, phase in enumerate(phases)]
    result, heard = run(tmp_path, workers="2:3", faults=faults)
    assert len(heard.of("worker.lost")) == 4
    assert seen_counts(result.checkpoint) == [6.0]
    assert result.summary.exactly_once
    found, expected = checkpoint.read(result.checkpoint).state["model"], plain_loop(load_recipe(TINY), STEPS)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-9, atol=1e-12)


def test_survivors_keep_their_processes_when_a_worker_dies_and_summary_and_page_tell_of_it(usual):
    result, heard, job = usual.result, usual.heard, usual.folder / "job"
    started = [fields["worker"] for fields in heard.of("worker.started")]
    assert started == ["worker-0.0", "worker-1.0", "worker-2.0", "worker-1.1"]
    (regroup, *_) = [r for r in result.summary.as_dict()["regroups"] if "is gone" in r["reason"]]
    assert (regroup["reason"], regroup["workers"]) == ("worker-1.0 is gone: killed by SIGKILL", 2)
    assert regroup["gap_ms"] > 0
    agrees_with_its_page(job, result.summary.as_dict())
    for tag, values in curves(job).items():
        assert [at for at, _ in values] == sorted(at for at, _ in values), tag
    assert [path.name for path in (job / "traces").iterdir()] == ["steps-3-4.json"]
    assert [at for at, _ in curves(job)["train/loss"]] == list(range(STEPS)), "for TensorBoard, by itself"


def agrees_with_its_page(job: Path, summary: dict) -> None:
    """The page that a job of one death leaves says what its summary says."""
    kept = (job / "page.html").read_text()
    (text,) = re.findall(r'<script type="application/json" id="state">(.*?)</script>', kept, re.DOTALL)
    state = json.loads(text)
    assert (state["phase"], state["step"], state["deaths"]) == ("finished", STEPS, {"SIGKILL": 1})
    assert [one["records"] for one in state["certificates"]] == [one["records"] for one in summary["certificates"]]
    gaps = [one["generation"] for one in summary["regroups"] if one["gap_ms"]]
    assert [one["generation"] for one in state["regroups"] if one["gap_ms"]] == gaps
    assert state["lanes"][1]["spans"][0][4] == "died"
    assert state["measured"][0][1:3] == [0, 0.1]
    assert state["measured"][0][3] > 0, "the gradients' norm"
    assert min(state["memory"].values()) > 50 * 2**20
    assert not (job / "page.token").exists()


def kill_master(tmp_path):
    return lambda _: os.kill(json.loads((tmp_path / "job" / "master.json").read_text())["pid"], signal.SIGKILL)


@pytest.mark.jobs
def test_the_masters_death_costs_no_step_and_no_worker(tmp_path, gate):
    heard = Heard().at("step.applied", kill_master(tmp_path), lambda fields: fields["step"] >= 10)
    heard.at("step.applied", gate, lambda _: heard.of("master.lost") != [])
    result, heard = run(tmp_path, heard, workers=2, epochs=12)
    assert len(heard.of("master.lost")) == 1
    assert [fields["worker"] for fields in heard.of("worker.started")] == ["worker-0.0", "worker-1.0"]
    assert result.summary.as_dict()["generations"] == 1
    assert seen_counts(result.checkpoint) == [12.0]


@pytest.mark.jobs
def test_a_worker_that_dies_while_the_master_is_dead_is_noticed_and_replaced(tmp_path, gate):
    heard = Heard().at("worker.joined", gate, lambda fields: fields["worker"] == "worker-1.1")

    def both(fields):
        pids = {f["worker"]: f["pid"] for f in heard.of("worker.running")}
        kill_master(tmp_path)(fields)
        os.kill(pids["worker-1.0"], signal.SIGKILL)

    heard.at("step.applied", both, lambda fields: fields["step"] >= 10)
    result, heard = run(tmp_path, heard, workers="2:3", epochs=12)
    assert "worker-1.1" in [fields["worker"] for fields in heard.of("worker.started")]
    assert seen_counts(result.checkpoint) == [12.0]


@pytest.mark.jobs
def test_the_agents_death_costs_no_step_and_a_replacement_can_still_start(tmp_path, gate):
    heard = Heard().at("agent.lost", gate)

    heard.at("step.applied", lambda _: find_agent(os.getpid()).kill(), lambda fields: fields["step"] >= 10)
    result, heard = run(tmp_path, heard, workers=2, epochs=12)
    assert len(heard.of("agent.lost")) == 1
    assert len(heard.of("worker.started")) == 2
    assert seen_counts(result.checkpoint) == [12.0]


@pytest.mark.jobs
@pytest.mark.parametrize("slot", [0, *(pytest.param(slot, marks=pytest.mark.long) for slot in (1, 2))])
def test_the_last_checkpoint_is_of_the_last_step_whoever_dies_after_it(tmp_path, slot):
    faults = [Fault(step=STEPS, slot=other, phase="applied") for other in range(3) if other != slot]
    result, _ = run(tmp_path, workers=3, faults=faults, checkpoint_every=10)
    assert checkpoint.read(result.checkpoint).step == STEPS
    assert seen_counts(result.checkpoint) == [6.0]


@pytest.mark.jobs
def test_a_preemption_notice_to_all_workers_at_once_loses_no_step(tmp_path, gate):
    heard = Heard().at("worker.joined", gate, lambda _: len(heard.of("worker.joined")) == 4)

    def notice(_):
        for fields in heard.of("worker.running"):
            os.kill(fields["pid"], signal.SIGTERM)

    heard.at("step.applied", notice, lambda fields: fields["step"] >= 10)
    result, heard = run(tmp_path, heard, workers=2, epochs=16)
    assert [fields["worker"] for fields in heard.of("worker.leaving")] != []
    assert heard.of("log.truncated") == heard.of("job.restored") == []
    assert seen_counts(result.checkpoint) == [16.0]


@pytest.mark.jobs
def test_a_planned_departure_fails_no_step(tmp_path, gate):
    heard = Heard().at("view.published", gate, lambda fields: "worker-0.0 leaves" in fields["why"])

    def notice(_):
        pids = {f["worker"]: f["pid"] for f in heard.of("worker.running")}
        os.kill(pids["worker-0.0"], signal.SIGTERM)

    heard.at("step.applied", notice, lambda fields: fields["step"] >= 10)
    result, heard = run(tmp_path, heard, workers=3, epochs=12)
    reasons = [fields["why"] for fields in heard.of("view.published")]
    assert "worker-0.0 leaves" in reasons
    assert not any("cannot use" in why or "is gone" in why for why in reasons)
    assert seen_counts(result.checkpoint) == [12.0]


@pytest.mark.jobs
def test_a_worker_that_hangs_is_given_up_when_its_lease_is_over(tmp_path, gate):
    heard = Heard().at("worker.killed", gate)

    def stop(_):
        pids = {f["worker"]: f["pid"] for f in heard.of("worker.running")}
        os.kill(pids["worker-1.0"], signal.SIGSTOP)

    heard.at("step.applied", stop, lambda fields: fields["step"] >= 10)
    result, heard = run(tmp_path, heard, workers=3, lease_s=6.0, epochs=12)
    assert [fields["worker"] for fields in heard.of("worker.killed")] == ["worker-1.0"]
    assert seen_counts(result.checkpoint) == [12.0]


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from trueline import events
from trueline.train.api import train
saved, said = [], []
def tell(name, fields):
    if name == "checkpoint.saved":
        saved.append(fields["step"])
    if name == "step.applied" and fields["step"] >= 100 and saved and not said:
        said.append("under way")
        print(*said, flush=True)
with events.listening(tell):
    train(sys.argv[1], workers=2, epochs=4000, job_dir=sys.argv[2], checkpoint_every=20, lease_s=60.0)
"""


@pytest.mark.jobs
def test_after_ctrl_c_no_process_is_left_and_no_torn_file(tmp_path, monkeypatch):
    job = tmp_path / "job"
    JobGate(tmp_path, monkeypatch, first=150)
    launcher = subprocess.Popen([sys.executable, "-c", SCRIPT, str(TINY), str(job)], stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"under way\n"
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) == 5  # agent, two workers; zygote, master
    launcher.send_signal(signal.SIGINT)
    launcher.wait(100)
    launcher.stdout.close()
    until_ended(one.pid for one in family)
    assert checkpoint.latest(job / "checkpoints").step >= 20
    assert psutil_left(tmp_path) == []


@pytest.mark.jobs
def test_a_job_that_lost_every_process_resumes_exactly_with_another_number_of_workers(tmp_path):
    job = tmp_path / "job"
    script = SCRIPT.replace("epochs=4000", "epochs=12").replace(">= 100", ">= 47")
    closed = {**os.environ, "TINY_GATE": f"50:{tmp_path / 'closed'}"}
    launcher = subprocess.Popen([sys.executable, "-c", script, str(TINY), str(job)], stdout=subprocess.PIPE, env=closed)
    assert launcher.stdout.readline() == b"under way\n"
    family = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    until_ended(one.pid for one in family)
    assert psutil_left(tmp_path) == []
    assert checkpoint.latest(job / "checkpoints").step >= 20
    result, heard = run(tmp_path, workers=3, epochs=12, resume=True)
    assert heard.of("job.restored")[0]["step"] % 20 == 0
    assert seen_counts(result.checkpoint) == [12.0]
    found, expected = checkpoint.read(result.checkpoint).state["model"], plain_loop(load_recipe(TINY), 12 * 8)
    torch.testing.assert_close(found["classify.weight"], expected["classify.weight"], rtol=1e-9, atol=1e-12)
    with pytest.raises(errors.UsageError, match="has finished already"):
        train(TINY, job_dir=job, epochs=12, resume=True)


@pytest.mark.jobs
def test_an_exception_in_the_recipe_ends_the_job_with_its_message_and_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_RAISES", "1")
    with pytest.raises(errors.TrainError, match="ValueError: the labels look odd") as caught:
        run(tmp_path, workers=2)
    assert "tiny.py" in caught.value.hint
    assert psutil_left(tmp_path) == []


@pytest.mark.jobs
def test_an_unused_parameter_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_UNUSED", "1")
    with pytest.raises(errors.RecipeError, match="took no part in the loss of a step") as caught:
        run(tmp_path, workers=2)
    assert "find_unused_parameters = True" in caught.value.hint


def test_the_master_imports_no_torch():
    code = "import sys, trueline.train.master.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.jobs
def test_a_disk_that_is_full_for_a_while_is_a_pause_that_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "full_disk"))
    monkeypatch.setenv("FULL_TIMES", "3")
    result, heard = run(tmp_path, workers=2)
    assert [fields["what"] for fields in heard.of("disk.full")] == ["checkpoint"]
    assert [fields["what"] for fields in heard.of("disk.has_room")] == ["checkpoint"]
    assert [fields["step"] for fields in heard.of("step.applied")] == list(range(STEPS))
    assert checkpoint.read(result.checkpoint).step == STEPS


@pytest.mark.jobs
def test_a_read_only_disk_at_the_last_checkpoint_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "full_disk"))
    monkeypatch.setenv("FULL_ERROR", "EROFS")
    with pytest.raises(errors.StorageError, match="Read-only file system"):
        run(tmp_path, workers=2)
    assert list((tmp_path / "job" / "checkpoints").glob("*")) == []
