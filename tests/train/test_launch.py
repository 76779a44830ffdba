"""What a launcher finds of the one before it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from trueline.train import folder, launch


@pytest.fixture
def left(tmp_path):
    """A process of an earlier launch that is stopped, and the folder that it names."""
    scratch = tmp_path / "trueline-before"
    scratch.mkdir()
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(scratch / "agent")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"  # before its exec is over it has no command line to be known by
    process.send_signal(signal.SIGSTOP)
    yield process, scratch
    process.kill()
    process.communicate()


def test_what_a_killed_launcher_left_stopped_is_ended_by_the_next_one(left):
    process, scratch = left
    launch._bury(folder.Launch(pid=1, started=time.time(), scratch=str(scratch)))
    assert process.wait(100) == -signal.SIGKILL
    assert not scratch.exists()


def test_what_another_launcher_has_is_left_alone(left):
    process, scratch = left
    launch._bury(None)
    launch._bury(folder.Launch(pid=1, started=1.0))
    launch._bury(folder.Launch(pid=1, started=1.0, ended=2.0, scratch=str(scratch)))
    launch._bury(folder.Launch(pid=1, started=1.0, scratch=str(scratch) + "-other"))
    assert os.waitpid(process.pid, os.WNOHANG) == (0, 0)
    assert scratch.exists()
