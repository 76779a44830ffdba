"""Hosts that a launch starts over ssh: `trueline join` on each, for as long as the connection lives.

    launcher ──ssh──▶ trueline join ADDRESS --token-file -
                ◀── its versions, one line of JSON
      token ──▶     one line; then it joins as any other host, and the end of its stdin ends it

The system's ssh reads the user's configuration and asks nothing. A connection that ends is made again, less and less
often. Runs in the launcher; no gRPC, no torch.
"""

import contextlib
import re
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from trueline.engine.hosts import route
from trueline.engine.hosts.service import find_version_fault
from trueline.errors import TrainError, UsageError

CONNECT_S, GREET_S, PART_S = 5, 30.0, 5.0
"""How long a connection, the start of Trueline behind it, and the end of both may take."""
FIRST_AGAIN_S, LAST_AGAIN_S = 1.0, 60.0
HOPELESS = 2
"""Exit code of a command that is wrong: another attempt would be too."""
_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes",
)  # fmt: skip
_FIND = (
    't=$(command -v "$1") || t=$(command -v "$2") || { echo "error: there is no $1, and no $2 in PATH" >&2; exit 127; }'
    '; shift 2; exec "$t" "$@"'
)


_NAME = r"[^@:\[\]\s-][^@:\[\]\s]*"
_HOST = re.compile(rf"(?P<user>{_NAME}@)?(?:\[(?P<address>[^\]]+)\]|(?P<name>{_NAME}))(?::(?P<count>[1-9]\d*))?")


class SshHost(NamedTuple):
    """`target`: as ssh takes it. `workers`: at most that many; 0: one for each CPU."""

    target: str
    workers: int = 0

    @property
    def name(self) -> str:
        return self.target.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[SshHost, ...]:
    """The hosts of `--hosts`. Raises UsageError.

    >>> [tuple(host) for host in parse_hosts("a,me@b:2,[fd00::1]:4")]
    [('a', 0), ('me@b', 2), ('fd00::1', 4)]
    """
    hosts = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _HOST.fullmatch(part)
        if match is None:
            raise UsageError(f"'{part}' in --hosts is not HOST or HOST:N", hint="for example a,b:2 or [fd00::1]:2")
        target = f"{match['user'] or ''}{match['address'] or match['name']}"
        hosts.append(SshHost(target, int(match["count"] or 0)))
    if len({host.name for host in hosts}) < len(hosts):
        raise UsageError(f"--hosts {text} names a host twice", hint="name it once, as HOST:N with all of its workers")
    return tuple(hosts)


def find_listen_address(hosts: Sequence[SshHost]) -> str:
    """The address of this machine from which it reaches the first host, as ssh resolves its name. Raises UsageError."""
    try:
        shown = subprocess.run(["ssh", "-G", hosts[0].target], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UsageError("--hosts needs ssh, and there is none in PATH", hint="install OpenSSH's client") from error
    lines = (line.split(maxsplit=1) for line in shown.stdout.splitlines())
    named = next((words[1] for words in lines if words[0] == "hostname" and len(words) > 1), hosts[0].name)
    return route.find_own_address(named)


class SshJoins:
    """`log` names the file of a host's output; `command`: Trueline there, else the path of this one, else PATH."""

    def __init__(
        self, hosts: Sequence[SshHost], *, command: str, log: Callable[[str], Path], emit: Callable[..., None]
    ) -> None:
        own = str(Path(sys.executable).with_name("trueline"))
        self._find = (command, command) if command else (own, "trueline")
        self._hosts, self._log, self._emit = hosts, log, emit
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def open(self, address: str, ports: str, versions: dict[str, str]) -> None:
        """Connects to all hosts and compares versions. Raises TrainError with what each of them lacks."""
        self._versions, self._arguments = versions, ("join", address, "--token-file", "-", "--ports", ports)
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            faults = [fault for fault in pool.map(self._connect, self._hosts) if fault]
        if faults:
            raise TrainError(
                f"not all hosts can be used: {'; '.join(faults)}",
                hint="`ssh -o BatchMode=yes HOST trueline --version` has to work; --remote-trueline names another path",
            )

    def _connect(self, host: SshHost) -> str:
        """Starts Trueline on `host`, where it then waits for its token; returns what went wrong."""
        log = self._log(host.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        cores = ("--cores", str(host.workers)) if host.workers else ()
        words = ("sh", "-c", _FIND, "sh", *self._find, *self._arguments, "--name", host.name, *cores)
        with log.open("ab") as err, self._lock:
            if self._closing.is_set():
                return f"{host.name}: the job ends"
            began = err.tell()
            process = self._running[host.name] = subprocess.Popen(
                ["ssh", *_OPTIONS, "--", host.target, shlex.join(words)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, bufsize=0, start_new_session=True,
            )  # fmt: skip
        theirs = _read_versions(process)
        if theirs is None:
            late = process.poll() is None
            process.kill()
            process.wait()
            why = f"nothing came from it for {GREET_S:.0f} s" if late else read_reason(log, began)
            return f"{host.name}: {why or f'ssh ended with exit code {process.returncode}'}"
        if fault := find_version_fault(self._versions, theirs):
            process.kill()
            process.wait()
            return f"{host.name}: {fault}"
        return ""

    def join(self, make_token: Callable[[], bytes]) -> None:
        """Lets the hosts join the master, which listens; from here on they are started again."""
        for host in self._hosts:
            thread = threading.Thread(
                target=self._follow, args=(host, make_token), name=f"ssh {host.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _follow(self, host: SshHost, make_token: Callable[[], bytes]) -> None:
        again_s, fault = FIRST_AGAIN_S, ""
        while not self._closing.is_set():
            if not fault:
                process, began, since = self._running[host.name], self._log(host.name).stat().st_size, time.monotonic()
                assert process.stdin is not None
                with contextlib.suppress(OSError):
                    process.stdin.write(make_token() + b"\n")
                code = process.wait()
                if code == 0 or self._closing.is_set():  # the master has sent it away
                    return
                why = read_reason(self._log(host.name), began) or f"ssh ended with exit code {code}"
                if code == HOPELESS:
                    self._emit("ssh.refused", host=host.name, why=why)
                    return
                again_s = FIRST_AGAIN_S if time.monotonic() - since > LAST_AGAIN_S else again_s
                fault = f"{host.name}: {why}"
            self._emit("ssh.lost", host=host.name, why=fault.partition(": ")[2], again_s=again_s)
            if self._closing.wait(again_s):
                return
            again_s = min(2 * again_s, LAST_AGAIN_S)
            fault = self._connect(host)

    def close(self) -> None:
        """Ends the connections, and with them what runs on the hosts."""
        with self._lock:
            self._closing.set()
        for process in self._running.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + PART_S
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for thread in self._threads:
            thread.join()


def _read_versions(process: subprocess.Popen[bytes]) -> dict[str, str] | None:
    """The versions that the host writes first, after what its shell may write; None: it ended, or is late."""
    assert process.stdout is not None
    deadline, text = time.monotonic() + GREET_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = process.stdout.read(4096)
            if not piece:
                process.wait()
                return None
            text += piece
            for line in text.splitlines(keepends=True):
                with contextlib.suppress(msgspec.DecodeError):
                    return msgspec.json.decode(line, type=dict[str, str])
    return None


def read_reason(log: Path, began: int = 0) -> str:
    """The error in the output of a host since `began` (bytes): its newest line with `error:`, else the last one."""
    lines = [line for line in log.read_bytes()[began:].decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (errors or [line.strip() for line in lines] or [""])[-1]
