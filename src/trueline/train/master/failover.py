"""Failover of the master: one that dies has a successor within milliseconds.

A fresh interpreter would take most of a second of processor time from the steps of training. So the zygote imports what
a master needs and forks masters on request. It has one thread and no gRPC, which would break in a forked child.

    launcher ── "start" ──▶ zygote ──fork──▶ master
             ◀── exit code ──        ◀─wait──

The launcher decides whether there is a successor. A zygote that dies takes its master along, since two masters must
never serve one job.
"""

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trueline.engine.hosts.route import ANY, resolve, split_address
from trueline.engine.local.process import LIFELINE, log_output, run_child, wake_at_end
from trueline.errors import PortInUse

START = b"start "


def reserve_port(address: str = "127.0.0.1:0") -> socket.socket:
    """Binds a port for the masters of a launch, without listening on it. Raises PortInUse, UsageError.

    Workers look for a dead master's successor there, and send it the job's secret. Linux lets only processes of one
    user share a port (SO_REUSEPORT, socket(7)), so as long as this socket exists no other user can listen on it.
    """
    host, port = split_address(address)
    host = host if host in ANY else resolve(host)
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        hint = "choose another port, or an address of this machine"
        raise PortInUse(f"cannot listen at {address}: {error.strerror}", hint=hint) from error
    return reserved


class MasterProcess:
    """The launcher's side: at most one master at a time. `life` is the reading end of the launcher's lifeline pipe."""

    def __init__(self, module: str, arguments: Sequence[str], *, life: int, log: Path) -> None:
        """`module`: that of the master; its `main` reads `arguments` from sys.argv and returns the exit code."""
        self.arguments, self.life, self.log = [module, *arguments], life, log
        self.later: list[str] = []
        """Common arguments that were not known when the zygote started."""
        self._zygote: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._lock = threading.Lock()  # the exit code is read from the pipe once

    def warm(self) -> None:
        """Starts the zygote: what a master needs is imported when one is started."""
        if self._zygote is None:
            self._zygote = self._start_zygote()

    def start(self, *arguments: str) -> None:
        """Starts a master with the common arguments and these; the one before must have ended."""
        self._code = None
        if self._zygote is None or self._zygote.poll() is not None:
            self._close()
            self._zygote = self._start_zygote()
        assert self._zygote.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just died, as `poll` reports
            self._zygote.stdin.write(START + "\0".join([*self.later, *arguments]).encode() + b"\n")
            self._zygote.stdin.flush()

    def _start_zygote(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, LIFELINE: str(self.life), "GRPC_VERBOSITY": "NONE"}
        env["OPENBLAS_NUM_THREADS"] = "1"  # it would start threads at its import, before the fork
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trueline.train.master.failover", *self.arguments],
                env=env, pass_fds=(self.life,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """The exit code of the master that was started last (negative for a signal); None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """As `poll`, but waits for the end: `timeout_s` seconds, or as long as it takes."""
        with self._lock:
            if self._code is None and self._zygote is not None:
                assert self._zygote.stdout is not None
                readable, _, _ = select.select([self._zygote.stdout], [], [], timeout_s)
                if readable:
                    codes = os.read(self._zygote.stdout.fileno(), 64).split()
                    self._code = int(codes[-1]) if codes else self._zygote.wait()  # it ended, and its master with it
            return self._code

    def end(self) -> None:
        """Waits for the zygote and its master, which end with the lifeline."""
        if self._zygote is not None:
            self._zygote.wait()
            self._close()

    def _close(self) -> None:
        zygote, self._zygote = self._zygote, None  # first: a signal's exception may come while another one is started
        if zygote is not None:
            for pipe in (zygote.stdin, zygote.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def main() -> None:
    """`python -m trueline.train.master.failover MODULE MASTER'S ARGUMENTS`: the zygote."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    life = int(os.environ[LIFELINE])
    wake_at_end(life)
    module = importlib.import_module(sys.argv.pop(1))
    own_life, own_end = os.pipe()
    os.environ[LIFELINE] = str(own_life)
    while (arguments := _read_request(life)) is not None:
        pid = os.fork()
        if pid == 0:
            os.close(own_end)
            run_child(partial(_run_master, module.main, [*sys.argv[1:], *arguments]))
        code = _wait_for_exit(pid, life)
        if code is None:
            break
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone, as the lifeline will report
            os.write(1, f"{code}\n".encode())
    os.close(own_end)  # ends a master that is still there
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)


def _read_request(life: int) -> list[str] | None:
    """Waits for the arguments of the next master; None when there is to be none."""
    select.select([0, life], [], [])
    line = os.read(0, 65536) if select.select([0], [], [], 0)[0] else b""
    if not line.startswith(START):
        return None
    return [word.decode() for word in line[len(START) :].rstrip(b"\n").split(b"\0")]


def _wait_for_exit(pid: int, life: int) -> int | None:
    """Waits for the exit code of the master `pid`; None when the lifeline ended before."""
    handle = os.pidfd_open(pid)
    try:
        if handle not in select.select([handle, life], [], [])[0]:
            return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_master(main: Callable[[], int | None], arguments: list[str]) -> int | None:
    os.setsid()
    os.dup2(2, 1)  # both go to its log
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    log_output()
    sys.argv[1:] = arguments
    return main()


if __name__ == "__main__":
    main()
