"""A real Slurm on this machine for the tests: one controller, two nodes, loopback only.

`python tests/worlds/slurm.py up FOLDER` starts it by hand and prints how to use it; `down FOLDER` ends it. It needs
root, since slurmd starts processes of users, and the packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from worlds.waiting import until

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")
CPUS = 2


def find_daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def find_lack() -> str:
    """Why Slurm cannot run here; empty: it can."""
    absent = [name for name in (*DAEMONS, "sbatch") if find_daemon(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Slurm:
    """The daemons of a cluster whose files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.config)}

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755, exist_ok=True)
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        self._write_config()
        munge = self.folder / "munge"
        self._run(
            "munged", "munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}",
            f"--socket={munge / 'socket'}", f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}",
            f"--seed-file={munge / 'seed'}", "--num-threads=1",
        )  # fmt: skip
        until((munge / "socket").exists, "munged's socket")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        until(lambda: self.count_idle() == len(NODES), lambda: f"idle nodes: {self.call('sinfo')}, {self.logs()}")

    def start_controller(self) -> None:
        self._run("slurmctld", "slurmctld", "-D", "-f", str(self.config))

    def start_node(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-f", str(self.config), "-N", node)

    def _run(self, key: str, daemon: str, *arguments: str) -> None:
        with (self.folder / f"{key}.out").open("ab") as log:
            self.daemons[key] = subprocess.Popen(
                [str(find_daemon(daemon)), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _write_config(self) -> None:
        """SlurmdTimeout is long, so that Slurm does not know of a dead node before a busy machine has replaced it."""
        controller, *ports = _free_ports(1 + len(NODES))
        host, folder = socket.gethostname(), self.folder
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=4000"
            for node, port in zip(NODES, ports, strict=True)
        )
        self.config.write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
KillWait=10
MinJobAge=300
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=one Nodes=n1 MaxNodes=1 MaxTime=INFINITE State=UP
PartitionName=down Nodes=ALL State=DOWN
""")

    def call(self, *command: str) -> str:
        done = subprocess.run(command, env=os.environ | self.env, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def count_idle(self) -> int:
        return self.call("sinfo", "--noheader", "-N", "-p", "cpu", "-o", "%t").split().count("idle")

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-800:]}" for path in sorted(self.folder.glob("*.log")))

    def kill_daemon(self, key: str) -> None:
        process = self.daemons.pop(key)
        process.kill()
        process.wait()

    def stop_controller(self) -> None:
        """Ends the controller in order: a killed one forgets what it took in its last seconds."""
        process = self.daemons.pop("slurmctld")
        process.terminate()
        process.wait()

    def kill_node(self, node: str) -> None:
        """As a power cut: the daemon, what it has started, and all that runs there."""
        self.kill_daemon(node)
        for name in self.call("squeue", "--noheader", f"--nodelist={node}", "--format=%i").split():
            for process in psutil.process_iter(["environ", "cmdline"]):
                started = (process.info["environ"] or {}).get("SLURM_JOB_ID") == name
                if started or f"[{name}." in " ".join(process.info["cmdline"] or ()):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    def stop(self) -> None:
        self.call("scancel", "--signal=KILL", "--full", "--user=root")
        self.call("scancel", "--user=root")
        until(lambda: not self.call("squeue", "--noheader").strip(), lambda: self.call("squeue"))
        for key in tuple(self.daemons):
            self.daemons[key].send_signal(signal.SIGTERM)
        for key, process in tuple(self.daemons.items()):
            until(lambda process=process: process.poll() is not None, f"the end of {key}")  # type: ignore[misc]
            del self.daemons[key]


def main() -> None:
    verb, folder = sys.argv[1:]
    slurm = Slurm(Path(folder).absolute())
    if verb == "up":
        if lack := find_lack():
            sys.exit(lack)
        slurm.start()
        pids = [str(process.pid) for process in slurm.daemons.values()]
        (slurm.folder / "pids").write_text(" ".join(pids))
        print(f"export SLURM_CONF={slurm.config}")
        os._exit(0)  # the daemons stay
    for pid in reversed((slurm.folder / "pids").read_text().split()):
        os.kill(int(pid), signal.SIGTERM)


if __name__ == "__main__":
    main()
