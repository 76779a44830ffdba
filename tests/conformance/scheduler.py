"""What every Scheduler promises: import the tests and provide the fixtures `scheduled` and `other_client`.

The first yields a `Scheduled`: the scheduler, a folder for logs that its machines see, and the name of a launch; the
second is a scheduler of the same settings that knows nothing of the first. More of the suite is in `scheduler_logs.py`
and `scheduler_queue.py`.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState, make_name
from worlds.waiting import until

QUEUED, RUNNING, ENDED = SubmissionState.QUEUED, SubmissionState.RUNNING, SubmissionState.ENDED
POLITE = "trap 'echo left; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


@dataclass
class Scheduled:
    scheduler: object
    folder: Path
    job: str = "suite-1"
    launch: int = 1
    waits_for: str = ""
    """How many slots nothing has room for while another submission runs; empty: the engine has no such limit."""
    gangs: bool = False
    """Whether the engine reserves what a job needs to begin; elsewhere a launch that cannot begin queues again."""

    def make(self, role: str, script: str, *, launch: int | None = None, **more) -> Submission:
        name = make_name(self.job, launch or self.launch, role)
        return Submission(name=name, command=("sh", "-c", script), log=str(self.folder / f"{name}.log"), **more)

    def submit(self, role: str, script: str, **more) -> str:
        submission = self.make(role, script, **more)
        self.scheduler.submit(submission)
        return submission.name

    def find(self, name: str) -> SubmissionReport | None:
        listed = self.scheduler.list(name.rpartition(".")[0])
        return next((one for one in listed if one.name == name), None)

    def wait(self, name: str, state: SubmissionState) -> SubmissionReport:
        def reached() -> SubmissionReport | None:
            found = self.find(name)
            return found if found is not None and found.state is state else None

        return until(reached, lambda: f"{name} is {state}: {self.find(name)}, {self.scheduler.read_log(name)!r}")

    def wait_ready(self, name: str) -> None:
        """Until the process has written it, and the scheduler knows that it runs."""
        self.wait_log(name, b"ready")
        self.wait(name, RUNNING)

    def find_shells(self, mark: str) -> list[psutil.Process]:
        """The shells whose script has `mark` in it."""
        running = [(one, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        return [one for one, words in running if words[:2] == ["sh", "-c"] and mark in words[2]]

    def kill(self, mark: str) -> None:
        """SIGKILL by someone else for the shell whose script has `mark` in it."""
        (shell,) = until(lambda: self.find_shells(mark), f"the shell of {mark}")
        shell.kill()

    def wait_log(self, name: str, word: bytes) -> None:
        until(lambda: word in self.scheduler.read_log(name), lambda: f"{word!r} in {self.scheduler.read_log(name)!r}")


def test_a_process_runs_and_its_end_is_listed(scheduled):
    name = scheduled.submit("head", "echo hello")
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name) == b"hello\n"


def test_an_end_without_an_error_is_told_from_one_with_an_error(scheduled):
    good, bad = scheduled.submit("head", "exit 0"), scheduled.submit("host-1", "exit 7")
    reasons = [scheduled.wait(name, ENDED).reason for name in (good, bad)]
    assert all(reasons)
    assert reasons[0] != reasons[1]


def test_submitting_twice_starts_one_process(scheduled):
    for _ in range(2):
        name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    assert len(scheduled.scheduler.list(name.rpartition(".")[0])) == 1
    scheduled.scheduler.cancel(name, grace=False)
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name).count(b"ready") == 1


def test_what_has_ended_is_not_started_again(scheduled):
    name = scheduled.submit("head", "echo once; exit 7")
    scheduled.wait(name, ENDED)
    scheduled.submit("head", "echo once; exit 7")
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name) == b"once\n"


def test_a_graceful_cancel_gives_the_process_time_to_end_by_itself(scheduled):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    scheduled.scheduler.cancel(name)
    scheduled.wait(name, ENDED)
    assert b"left" in scheduled.scheduler.read_log(name)


def test_a_cancel_without_grace_ends_what_ignores_sigterm(scheduled):
    name = scheduled.submit("head", STUBBORN)
    scheduled.wait_ready(name)
    scheduled.scheduler.cancel(name, grace=False)
    assert scheduled.wait(name, ENDED).reason


def test_cancelling_what_has_ended_or_was_never_submitted_is_no_error(scheduled):
    name = scheduled.submit("head", "true")
    scheduled.wait(name, ENDED)
    for each in (name, make_name("unknown-1", 1, "head")):
        for grace in (True, False):
            scheduled.scheduler.cancel(each, grace=grace)
    assert scheduled.find(name).state is ENDED


def test_launches_of_a_job_and_other_jobs_are_listed_apart(scheduled):
    first, second = scheduled.submit("head", "true"), scheduled.submit("head", "true", launch=2)
    for name in (first, second):
        scheduled.wait(name, ENDED)
        assert [one.name for one in scheduled.scheduler.list(name.rpartition(".")[0])] == [name]
    assert scheduled.scheduler.list("suite-11.1") == []


def test_nothing_is_known_of_a_name_that_was_not_submitted(scheduled):
    assert scheduled.scheduler.read_log(make_name("unknown-1", 1, "head")) == b""
    assert scheduled.scheduler.list("unknown-1.1") == []


def test_a_process_gets_the_environment_of_its_submission_and_no_lifeline(scheduled):
    name = scheduled.submit("head", 'echo "$WORD,$TRUELINE_LIFELINE,"', env={"WORD": 'it\'s $HOME; "x"'})
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name).decode() == 'it\'s $HOME; "x",,\n'


def test_arguments_arrive_as_they_are(scheduled):
    words = ["a b", "it's", "$HOME", '"', "*", "ü", "\\", "--x=y"]
    submission = scheduled.make("head", "")
    command = (sys.executable, "-S", "-c", "import sys; print(sys.argv[1:])", *words)
    scheduled.scheduler.submit(Submission(name=submission.name, command=command, log=submission.log))
    scheduled.wait(submission.name, ENDED)
    assert scheduled.scheduler.read_log(submission.name).decode().strip() == str(words), shlex.join(words)


def test_a_second_client_finds_what_the_first_one_has_submitted(scheduled, other_client):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    assert [one.state for one in other_client.list(name.rpartition(".")[0])] == [RUNNING]
    assert b"ready" in other_client.read_log(name)
    other_client.cancel(name, grace=False)
    scheduled.wait(name, ENDED)


def test_output_is_readable_while_the_process_runs_and_grows(scheduled):
    gate = scheduled.folder / "gate"
    name = scheduled.submit("head", f"echo one; until test -e {gate}; do sleep 0.05; done; echo two")
    scheduled.wait_log(name, b"one")
    assert scheduled.scheduler.read_log(name) == b"one\n"
    gate.touch()
    scheduled.wait(name, ENDED)
    assert scheduled.scheduler.read_log(name) == b"one\ntwo\n"


def test_what_waits_has_a_reason_and_is_withdrawn_at_once(scheduled):
    if not scheduled.waits_for:
        pytest.skip("this engine takes any number of slots")
    slots = int(scheduled.waits_for)
    first = scheduled.submit("head", POLITE, slots=slots)
    scheduled.wait_ready(first)
    second = scheduled.submit("host-1", "echo began", slots=slots)
    found = until(lambda: (one := scheduled.find(second)) and one.reason and one, "a reason")
    assert found.state is QUEUED
    assert len(found.reason) > len("waits")
    scheduled.scheduler.cancel(second, grace=False)
    until(lambda: (one := scheduled.find(second)) is None or one.state is ENDED, "the end of what waited")
    scheduled.scheduler.cancel(first, grace=False)
    scheduled.wait(first, ENDED)
    assert scheduled.scheduler.read_log(second) == b""


def test_what_waits_starts_when_there_is_room(scheduled):
    if not scheduled.waits_for:
        pytest.skip("this engine takes any number of slots")
    slots = int(scheduled.waits_for)
    first = scheduled.submit("head", POLITE, slots=slots)
    scheduled.wait_ready(first)
    second = scheduled.submit("host-1", "echo began", slots=slots)
    assert scheduled.find(second).state is QUEUED
    scheduled.scheduler.cancel(first, grace=False)
    scheduled.wait(second, ENDED)
    assert scheduled.scheduler.read_log(second) == b"began\n"


def test_a_process_outlives_the_client_that_submitted_it(scheduled):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            scheduled.submit("head", POLITE)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    name = make_name(scheduled.job, scheduled.launch, "head")
    scheduled.wait_ready(name)
    scheduled.scheduler.cancel(name, grace=False)
    scheduled.wait(name, ENDED)
