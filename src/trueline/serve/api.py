"""The verb `serve`: runs a server here, or in another process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Unpack

from trueline import events
from trueline.errors import TruelineError, rebuild_error
from trueline.serve import settings
from trueline.serve.settings import ServeOptions, ServeSettings, to_arguments


def serve(source: str | Path | None = None, *, port: int = 8080, **options: Unpack[ServeOptions]) -> None:
    """Serves a bundle, a store of bundles, or both, until SIGINT or SIGTERM; finishes accepted requests and returns.

    `source` is the path of a bundle, its URL in an object store, or `models:/name@alias` or `models:/name/3` of the
    registry. `trueline.serve.settings.ServeSettings` has the other arguments with their help and defaults. Raises
    PortInUse, UsageError, BundleError, NotProven, RegistryError, StorageError; no request is answered by a version that
    did not reproduce its golden records.
    """
    run(settings.of(source, port, options))


def run(chosen: ServeSettings) -> None:
    """`serve` with its settings as one value."""
    import uvloop

    from trueline.serve import server

    def announce(record: dict[str, Any]) -> None:
        events.emit("server.ready", **{key: value for key, value in record.items() if key != "event"})

    uvloop.run(server.run(chosen, announce))


@dataclass(slots=True)
class RunningServer:
    """A server process that is ready. It ends with `stop`, the `with` block, or the process that started it."""

    url: str
    port: int
    pid: int
    model: str  # of the source; empty if only a store is served
    version: str
    management_url: str | None
    metrics_url: str | None
    grpc_port: int | None
    grpc_management_port: int | None
    _process: subprocess.Popen[bytes] = field(repr=False)

    def stop(self, timeout_s: float = 35.0) -> int:
        """Drains and ends the process (kills it after `timeout_s`); returns its exit code. Harmless when repeated."""
        return _end(self._process, timeout_s)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def start(
    source: str | Path | None = None,
    *,
    port: int = 0,
    ready_timeout_s: float = 300.0,
    log: Path | None = None,
    **options: Unpack[ServeOptions],
) -> RunningServer:
    """Starts a server process and returns when it is ready. It takes the arguments of `serve`; by default it uses a
    free port and logs to this process's stderr.

    Raises the server's error; TruelineError when it is not ready within `ready_timeout_s`.
    """
    chosen = settings.of(source, port, options, lifeline=True)
    command = [sys.executable, "-P", "-m", "trueline.serve", *to_arguments(chosen)]
    with contextlib.nullcontext() if log is None else log.open("ab") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        record = _first_record(process.stdout, ready_timeout_s)
        if record is None or record["event"] != "server.ready":
            raise _failure(record, process, ready_timeout_s)
    except BaseException:
        _end(process, 5.0)
        raise
    names = {one.name for one in fields(RunningServer)} - {"pid", "_process"}
    known: dict[str, Any] = {name: record.get(name) for name in names}
    return RunningServer(**known, pid=process.pid, _process=process)


def _failure(record: dict[str, Any] | None, process: subprocess.Popen[bytes], timeout_s: float) -> TruelineError:
    if record is not None:
        return rebuild_error(record["code"], record)
    if process.poll() is None:
        return TruelineError(f"the server was not ready within {timeout_s:g} s")
    return TruelineError(
        f"the server process ended with exit code {process.returncode} before it was ready; its log says why"
    )


def _first_record(stdout: IO[bytes], timeout_s: float) -> dict[str, Any] | None:
    """None when the process ends or `timeout_s` passes before there is a line."""
    line, until = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
            return None
        piece = os.read(stdout.fileno(), 65536)
        if not piece:
            return None
        line += piece
    found: dict[str, Any] = json.loads(line)
    return found


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Terminates the process, kills it after `timeout_s`, closes its pipes; returns its exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.returncode
