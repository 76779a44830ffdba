"""Promises of how a job's end is told: to its launcher, in its folder, to operators and to scripts."""

import contextlib
import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import msgspec
import pytest

from trueline import errors
from trueline.engine.contract import Kind, Seen
from trueline.train import api, settings
from trueline.train.api import JobSummary
from trueline.train.job_dir import JobDir, LaunchRecord
from trueline.train.launch import jobs, launcher, shutdown
from trueline.train.master.journal import Journal
from trueline.train.worker import main as worker
from trueline.wire import train_pb2 as pb

JOB = settings.JobSettings(name="job", recipe="none.py", recipe_digest="", workers=1, epochs=2, global_batch=4, seed=0)
VIEW = {"generation": 1, "members": ["worker-0.0", "worker-1.0"], "cut_below": 1, "reason": "x"}


@pytest.fixture
def job_dir(tmp_path):
    settings.save(JOB, tmp_path)
    return tmp_path


def event(name, **fields):
    return pb.Event(name=name, fields=json.dumps(fields))


# What a launcher hears. ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [("state_lost", errors.StateLost), ("records_miscounted", errors.RecordsMiscounted), ("data", errors.DataError),
     ("script_raised", errors.TrainError), ("train", errors.TrainError)],
)  # fmt: skip
def test_a_job_that_failed_ends_its_launcher_with_the_error_that_its_code_names(job_dir, code, kind):
    with pytest.raises(kind) as failed:
        launcher.LocalJob(job_dir)._handle_event(event("job.failed", code=code, why="because", hint="look"))
    assert (type(failed.value), failed.value.message, failed.value.hint) == (kind, "the job failed: because", "look")


def test_a_job_that_is_asked_to_end_has_been_stopped(job_dir):
    with pytest.raises(errors.JobStopped, match="the job was stopped: trueline halt") as stopped:
        launcher.LocalJob(job_dir)._handle_event(event("job.stopping", why="trueline halt"))
    assert "trueline resume" in stopped.value.hint


def test_only_the_end_of_a_job_brings_its_summary(job_dir):
    running = launcher.LocalJob(job_dir)
    assert running._handle_event(event("checkpoint.saved", step=3)) is None
    assert running._handle_event(event("step.applied", step=3)) is None
    assert running._handle_event(event("job.finished", summary=json.dumps({"steps": 3}))) == {"steps": 3}


class Dead:
    """A process that ended with `code`; None: it runs."""

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code

    def wait(self, timeout_s=None):
        return self.code


def running(job_dir, *, agent=None, master=None):
    found = launcher.LocalJob(job_dir)
    found.agent, found.master, found.begun = Dead(agent), Dead(master), []
    found._start_agent = lambda: found.begun.append("agent") or Dead(None)
    found._start_master = lambda: found.begun.append("master")
    return found


@pytest.mark.parametrize(
    ("agent", "master", "begun"),
    [(None, None, []), (1, None, ["agent"]), (None, -9, ["master"]), (0, 1, ["agent", "master"])],
)
def test_what_died_is_started_again(job_dir, agent, master, begun):
    found = running(job_dir, agent=agent, master=master)
    found._keep_alive()
    assert (found.begun, found.restarts) == (begun, len(begun))


def test_a_master_that_ended_well_was_asked_to_and_what_it_said_before_is_heard_first(job_dir):
    found = running(job_dir, master=0)
    found._events.put(pb.Events())
    found._keep_alive()
    assert found.begun == []
    found._events.get()
    with pytest.raises(errors.JobStopped, match="its master ended on request"):
        found._keep_alive()


def test_a_job_whose_master_dies_again_and_again_fails_after_ten_restarts(job_dir):
    found = running(job_dir, master=3)
    for _ in range(10):
        found._keep_alive()
    with pytest.raises(errors.TrainError, match="died 11 times without a step between; last exit code 3"):
        found._keep_alive()
    assert found.begun == ["master"] * 10


def test_a_job_that_gets_on_between_may_lose_its_master_any_number_of_times(job_dir):
    found = running(job_dir, master=-9)
    for step in range(40):
        found._keep_alive()
        found._handle_event(pb.Event(name="step.applied", fields=json.dumps({"step": step})))
    assert found.begun == ["master"] * 40


# What is in the folder. ----------------------------------------------------------------------------------------------

ENDS = [
    (None, "finished", ""),
    (KeyboardInterrupt(), "stopped", "Ctrl-C"),
    (shutdown.make_stopped_error("trueline halt", "x"), "stopped", "trueline halt"),
    (errors.StateLost("the job failed: gone"), "failed", "the job failed: gone"),
    (ValueError("odd"), "failed", "ValueError: odd"),
    (SystemExit(3), "failed", "SystemExit: 3"),
]


@pytest.mark.parametrize(("error", "outcome", "why"), ENDS, ids=lambda value: str(value)[:20])
def test_how_a_launch_ended_is_in_its_folder(job_dir, error, outcome, why):
    began = LaunchRecord(pid=1, started=5.0, scratch="x")
    launcher.LocalJob(job_dir)._record_end(began, error)
    found = JobDir(job_dir).read_launch()
    assert (found.outcome, found.why, found.pid, found.started) == (outcome, why, 1, 5.0)
    assert found.ended > 5.0
    last = json.loads((job_dir / "events.jsonl").read_text().splitlines()[-1])
    assert (last["name"], last["fields"]) == ("launcher.ended", {"outcome": outcome, "why": why})
    assert (jobs.read_job(job_dir).state, jobs.read_job(job_dir).why) == (outcome, why)


def test_a_job_is_what_its_folder_says(job_dir):
    assert (jobs.read_job(job_dir).state, jobs.read_job(job_dir).why) == ("prepared", "never launched")
    began = LaunchRecord(pid=1, started=5.0)
    JobDir(job_dir).write_launch(began)
    assert (jobs.read_job(job_dir).state, jobs.read_job(job_dir).why) == ("dead", "its launcher was killed")
    JobDir(job_dir).write_launch(msgspec.structs.replace(began, outcome="failed", why="odd"))
    assert (jobs.read_job(job_dir).state, jobs.read_job(job_dir).why) == ("failed", "odd")
    held = JobDir(job_dir).hold()
    try:
        assert (jobs.read_job(job_dir).state, jobs.read_job(job_dir).why) == ("running", "")
        with pytest.raises(errors.UsageError, match="is running"):
            JobDir(job_dir).hold()
    finally:
        os.close(held)
    (job_dir / "summary.json").write_text("{}")
    assert (jobs.read_job(job_dir).state, jobs.read_job(job_dir).why) == ("finished", "")


def journal_of(job_dir, *rows):
    journal = Journal(job_dir / "journal.sqlite")
    journal.append(*rows)
    journal.close()
    return jobs.read_job(job_dir)


def commit(step, loss=0.5):
    return "COMMIT", {
        "step": step,
        "generation": 1,
        "records": 4,
        "digest": 1,
        "loss": loss,
        "workers": 2,
        "gap_ms": 0.0,
    }


def test_what_a_dead_job_had_done_is_in_its_journal(job_dir):
    facts = ("FACTS", {"num_records": 8, "total_steps": 9, "shard_records": 0})
    found = journal_of(job_dir, facts, ("VIEW", VIEW), *map(commit, range(5)), ("CKPT", {"step": 4, "path": "/c"}))
    assert (found.step, found.total, found.loss, found.checkpoint, found.workers) == (5, 9, 0.5, 4, 0)
    assert jobs.last_view(job_dir) == ("worker-0.0", "worker-1.0")
    assert journal_of(job_dir, ("TRUNCATE", {"steps": 2}), ("CKPT", {"step": 1, "path": "/c"})).step == 2
    assert journal_of(job_dir, commit(2, loss=0.25)).loss == 0.25
    assert jobs.read_job(job_dir).step == 3
    assert journal_of(job_dir, ("CKPT", {"step": 8, "path": "/d"})).step == 8
    assert journal_of(job_dir, ("CKPT", {"step": -1, "path": ""})).checkpoint == 0


def test_a_folder_of_jobs_says_which_one_is_meant_and_hides_none_for_a_damaged_one(tmp_path):
    for name in ("digits-1", "digits-2"):
        (tmp_path / name).mkdir()
        settings.save(dataclasses.replace(JOB, name=name), tmp_path / name)
    (tmp_path / "digits-2" / "job.json").write_text("{")
    assert {job.name: job.state for job in jobs.list_jobs(tmp_path)} == {"digits-1": "prepared", "digits-2": "damaged"}
    assert jobs.find_job("digits-1", tmp_path) == tmp_path / "digits-1"
    with pytest.raises(errors.UsageError, match="there is no job 'digit-1'") as missed:
        jobs.find_job("digit-1", tmp_path)
    assert "did you mean 'digits-" in missed.value.hint


# What a script hears. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "refused"), [("", False), ("finished", False), ("running", True), ("failed", True)])
def test_a_script_may_end_when_its_job_has_finished(phase, refused):
    status = {"phase": phase} if phase else None  # its master is away
    if not refused:
        worker.expect_finished(status, "train.py")
        return
    with pytest.raises(errors.UsageError, match=r"train\.py ended before its loop") as ended:
        worker.expect_finished(status, "train.py")
    assert "Validation(rule=Rule(" in ended.value.hint
    assert "patience=3" in ended.value.hint


def seen(ref, code=None):
    return Seen(ref=ref, kind=Kind.STARTED if code is None else Kind.EXITED, code=code, reason=f"exit code {code}")


class Agent:
    """What an agent says of its processes, one answer after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self, path):
        return self

    async def list(self):
        return self.answers.pop(0)


def let_end(job_dir, monkeypatch, *answers):
    journal_of(job_dir, ("VIEW", VIEW))
    agent = Agent(*answers)
    monkeypatch.setattr(shutdown, "open_engine", agent)
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(sleep=lambda _: None))
    shutdown.wait_for_scripts(job_dir, job_dir / "agent")
    return agent


def test_a_launcher_waits_for_the_scripts_of_the_last_group_and_for_no_newcomer(job_dir, monkeypatch):
    one, other, late = seen("worker-0.0"), seen("worker-1.0"), seen("worker-2.0")
    answers = [
        [one, other, late],
        [one, seen("worker-1.0", 0), late],
        [seen("worker-0.0", 0), seen("worker-1.0", 0), late],
    ]
    assert let_end(job_dir, monkeypatch, *answers).answers == []


def test_a_script_that_ends_badly_after_its_training_is_an_error_of_the_job(job_dir, monkeypatch):
    with pytest.raises(errors.TrainError, match=r"all steps are trained, but then worker-1\.0 ended: exit code 3"):
        let_end(
            job_dir, monkeypatch, [seen("worker-0.0"), seen("worker-1.0")], [seen("worker-0.0"), seen("worker-1.0", 3)]
        )


def test_the_error_of_a_script_that_ends_badly_names_what_it_raised(job_dir, monkeypatch):
    log = JobDir(job_dir).log("worker-1.0")
    log.parent.mkdir(exist_ok=True)
    log.write_text("Traceback:\n  File x\ntrueline.errors.UsageError: a second loop began\nhint: one loop\n")
    with pytest.raises(errors.TrainError, match=r"worker-1\.0 ended: exit code 3: trueline.*: a second loop began\n"):
        let_end(
            job_dir, monkeypatch, [seen("worker-0.0"), seen("worker-1.0")], [seen("worker-0.0"), seen("worker-1.0", 3)]
        )


# What a user is told. ------------------------------------------------------------------------------------------------


def certificate(**changes):
    return {"epoch": 0, "steps": 2, "records": 8, "tally_min": 1, "tally_max": 1, **changes}


@pytest.mark.parametrize(
    ("certificates", "stopped", "once"),
    [
        ([{}, {}], False, True),
        ([{}], False, False),
        ([{}], True, True),
        ([{}, {"tally_max": 2}], False, False),
        ([{}, {"tally_min": -1, "tally_max": -1}], False, True),
        ([{}, {"records": 4}], False, False),
        ([{}, {"records": 4}], True, True),
        ([{"records": 4}, {"records": 4}], True, False),
        ([{}, {"records": 7, "set_aside": [3]}], False, True),
        ([{}, {"records": 6, "set_aside": [3]}], False, False),
    ],
    ids=str,
)
def test_a_summary_says_exactly_once_only_of_epochs_that_are_whole_or_the_one_that_was_stopped(
    certificates, stopped, once
):
    found = [certificate(**changes) for changes in certificates]
    facts = {"records": 8, "epochs": 2, "certificates": found, "stopped_early": stopped}
    assert JobSummary(facts).exactly_once is once


# Signals meanwhile. --------------------------------------------------------------------------------------------------


@pytest.fixture
def sigterm():
    """Sets how SIGTERM is handled here; None gives it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda how: signal.signal(signal.SIGTERM, how)
    signal.signal(signal.SIGTERM, before)


def end_of_a_job(job_dir, during):
    """What `LocalJob` does with signals; `during` is called while its processes end."""
    with contextlib.ExitStack() as exits:
        exits.enter_context(shutdown.signals_as_errors(job_dir, lambda why: False))
        exits.callback(during)
        kept = exits.pop_all()
    with shutdown.no_second_signal():
        kept.close()


def test_what_cannot_be_removed_hides_no_error_that_ended_the_job(job_dir, tmp_path):
    (job_dir / "secret" / "held").mkdir(parents=True)  # no file: removing it fails, as in a read-only folder
    running = launcher.LocalJob(job_dir)

    @contextlib.contextmanager
    def launched():
        try:
            yield
        finally:
            running._clean_folder()

    with pytest.raises(errors.StorageError, match="the journal cannot be written"), launched():
        raise errors.StorageError("the journal cannot be written")


def test_a_folder_that_cannot_be_made_is_named_by_the_error(tmp_path):
    script, taken = tmp_path / "train.py", tmp_path / "taken"
    script.touch()
    taken.touch()
    with pytest.raises(errors.StorageError, match=f"{taken / 'job'} failed: Not a directory"):
        api.prepare_script(script, job_dir=taken / "job")
    with pytest.raises(errors.StorageError, match=f"{taken / 'lock'} failed: Not a directory"):
        JobDir(taken).hold()


def test_after_a_job_has_ended_signals_do_what_they_did_before_it(job_dir, sigterm):
    """Ctrl-C went to the ended job, which had SIGTERM ignored from then on: pytest or a kernel could not be ended."""
    sigterm(signal.SIG_DFL)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    end_of_a_job(job_dir, lambda: None)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_no_signal_interrupts_the_end_of_a_jobs_processes(job_dir, sigterm):
    sigterm(signal.SIG_DFL)

    def during():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    end_of_a_job(job_dir, during)


def test_a_signal_that_the_caller_handles_arrives_when_the_processes_have_ended(job_dir, sigterm):
    got = []
    sigterm(lambda number, frame: got.append(number))

    def during():
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == []

    end_of_a_job(job_dir, during)
    assert got == [signal.SIGTERM]
