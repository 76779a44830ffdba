"""The parent of several server processes: deaths in each phase of a process, reasons that do not pass, the exit status.

Most processes are small scripts that play a given part; the last tests kill real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from trueline import events
from trueline.errors import PortInUse, StorageError, TruelineError, UsageError
from trueline.serve.process import multiprocess
from trueline.serve.process.multiprocess import ProcessEnded
from trueline.serve.settings import ServeSettings
from worlds import bundles, servers
from worlds.waiting import until_async

PART = """
import json, os, signal, sys
for name in sorted(os.listdir(sys.argv[1])):
    try:
        part = os.path.join(sys.argv[1], name)
        acts = open(part).read().split()
        os.unlink(part)  # one process plays it
        break
    except FileNotFoundError:
        continue
else:
    acts = ["ready"]
for act in acts:
    if act == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act.isdecimal():
        sys.exit(int(act))
    elif act == "kill_first":
        os.kill(int(open(os.path.join(sys.argv[1], "..", "first")).read()), signal.SIGKILL)
    elif act == "noise":
        print("a library's own words", flush=True)
    elif act == "ready":
        print(json.dumps({"event": "server.ready", "url": "http://x"}), flush=True)
        sys.stdin.read()
    else:
        print(json.dumps({"event": "server.failed", "code": act, "message": "it says why", "hint": ""}), flush=True)
        sys.exit(1)
"""


@dataclass
class Seen:
    """What the parent said: its announcements, and its events by name."""

    announced: list[dict[str, Any]] = field(default_factory=list)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def all(self, name: str) -> list[dict[str, Any]]:
        return self.events.get(name, [])


def serve(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: Sequence[str],
    *,
    act: Callable[[Seen], Any] | None = None,
    **settings: Any,
) -> tuple[Seen, TruelineError | None]:
    """Runs three processes that play `parts`, the first one the first, and stops them after `act`; the last parts are
    "ready". Also returns the error that the parent ends with.
    """
    plan = folder / "parts"
    plan.mkdir()
    for number, part in enumerate(parts):
        (plan / f"{number:03}").write_text(part)
    monkeypatch.setattr(multiprocess, "COMMAND", (sys.executable, "-S", "-c", PART, str(plan)))
    monkeypatch.setattr(multiprocess, "_PAUSE_S", (0.0,))
    seen = Seen()

    async def work() -> None:
        told = {"source": "a.bundle", "port": 0, "processes": 3, "drain_s": 60.0} | settings
        task = asyncio.ensure_future(multiprocess.run(ServeSettings(**told), seen.announced.append))
        await until_async(lambda: seen.announced or task.done(), "an announcement, or an end")
        if not task.done():
            if act is not None:
                await act(seen)
            os.kill(os.getpid(), signal.SIGTERM)
        await task

    def note(name: str, fields: dict[str, Any]) -> None:
        if name == "process.ready" and not seen.all(name):
            (folder / "first").write_text(str(fields["pid"]))
        seen.events.setdefault(name, []).append(fields)

    with events.listening(note):
        try:
            asyncio.run(work())
        except TruelineError as error:
            return seen, error
    return seen, None


@pytest.mark.parametrize("how", ["killed", "3", "noise killed"])
@pytest.mark.parametrize("before", [0, 1, 2], ids=["the first", "the second", "the third"])
def test_a_process_that_dies_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, before: int
) -> None:
    seen, error = serve(tmp_path, monkeypatch, [*["ready"] * before, how])
    assert error is None
    assert [one["processes"] for one in seen.announced] == [3]
    (ended,) = seen.all("process.ended")
    assert "before it was ready" in ended["why"]
    assert len(seen.all("process.ready")) == 3


def test_what_a_library_prints_before_the_announcement_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, error = serve(tmp_path, monkeypatch, ["noise ready"])
    assert error is None
    assert seen.announced == [{"event": "server.ready", "url": "http://x", "processes": 3}]


@pytest.mark.parametrize(
    ("code", "kind"), [("usage", UsageError), ("bundle", TruelineError), ("port_in_use", PortInUse)]
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_reason_that_does_not_pass_ends_the_start_with_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[TruelineError], before: int
) -> None:
    seen, error = serve(tmp_path, monkeypatch, [*["ready"] * before, code])
    assert isinstance(error, kind)
    assert (error.code, error.message) == (code, "it says why")
    assert seen.announced == []
    assert seen.all("process.ended") == []


def test_a_store_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, error = serve(tmp_path, monkeypatch, ["storage", "registry", "ready", "storage"])
    assert error is None
    assert [one["processes"] for one in seen.announced] == [3]


def test_a_first_process_that_always_dies_ends_the_server_with_how_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, error = serve(tmp_path, monkeypatch, ["killed"] * 50)
    assert isinstance(error, ProcessEnded)
    assert "SIGKILL" in error.message
    assert len(seen.all("process.ended")) == multiprocess.START_ATTEMPTS - 1
    seen.events.clear()
    shutil.rmtree(tmp_path / "parts")
    _, error = serve(tmp_path, monkeypatch, ["storage"] * 50)
    assert isinstance(error, StorageError)


def test_a_further_process_that_always_dies_does_not_keep_the_others_from_serving_and_is_in_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_more_attempts(seen: Seen) -> None:
        count = len(seen.all("process.ended"))
        await until_async(lambda: len(seen.all("process.ended")) > count + 5, "attempts after the announcement")

    parts = ["ready", "ready", *["killed"] * 1000]
    seen, error = serve(tmp_path, monkeypatch, parts, act=wait_for_more_attempts)
    assert [one["processes"] for one in seen.announced] == [2]
    assert isinstance(error, ProcessEnded)
    assert error.exit_code == 1
    assert error.message.startswith("1 of 3 server processes failed: a server process was killed (SIGKILL")


def test_a_process_that_fails_after_the_start_is_tried_until_it_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kill_one(seen: Seen) -> None:
        os.kill(seen.all("process.ready")[1]["pid"], signal.SIGKILL)
        await until_async(lambda: len(seen.all("process.ready")) == 4, "a process in its place")

    parts = ["ready"] * 3 + ["killed", "usage", "port_in_use", "7", "storage"]
    seen, error = serve(tmp_path, monkeypatch, parts, act=kill_one)
    assert error is None
    assert len(seen.all("process.ended")) == 6


def test_a_first_process_that_dies_while_the_others_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(seen: Seen) -> None:
        await until_async(lambda: len(seen.all("process.ready")) == 4, "the first process, again")

    seen, error = serve(tmp_path, monkeypatch, ["ready", "kill_first ready"], act=wait)
    assert error is None
    assert len(seen.all("process.ended")) == 1


def test_a_process_that_cannot_be_forked_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = asyncio.create_subprocess_exec, []

    async def start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        calls.append(command)
        if len(calls) in (1, 3):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await real(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    seen, error = serve(tmp_path, monkeypatch, [])
    assert error is None
    assert [one["processes"] for one in seen.announced] == [3]
    assert "could not be started: Resource temporarily unavailable" in seen.all("process.ended")[0]["why"]


@pytest.mark.parametrize(("how", "why"), [("killed", "was killed (SIGKILL"), ("5", "ended with exit code 5")])
def test_a_process_that_dies_while_it_drains_is_in_the_log_and_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, why: str
) -> None:
    seen, error = serve(tmp_path, monkeypatch, ["ready", f"ready {how}"])
    assert isinstance(error, ProcessEnded)
    assert "while it drained" in error.message
    assert why in error.message
    assert len(seen.all("process.ended")) == 1


# real processes


def _children(pid: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(pid).children() if "trueline.serve" in one.cmdline()]


@pytest.mark.jobs
@pytest.mark.slow
def test_a_server_whose_process_is_killed_while_it_loads_serves_all_the_same(tmp_path: Path) -> None:
    source, real = tmp_path / "tiny.bundle", bundles.double_plus(tmp_path / "real").path
    os.mkfifo(source)  # opening it waits for a writer, and so does loading
    command = [sys.executable, "-m", "trueline.serve", "--port=0", "--processes=2", "--name=tiny", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = next(found[1] for line in process.stderr if (found := re.search(r"server.listening .*port=(\d+)", line)))
        (first,) = _children(process.pid)
        source.unlink()
        real.rename(source)
        first.kill()
        assert '"processes": 2' in process.stdout.readline()
        for _ in range(20):
            assert servers.post(f"http://127.0.0.1:{port}/predictions/tiny", json=[1, 2, 3]).json() == [3.0, 5.0, 7.0]
            assert servers.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
        process.terminate()
        assert "SIGKILL" in process.stderr.read()
    assert process.returncode == 0


@pytest.mark.slow
def test_a_taken_metrics_port_of_a_further_process_ends_the_start_with_its_number(tmp_path: Path) -> None:
    bundle = bundles.double_plus(tmp_path / "tiny.bundle").path
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)), servers.running(bundle, processes=2, metrics_port=port - 1):
            pass


@pytest.mark.jobs
@pytest.mark.slow
def test_a_signal_to_all_processes_at_once_hurries_none(tmp_path: Path) -> None:
    """As Ctrl-C in a terminal and systemd's KillMode=control-group send it: accepted requests are answered."""
    bundle = bundles.double_plus(tmp_path / "tiny.bundle").path
    body = b"[1, 2, 3]"
    with (
        servers.running(bundle, processes=2) as running,
        socket.create_connection(("127.0.0.1", running.port)) as busy,
        contextlib.ExitStack() as held,
    ):
        head = f"POST /predictions/tiny HTTP/1.1\r\nhost: 0\r\ncontent-length: {len(body)}\r\nexpect: 100-continue"
        busy.sendall(head.encode() + b"\r\n\r\n")
        assert busy.recv(65536).startswith(b"HTTP/1.1 100")
        idle = [held.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(16)]
        for connection in idle:
            connection.sendall(b"GET /ping HTTP/1.1\r\nhost: 0\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        for one in _children(running.pid):
            one.terminate()
        os.kill(running.pid, signal.SIGTERM)
        for connection in idle:
            assert connection.recv(1) == b""  # every process drains
        busy.sendall(body)
        assert busy.recv(65536).startswith(b"HTTP/1.1 200")
        running._process.wait(100)  # a further signal would hurry it
        assert running.stop() == 0
