"""The guard of a learner's script: who gets its signals, and what is left afterwards."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from trueline.train.learners.scripts import guard
from worlds.waiting import until


@pytest.fixture
def start(tmp_path):
    """Starts a guard with a script, which has printed a line."""
    made = []

    def begin(script: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "bash", "-c", script]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path))
        assert made[-1].stdout.readline() == "began\n"
        return made[-1]

    yield begin
    for one in made:
        one.kill()
        one.wait()
        one.stdout.close()


def test_a_script_has_its_notice_although_the_shell_around_it_dies_at_once(start, tmp_path):
    """The script ends only once the shell is gone: that may not be what ends the script."""
    script = "trap 'until [ -e go ]; do sleep 0.01; done; echo kept; exit 0' TERM; echo began; sleep 1000 & wait"
    process = start(f'bash -c "{script}"; :')
    (shell,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    until(lambda: not shell.is_running() or shell.status() == "zombie", "the shell's end")
    (tmp_path / "go").touch()
    assert process.stdout.read() == "kept\n"
    process.wait()


def test_what_ignores_the_notice_is_killed_by_the_next_signal(start):
    process = start("trap '' TERM; echo began; sleep 1000; sleep 1000")
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 128 + signal.SIGKILL
    until(lambda: not any(one.is_running() for one in below), "the end of all")


def test_the_end_of_the_shell_ends_what_it_has_left_in_the_background(start):
    process = start("sleep 1000 & echo began; exit 3")
    assert process.wait() == 3
    assert process.stdout.read() == ""
