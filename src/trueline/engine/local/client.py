"""The engine of one machine: an asyncio client of the agent (`engine/local/agent.py`), which forks the processes.

Several clients may be connected. A restarted master finds running processes by `list`.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from trueline.engine.contract import ProcessSpec, Seen
from trueline.engine.local import process

PRESET = {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "THP_MEM_ALLOC_ENABLE": "1"}
"""Variables of agents and their processes, unless the user has set them. torch then keeps tensors of 2 MB and more in
huge pages, as NumPy does: the end of a process is noticed once its memory is given back, and page by page 4 GB take
0.3 s. Sets of words have the same order in all processes: a vocabulary may be numbered by it."""


class LocalEngine:
    """A client of the agent that listens on the Unix socket `path`. Its calls raise OSError when no agent answers."""

    def __init__(self, path: str, *, patience_s: float = 60.0) -> None:
        self.path = path
        self.patience_s = patience_s  # to wait for the socket: the agent imports torch first

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = asyncio.get_running_loop().time() + self.patience_s
        while True:
            try:
                return await asyncio.open_unix_connection(self.path)
            except (FileNotFoundError, ConnectionRefusedError):
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.02)

    async def _request(self, *requests: dict[str, object]) -> list[bytes]:
        reader, writer = await self._connect()
        try:
            for request in requests:
                writer.write(msgspec.json.encode(request) + b"\n")
            await writer.drain()
            replies = [await reader.readline() for _ in requests]
            if not all(replies):
                raise ConnectionResetError(f"the engine's agent at {self.path} went away")
            return replies
        finally:
            writer.close()

    async def add(self, specs: Sequence[ProcessSpec]) -> None:
        if specs:
            await self._request(*({"op": "add", "spec": spec} for spec in specs))

    async def preload(self, modules: Sequence[str]) -> None:
        """Imports what later processes need, as far as the agent has not."""
        await self._request({"op": "import", "modules": modules})

    async def kill(self, ref: str, *, grace_s: float = 0.0) -> None:
        await self._request({"op": "kill", "ref": ref, "grace_s": grace_s})

    async def list(self) -> list[Seen]:
        (reply,) = await self._request({"op": "list"})
        return msgspec.json.decode(reply, type=list[Seen])

    async def capacity(self) -> int | None:
        """One worker for each CPU that this process may use."""
        return len(os.sched_getaffinity(0))

    async def watch(self) -> AsyncIterator[Seen]:
        reader, writer = await self._connect()
        try:
            writer.write(b'{"op":"watch"}\n')
            await writer.drain()
            while line := await reader.readline():
                yield msgspec.json.decode(line, type=Seen)
        finally:
            writer.close()


def import_for_later_processes(module: str) -> None:
    """Has the agent that forked this process, if one did, import what those that it forks later need as well."""
    if process.forked_by.path:
        with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):  # a new agent imports it when needed
            line.connect(process.forked_by.path)
            line.sendall(msgspec.json.encode({"op": "import", "modules": [module]}) + b"\n")


def start_agent(
    path: Path, *, preload: Sequence[str], life: int, log: Path, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts an agent on the socket `path` that imports the modules `preload`. `life`: the lifeline's reading end;
    `folder`: where it and its processes run, if not here."""
    env = {**PRESET, **os.environ, process.LIFELINE: str(life), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "trueline.engine.local.agent", str(path), *preload],
            env=env, pass_fds=(life,), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            cwd=folder,
        )  # fmt: skip
