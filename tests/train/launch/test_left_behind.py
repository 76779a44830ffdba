"""Whatever ends the process that runs a job, and however: no process of the job stays behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from trueline import events
from trueline.chaos.leftovers import MARK, find_marked
from trueline.train.api import train
from trueline.train.launch import jobs
from worlds.jobs import TINY, JobGate
from worlds.waiting import until

pytestmark = pytest.mark.jobs

KERNEL = """
import os, signal
from pathlib import Path
from trueline import events
from trueline.train.api import train

def fork(name, fields):
    if name == "step.applied" and not Path(FORK).exists():
        pid = os.fork()  # as a pool's, which waits for work after its parent is gone
        if not pid:
            while True:
                signal.pause()
        Path(FORK).write_text(str(pid))

def test_a_job():
    with events.listening(fork):
        train(TINY, workers=2, epochs=4000, job_dir=JOB)
"""
HOSTS = {
    "command": lambda file: [
        "-m",
        "trueline",
        "train",
        str(TINY),
        "--epochs",
        "4000",
        "--job",
        str(file.parent / "job"),
    ],
    "kernel": lambda file: ["-c", file.read_text() + "\ntest_a_job()"],
    "pytest": lambda file: ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
}


@pytest.mark.parametrize(
    "kill", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda one: one.name
)
@pytest.mark.parametrize("host", HOSTS)
def test_a_job_ends_with_the_process_that_runs_it(host, kill, tmp_path, monkeypatch):
    JobGate(tmp_path, monkeypatch)
    job, fork, file = tmp_path / "job", tmp_path / "fork", tmp_path / "test_host.py"
    file.write_text(f"TINY, JOB, FORK = {str(TINY)!r}, {str(job)!r}, {str(fork)!r}\n{KERNEL}")
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    usual = [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)]  # not as under nohup
    running = subprocess.Popen([sys.executable, *HOSTS[host](file)], env={**os.environ, MARK: mark}, cwd=tmp_path,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    for number, how in zip((signal.SIGTERM, signal.SIGHUP), usual, strict=True):
        signal.signal(number, how)
    own = set()
    try:
        until(lambda: (job / "job.json").exists() and jobs.read_job(job).step > 5, "the job takes steps")
        if host != "command":
            until(fork.exists, "it has forked")
            own = {int(fork.read_text())}
        running.send_signal(kill)
        running.wait(200)
        until(lambda: {one.pid for one in find_marked(mark)} <= own, lambda: [*map(str, find_marked(mark))])
    finally:
        running.kill()
        running.wait()
        for pid in own:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_what_killed_processes_were_writing_is_gone_from_the_folder_of_a_job_and_a_capture_there_goes_on(tmp_path):
    job = tmp_path / "job"
    capture, before, during = job / ".partial-capture", job / ".partial-before", job / ".partial-during"
    capture.mkdir(parents=True)
    before.write_text("half of a file")
    found = []

    def plant(name, fields):
        if name == "step.applied" and not found:
            found.append(before.exists())
            during.write_text("half of another")

    with events.listening(plant):
        train(TINY, workers=1, epochs=1, job_dir=job)
    assert found == [False]
    assert list(job.glob(".partial-*")) == [capture]
