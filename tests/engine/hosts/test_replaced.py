"""A `trueline join` ends an earlier one of its host, and no other process."""

import os
import socket
import subprocess
import sys
import threading

from trueline.engine.hosts.standby import replace_earlier

HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
os.ftruncate(lock, 0)
os.pwrite(lock, str(os.getpid()).encode(), 0)
sys.stdin.readline()
"""


def test_only_the_process_that_holds_the_lock_is_ended_though_its_number_stands_there_late(tmp_path):
    path = tmp_path / f"{socket.gethostname()}-launch.pid"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path.write_text(str(other.pid))  # of a join that ended; another process has its number now
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], **pipes) as earlier, other:
        assert earlier.stdout.readline() == "held\n"
        found = []
        joining = threading.Thread(target=lambda: found.append(replace_earlier(tmp_path, "launch")))
        joining.start()
        earlier.stdin.write("\n")
        earlier.stdin.flush()
        joining.join()
        assert earlier.wait() == -9
        other.stdin.write(b"\n")
        other.stdin.flush()
        assert other.wait() == 0
    assert os.pread(found[0], 32, 0) == str(os.getpid()).encode()
    os.close(found[0])
