"""A run of tests that is killed leaves nothing of what it has started."""

import os
import subprocess
import sys

import pytest

from worlds import TESTS
from worlds.waiting import until_ended

RUN = """
import os, signal, subprocess, sys
from worlds import guardian
guardian.start()
started = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)
forked = os.fork()
if not forked:
    signal.pause()
print(started.pid, forked, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_what_it_has_started_in_a_session_of_its_own_or_forked_ends_with_it(how):
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    run = subprocess.Popen([sys.executable, "-S", "-c", RUN], stdout=subprocess.PIPE, text=True, env=env)
    pids = [int(word) for word in run.stdout.readline().split()]
    assert len(pids) == 2
    getattr(run, how)()
    run.communicate()
    until_ended(pids)
