"""A real Ray of two nodes on this machine for the tests, from an environment of its own.

`python tests/worlds/ray.py up FOLDER` starts it by hand and prints how to use it; `down FOLDER` ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from worlds.waiting import until

_HOME = Path(os.environ.get("TRUELINE_TEST_RAY") or Path(__file__).parents[2] / "bench" / ".venvs" / "ray-cluster")
RAY = _HOME / "bin" / "ray"
NODES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
CPUS = 2
TRIES = 3
"""`ray start` gives up after 30 s, which a busy machine may need."""


def find_lack() -> str:
    """Why Ray cannot run here; empty: it can."""
    return "" if RAY.exists() else f"no {RAY}: `make test-engines` installs it"


def find_packages() -> str:
    """The folder from which a process imports Ray."""
    return str(next((_HOME / "lib").glob("python*/site-packages")))


def add_packages(path: str) -> str:
    """PYTHONPATH with Ray at its end."""
    return os.pathsep.join(filter(None, (path, find_packages())))


class RayCluster:
    """Nodes `n1`, with Ray's controller, and `n2`. `folder` has to be short: the paths of Ray's sockets lie in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            self.port, self.client_port = one.getsockname()[1], two.getsockname()[1]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        return f"{NODES['n1']}:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {"RAY_ADDRESS": self.address, "PYTHONPATH": add_packages(os.environ.get("PYTHONPATH", ""))}

    @property
    def client_address(self) -> str:
        """For a machine that is no node."""
        return f"ray://{NODES['n1']}:{self.client_port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Each node has a resource of its name, which pins submissions to it."""
        first = [
            "--head", f"--port={self.port}", f"--ray-client-server-port={self.client_port}", "--no-monitor",
            "--include-dashboard=false", f"--temp-dir={self.folder}",
        ]  # fmt: skip
        command = [
            str(RAY), "start", *(first if node == "n1" else [f"--address={self.address}"]), "--block",
            f"--node-ip-address={NODES[node]}", f"--num-cpus={CPUS}", "--resources", f'{{"{node}": 1000}}',
            "--disable-usage-stats", "--include-log-monitor=false", "--object-store-memory=80000000",
        ]  # fmt: skip
        log = self.folder / f"{node}.log"
        for _ in range(TRIES):
            with log.open("wb") as file:
                started = subprocess.Popen(
                    command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
                )
            self.nodes[node] = started
            if until(lambda: _has_started(started, log), log.read_text) == "yes":  # noqa: B023 - it is called here
                return
        raise AssertionError(log.read_text())

    def find(self, node: str, name: str) -> psutil.Process:
        """A process of a node: raylet, gcs_server."""
        return next(one for one in self.list_processes(node) if one.name() == name)

    def list_processes(self, node: str) -> list[psutil.Process]:
        return psutil.Process(self.nodes[node].pid).children(recursive=True)

    def kill_node(self, node: str) -> None:
        """As a power cut: Ray's processes there, and all that they have started."""
        process = self.nodes.pop(node)
        _kill(psutil.Process(process.pid))
        process.wait()

    def pause_controller(self) -> None:
        self.find("n1", "gcs_server").send_signal(signal.SIGSTOP)

    def resume_controller(self) -> None:
        self.find("n1", "gcs_server").send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for node in reversed(tuple(self.nodes)):
            self.kill_node(node)


def _has_started(process: subprocess.Popen[bytes], log: Path) -> str:
    if b"Ray runtime started" in log.read_bytes():
        return "yes"
    return "" if process.poll() is None else "no"


def _kill(top: psutil.Process) -> None:
    below = top.children(recursive=True)
    for one in (top, *below):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(below)


def main() -> None:
    verb, folder = sys.argv[1:]
    cluster = RayCluster(Path(folder).absolute())
    if verb == "up":
        if lack := find_lack():
            sys.exit(lack)
        cluster.start()
        (cluster.folder / "pids").write_text(" ".join(str(one.pid) for one in cluster.nodes.values()))
        print(f"export RAY_ADDRESS={cluster.address} PYTHONPATH={add_packages(os.environ.get('PYTHONPATH', ''))}")
        os._exit(0)  # the nodes stay
    for pid in reversed((cluster.folder / "pids").read_text().split()):
        with suppress(psutil.NoSuchProcess):
            _kill(psutil.Process(int(pid)))


if __name__ == "__main__":
    main()
