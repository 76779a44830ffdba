"""S3 servers for tests, each on a free port of the loopback.

server   checks keys   refuses a second conditional write
moto     no            yes      in this process, in memory
rclone   yes           no       over a folder
swift    yes           yes      OpenStack's, over a folder
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from worlds import swift as swift_server
from worlds.loopback import free_ports, until_listening

KEY, SECRET = "trueline:tests-key", "trueline-tests-secret"
CHECKING = ("rclone", "swift")
REFUSING = ("moto", "swift")


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """The URL of moto's server; it keeps objects in memory and accepts any key."""
    server = pytest.importorskip("moto.server", reason="the S3 server moto is not installed: make test-s3")
    started = server.ThreadedMotoServer(port=0)
    started.start()
    host, port = started.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")  # its memory is the process's
    with urllib.request.urlopen(reset, timeout=60):
        pass
    yield f"http://{host}:{port}"
    started.stop()


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """The URL of rclone's server over `folder`; it rejects other keys, and allows an object to be written twice."""
    beside = Path(sys.executable).with_name("rclone")
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None or subprocess.run([found, "serve", "s3", "--help"], capture_output=True, check=False).returncode:
        pytest.skip("no rclone that serves S3 is installed: make test-s3")
    (port,) = free_ports(1)
    folder.mkdir(exist_ok=True)
    command = [found, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", str(folder)]
    with (folder.parent / "rclone.log").open("wb") as log:
        process = subprocess.Popen([*command, "--config", "/dev/null"], stdout=log, stderr=log)
    try:
        until_listening(process, port, folder.parent / "rclone.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def swift(folder: Path) -> AbstractContextManager[str]:
    """The URL of Swift's proxy; see `swift_world`."""
    return swift_server.serving(folder, KEY, SECRET)


SERVERS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {"moto": moto, "rclone": rclone, "swift": swift}
