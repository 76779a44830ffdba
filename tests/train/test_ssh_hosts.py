"""A job whose hosts are reached over ssh, by a real sshd on two other machines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from worlds.joined_hosts import LOOP, TRUELINE, Machines
from worlds.networks import find_lack, open_machines
from worlds.waiting import until

pytestmark = pytest.mark.jobs
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class SshMachines(Machines):
    """Machine A reaches B and C as `b` and `c`, by keys that were made for the test."""

    def __init__(self, tmp_path: Path, opened) -> None:
        super().__init__(tmp_path, opened)
        self.folder = tmp_path / "ssh"
        self.folder.mkdir(mode=0o700)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)], check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        named = "".join(f"Host {name}\n  HostName {self.machines[name].address}\n" for name in "bc")
        (self.folder / "config").write_text(
            f"{named}Host *\n  IdentityFile {self.folder / 'user'}\n  StrictHostKeyChecking no\n"
            f"  UserKnownHostsFile {self.folder / 'known'}\n  LogLevel ERROR\n"
        )
        wrapper = self.folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder / "config"} "$@"\n')
        wrapper.chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        self.servers = [self.serve(name) for name in "bc"]

    def serve(self, name: str) -> subprocess.Popen[bytes]:
        config = self.folder / f"sshd-{name}"
        config.write_text(
            f"ListenAddress {self.machines[name].address}\nHostKey {self.folder / 'host'}\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder / 'authorized'}\nStrictModes no\nUsePAM no\n"
            f"SetEnv XDG_CACHE_HOME={self.path / name} PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
        )
        return self.machines[name].start(str(SSHD), "-D", "-e", "-f", str(config), log=self.path / f"sshd-{name}.log")

    def launch(self, hosts: str, *options: str) -> None:
        """Starts a job on this machine and these hosts."""
        self.begin(
            "train", str(self.path / "a" / "project"), "--epochs", "1000000", "--job", str(self.job.path),
            "--hosts", hosts, "--checkpoints", str(self.store), "--checkpoint-every", "1000", "--cores", "1", *options,
        )  # fmt: skip

    def begin(self, *command: str) -> None:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        self.launcher = self.leader.start(TRUELINE, *command, log=self.path / "train.log", PATH=path)
        self.processes.insert(0, self.launcher)

    def close(self) -> None:
        self.processes += self.servers
        super().close()


@pytest.fixture
def world(tmp_path):
    if SSHD is None:
        pytest.skip("hosts over ssh need sshd: install openssh-server")
    if lack := find_lack():
        pytest.skip(f"three machines need network namespaces: {lack}")
    (tmp_path / "a").mkdir()
    with open_machines(3, hidden_from_others=(tmp_path / "a",)) as opened:
        made = SshMachines(tmp_path, opened)
        yield made
        made.close()


def joins() -> list[psutil.Process]:
    """The processes of `trueline join`, on all machines."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if {"join", "--token-file", "-"} <= set(one.info["cmdline"] or ())
    ]


def test_hosts_of_the_command_line_train_come_back_and_end_with_the_job(world):
    world.launch("b:1,c:1", "--workers", "1:3")
    world.wait_workers(3)
    tokens = [word for one in joins() for word in one.cmdline() if "token" in word]
    assert set(tokens) == {"--token-file"}  # the token itself is on no command line

    at = time.time()
    ssh = next(
        one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [""])[0] == shutil.which("ssh")
    )
    os.kill(ssh.pid, signal.SIGKILL)
    lost = world.wait("ssh.lost", after=at)[0]
    assert lost["host"] in ("b", "c")
    world.wait("host.lost", after=at, host=lost["host"])
    world.wait_workers(3, after=world.wait("host.joined", after=at, host=lost["host"])[1])

    world.halt()
    until(lambda: not joins(), lambda: f"left behind: {joins()}")
    assert world.count()[1:] == (0, 0)

    at = time.time()
    world.begin("resume", str(world.job.path), "--hosts", "c:2")
    assert world.wait("host.joined", after=at)[0]["host"] == "c"
    world.wait_workers(3, after=at)
    world.halt()
    assert world.count()[1:] == (0, 0)


def test_a_loop_of_ones_own_trains_on_hosts_over_ssh_and_is_waited_for_on_each_to_its_end(world, monkeypatch):
    gate, tail, script = world.path / "gate", world.path / "tail", world.path / "a" / "project" / "loop.py"
    script.write_text(LOOP)
    tail.mkdir()
    monkeypatch.setenv("TINY_GATE", f"20:{gate}")  # in the worker here, for which the others wait in each step
    world.begin(
        "run", "--job", str(world.job.path), "--hosts", "b:1,c:1", "--workers", "3:3", "--cores", "1",
        "--checkpoints", str(world.store), "--checkpoint-every", "1000", str(script), "--", "100", str(tail),
    )  # fmt: skip
    world.wait_workers(3)
    at, pid = time.time(), world.wait("worker.running", host="c")[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    world.wait("worker.lost", after=at)
    world.wait_workers(3, after=at)
    gate.touch()
    until(lambda: len(list(tail.iterdir())) == 3, world.logs)
    assert {one.read_text() for one in tail.iterdir()} == {"800"}
    assert world.launcher.poll() is None, "the scripts still run"
    (tail / "open").touch()
    assert world.launcher.wait(280) == 0, world.logs()
    until(lambda: not joins(), lambda: f"left behind: {joins()}")
    assert world.count() == (800, 0, 0)
    assert "".join(path.read_text() for path in world.job.logs.glob("worker-*.log")).count("is over") == 3


@pytest.mark.parametrize("way", ["unreachable", "another version"])
def test_a_host_that_cannot_be_used_is_named_with_its_reason_before_the_first_step(world, way):
    other = world.folder / "other"
    other.write_text('#!/bin/sh\necho \'{"trueline": "0.0.1"}\'\nexec cat\n')
    other.chmod(0o700)
    if way == "unreachable":
        world.servers[1].kill()
        world.servers[1].wait()
        world.launch("b,c")
    else:
        world.launch("b,c", "--remote-trueline", str(other))
    assert world.launcher.wait(60) != 0
    said = (world.path / "train.log").read_text()
    assert ("c: ssh: connect to host" in said) == (way == "unreachable")
    assert ("b: the host has trueline 0.0.1" in said) == (way == "another version")
    assert "error: not all hosts can be used" in said
    assert "step.applied" not in [name for name, _, _ in world.events()]
    until(lambda: not joins(), lambda: f"left behind: {joins()}")
