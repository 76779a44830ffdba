"""Runs the command of a learner: its environment, its processes, its output."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from trueline.engine.hosts import route
from trueline.engine.local.process import LIFELINE
from trueline.train.learners.environment import SHELL
from trueline.train.learners.scripts import guard, hook

_PYTHON = '#!/bin/sh\nexec "{python}" "$@"\n'
_HOSTNAME = """#!/bin/sh
case "$1" in -i|-I|--ip-address|--all-ip-addresses) echo "{address}";; *) exec "{hostname}" "$@";; esac
"""
"""FfDL's examples ask a pod for its address this way; Debian gives a host's name 127.0.1.1."""


def install_tools(folder: Path, address: str) -> Path:
    """A folder of programs that stand before those in PATH."""
    folder.mkdir(exist_ok=True)
    tools = {"hostname": _HOSTNAME.format(address=address, hostname=shutil.which("hostname") or "/bin/hostname")}
    own = Path(sys.executable).parent
    if not (own / "python").exists():
        tools["python"] = _PYTHON.format(python=sys.executable)
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    return folder


def install_hook(folder: Path) -> Path:
    """A folder that makes `hook.py` the sitecustomize of each Python process."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(hook.__file__, folder / "sitecustomize.py")
    return folder


def complete_environment(given: Mapping[str, str], scratch: Path, address: str) -> dict[str, str]:
    """The environment of this process and `given`, with the ways to the master of the learners."""
    env = {name: value for name, value in os.environ.items() if name != LIFELINE} | dict(given)
    tools, hooks = install_tools(scratch / "bin", address), install_hook(scratch / "hook")
    env["PATH"] = os.pathsep.join([str(tools), str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["PYTHONPATH"] = os.pathsep.join([str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])])
    env["PYTHONUNBUFFERED"] = "1"
    env[hook.SOCKET] = str(scratch / "socket")
    if name := find_interface(address):
        env.setdefault("GLOO_SOCKET_IFNAME", name)
    return env


def find_interface(address: str) -> str:
    """The name of the interface with this address; empty: none has it."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(Exception):
            if route.find_interface_address(name) == address:
                return name
    return ""


class LearnerCommand:
    """One run of the command. Nothing of it outlives this process, or the end of its shell."""

    def __init__(self, env: Mapping[str, str], cwd: Path, write: Callable[[bytes], None]) -> None:
        self._env, self._cwd, self._write = env, cwd, write
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()

    async def run(self) -> int:
        """The exit code; 128 + N for signal N."""
        self._process = process = self._start()
        writing = asyncio.ensure_future(self._pass_output())
        code = await asyncio.to_thread(process.wait)
        if code < 0:  # the guard was killed: what it guarded is below this process now, and has the pipe
            await asyncio.to_thread(guard.kill_below)
        await writing
        self._ended.set()
        return code if code >= 0 else 128 - code

    def _start(self) -> "subprocess.Popen[bytes]":
        """Starts the guard, from the thread with whose end it is to end; in a session of its own, so that what kills
        this process's group leaves the guard, which then ends all that is below it."""
        guard.adopt_orphans()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "bash", "-c", SHELL],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self._env, cwd=self._cwd,
            start_new_session=True,
        )  # fmt: skip

    async def _pass_output(self) -> None:
        reader = asyncio.StreamReader()
        assert self._process is not None
        pipe = self._process.stdout
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        while data := await reader.read(1 << 16):
            self._write(data)
        transport.close()

    async def stop(self, grace_s: float) -> None:
        """Ends all processes of the command: by SIGTERM first, where there is time."""
        if self._process is None or self._ended.is_set():
            return
        if grace_s:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), grace_s)
        self._process.send_signal(signal.SIGUSR1)
        await self._ended.wait()
