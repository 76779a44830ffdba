"""Other systems under the kills that Trueline is put under: the same model, batch, workers and way to count.

    run_peer("torchrun", kills=3, steps=3000)
    {"gap_ms": [2917.3, ..], "lost": 0, "repeated": 0, "redone": 12, "steps": 3000, "survived": True, "why": ""}

Each peer runs a script of this folder with its own data path and its own recovery, in an environment of its own
(`setup.sh`); torchrun needs none but the one that runs this. What a peer leaves behind is killed, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

HERE = Path(__file__).parent
VENVS = HERE.parent / ".venvs"
WORKERS = 3
BATCH, EPOCH_STEPS = 96, 150
"""As Trueline's job has them: with more records the counter, which is a parameter, would make the model larger."""
IN_FLIGHT_NS = 100_000_000
"""A step that ends so soon after a kill was under way before it."""
PEERS = ("torchrun", "torchft", "dlrover")
LIGHTHOUSE = ["--join_timeout_ms", "10000", "--heartbeat_timeout_ms", "300", "--quorum_tick_ms", "20"]
"""torchft: by default 5 s, all of which a kill costs."""
AGENT = ["--monitor-interval=0.02"]
"""torchrun and DLRover: how often, in seconds, the agent looks for dead workers; by default 0.1 and more."""


class Step(NamedTuple):
    rank: int
    pid: int
    step: int
    at_ns: int


def python_of(name: str) -> str:
    return sys.executable if name == "torchrun" else str(VENVS / name / "bin" / "python")


def missing(name: str) -> str:
    """Why peer `name` cannot run here; empty when it can."""
    if name not in PEERS:
        return f"no peer '{name}' (has: {', '.join(PEERS)})"
    return "" if Path(python_of(name)).exists() else f"{name} is not installed; run: make peers"


class Peer:
    """The processes of one peer's job; its supervisor is the peer's own, but torchft leaves restarts to a scheduler."""

    def __init__(self, name: str, folder: Path, steps: int, *, kills: int) -> None:
        self.name, self.folder, self.steps = name, folder, steps
        self.script = str(HERE / f"on_{name}.py")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            "COUNTING_RECORDS": str(BATCH * EPOCH_STEPS), "COUNTING_BATCH": str(BATCH),
                    # Without it torchrun's restart finds the dead attempt's store on gloo (pytorch#135712).
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
        self.env.pop("PYTHONPATH", None)
        if name == "torchft":
            port = free_port()
            self.env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
            lighthouse = str(VENVS / name / "bin" / "torchft_lighthouse")
            self._start(-1, [lighthouse, "--min_replicas", "2", "--bind", f"127.0.0.1:{port}",
                             *LIGHTHOUSE])  # fmt: skip
            self.commands = {group: [self.script, str(folder), str(steps), str(group)] for group in range(WORKERS)}
        else:
            module = "torch.distributed.run" if name == "torchrun" else "dlrover.trainer.torch.main"
            self.commands = {0: ["-m", module, "--standalone", f"--nproc-per-node={WORKERS}", *AGENT,
                                 f"--max-restarts={kills + 2}", self.script, str(folder), str(steps)]}  # fmt: skip
        self.tend()

    def _start(self, key: int, command: list[str]) -> None:
        with (self.folder / "output.log").open("ab") as log:
            self.processes[key] = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def tend(self) -> None:
        """Starts what has not been started, and what torchft's scheduler would start again."""
        for key, command in self.commands.items():
            old = self.processes.get(key)
            if old is None or (self.name == "torchft" and old.poll() not in (None, 0)):
                self._start(key, [python_of(self.name), *command])

    def over(self) -> bool:
        return all(process.poll() is not None for key, process in self.processes.items() if key >= 0)

    def log(self) -> list[Step]:
        file = self.folder / "steps.log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Step(*map(int, line.split())) for line in lines if line.count(" ") == 3]

    def close(self) -> None:
        """Ends every process of the job, also those that left its sessions or lost their parents."""
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()
        for pid in {line.pid for line in self.log()}:
            with contextlib.suppress(psutil.Error):
                if self.script in psutil.Process(pid).cmdline():
                    psutil.Process(pid).kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(name: str, steps: int, *, kills: int) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as scratch:
        peer = Peer(name, Path(scratch), steps, kills=kills)
        try:
            yield peer
        finally:
            peer.close()


def run_peer(name: str, *, kills: int, steps: int, patience_s: float = 60.0) -> dict[str, object]:
    """Trains `steps` steps, whole epochs, on three workers, `kills` of which are killed on the way.

    A kill without a step within `patience_s` counts as that long and ends the kills. `lost` and `repeated`: by how many
    applications the records of the final model are short of, and beyond, one in each epoch; None without a model.
    Raises LookupError when the peer is not installed.
    """
    if why := missing(name):
        raise LookupError(why)
    dice, gaps, why = random.Random(0), [], ""
    with running(name, steps, kills=kills) as peer:
        since = time.monotonic_ns()
        for number in range(kills):
            pids = together(peer, since, steps=20, patience_s=patience_s)
            if not pids:
                why = f"no {WORKERS} workers trained together {patience_s:g} s after kill {number}"
                break
            since = time.monotonic_ns()
            os.kill(dice.choice(pids), 9)
            after = first_step(peer, since + IN_FLIGHT_NS, patience_s)
            gaps.append(((after or since + int(patience_s * 1e9)) - since) / 1e6)
            if after is None:
                why = f"no step {patience_s:g} s after kill {number + 1}"
                break
        finished = not why and wait_over(peer, patience_s * (2 + kills))
        return {"gap_ms": gaps, **witnessed(peer, steps), "survived": bool(finished), "why": why or ""}


def together(peer: Peer, since_ns: int, *, steps: int, patience_s: float) -> list[int]:
    """The workers' pids once `WORKERS` of them have applied `steps` steps each since then; none when they do not."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not peer.over():
        peer.tend()
        counts = Counter(line.pid for line in peer.log() if line.at_ns > since_ns)
        ready = [pid for pid, count in counts.items() if count >= steps and psutil.pid_exists(pid)]
        if len(ready) >= WORKERS:
            return sorted(ready)
        time.sleep(0.05)  # the log is what other processes write; there is nothing to wait on
    return []


def first_step(peer: Peer, since_ns: int, patience_s: float) -> int | None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        peer.tend()
        if found := [line.at_ns for line in peer.log() if line.at_ns > since_ns]:
            return min(found)
        time.sleep(0.02)  # as above; the time that counts is in the log
    return None


def wait_over(peer: Peer, patience_s: float) -> bool:
    """Whether a model came out in time."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not peer.over():
        if peer.name == "torchft" and any(peer.folder.glob("seen.*.json")):
            return True  # a member that is behind may start over; the model exists
        peer.tend()
        time.sleep(0.1)
    return any(peer.folder.glob("seen.*.json"))


def witnessed(peer: Peer, steps: int) -> dict[str, int | None]:
    """What the log and the final model say."""
    tally = Counter((line.rank, line.step) for line in peer.log())
    redone = sum(count - 1 for (rank, _), count in tally.items() if rank == 0)
    files = sorted(peer.folder.glob("seen.*.json"))
    if not files:
        return {"lost": None, "repeated": None, "redone": redone, "steps": sum(tally.values())}
    seen, epochs = json.loads(files[0].read_text()), steps // EPOCH_STEPS
    return {
        "lost": sum(max(0, epochs - count) for count in seen),
        "repeated": sum(max(0, count - epochs) for count in seen),
        "redone": redone,
        "steps": steps,
    }


def main() -> None:
    name, kills, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(run_peer(name, kills=kills, steps=steps)))


if __name__ == "__main__":
    main()
