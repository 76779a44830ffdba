"""The verb `serve`: run a server here, or as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from trueline import events
from trueline.errors import TruelineError
from trueline.serve.process import child
from trueline.serve.settings import Options, Settings, to_arguments


def serve(
    source: str | Path | None = None,
    *,
    name: str | None = None,
    version: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    key_file: str | Path | None = None,
    certificate: str | Path | None = None,
    private_key: str | Path | None = None,
    client_ca: str | Path | None = None,
    trusted_keys: str | Path | None = None,
    cors_origin: str = "",
    cors_methods: str = "",
    cors_headers: str = "",
    program: str = "",
    device: str = "",
    precision: str = "",
    threads: int = 0,
    max_batch: int = 64,
    max_delay_s: float | None = None,
    max_queue: int = 256,
    max_body_bytes: int = 64 * 2**20,
    model_store: str | Path | None = None,
    workflow_store: str | Path | None = None,
    models: str = "",
    load: str = "",
    watch: bool = False,
    follow_s: float = 10.0,
    management_port: int | None = None,
    grpc_port: int | None = None,
    grpc_management_port: int | None = None,
    metrics_port: int | None = None,
    state: str | Path | None = None,
    processes: int = 1,
    traces: str | None = None,
    access_log: str | Path | None = None,
    tracking_uri: str | None = None,
    drain_s: float = 30.0,
    allow_code: bool = False,
    handler_memory_bytes: int = 0,
    torchserve_strict: bool = False,
) -> None:
    """Serves a bundle, a store of bundles, or both, until SIGINT or SIGTERM; finishes what is under way and returns.

    `source` is the path of a bundle, its URL in an object store, or `models:/name@alias` or `models:/name/3` of the
    registry. What each argument means stands in `trueline.serve.settings.Settings`. Raises PortInUse, UsageError,
    BundleError, NotProven, RegistryError, StorageError; no request is answered by a version that did not pass
    its golden examples.
    """
    settings = Settings(
        source=_text(source),
        name=name,
        version=version,
        host=host,
        port=port,
        key_file=_text(key_file),
        certificate=_text(certificate),
        private_key=_text(private_key),
        client_ca=_text(client_ca),
        trusted_keys=_text(trusted_keys),
        cors_origin=cors_origin,
        cors_methods=cors_methods,
        cors_headers=cors_headers,
        program=program,
        device=device,
        precision=precision,
        threads=threads,
        max_batch=max_batch,
        max_delay_s=max_delay_s,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        model_store=_text(model_store),
        workflow_store=_text(workflow_store),
        models=models,
        load=load,
        watch=watch,
        follow_s=follow_s,
        management_port=management_port,
        grpc_port=grpc_port,
        grpc_management_port=grpc_management_port,
        metrics_port=metrics_port,
        state=_text(state),
        processes=processes,
        traces=traces,
        access_log=_text(access_log),
        tracking_uri=tracking_uri,
        drain_s=drain_s,
        allow_code=allow_code,
        handler_memory_bytes=handler_memory_bytes,
        torchserve_strict=torchserve_strict,
    )
    run(settings)


def _text(path: str | Path | None) -> str | None:
    return None if path is None else str(path)


def run(settings: Settings) -> None:
    """`serve` with its arguments as one value."""
    import uvloop

    from trueline.serve import server

    uvloop.run(server.run(settings, _announce))


def _announce(record: dict[str, Any]) -> None:
    events.emit("server.ready", **{key: value for key, value in record.items() if key != "event"})


@dataclass(slots=True)
class RunningServer:
    """A server process that is ready. It ends with `stop`, with the block, or with the process that started it."""

    url: str
    port: int
    pid: int
    model: str
    """Of the source; empty when only a store is served."""
    version: str
    management_url: str | None
    metrics_url: str | None
    grpc_port: int | None
    grpc_management_port: int | None
    _process: subprocess.Popen[bytes] = field(repr=False)

    def stop(self, timeout_s: float = 35.0) -> int:
        """Drains and ends the process (kills it after `timeout_s`); returns its exit code. Harmless when repeated."""
        return child.end(self._process, timeout_s)

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
    **options: Unpack[Options],
) -> RunningServer:
    """Starts a server process and returns when it is ready. It takes what `serve` takes; the port is a free one, and
    its log goes to the file `log`, or to this process's stderr.

    Raises what the server would have raised, with its message; TruelineError when it is not ready within
    `ready_timeout_s`.
    """
    chosen = Settings(source=_text(source), port=port, lifeline=True, **options)
    command = [sys.executable, "-P", "-m", "trueline.serve", *to_arguments(chosen)]
    with contextlib.nullcontext() if log is None else log.open("ab") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        record = child.first_record(process.stdout, ready_timeout_s)
        if record is None or record["event"] != "server.ready":
            raise _failure(record, process, ready_timeout_s)
    except BaseException:
        child.end(process, 5.0)
        raise
    return RunningServer(
        url=record["url"],
        port=record["port"],
        pid=process.pid,
        model=record["model"],
        version=record["version"],
        management_url=record.get("management_url"),
        metrics_url=record.get("metrics_url"),
        grpc_port=record.get("grpc_port"),
        grpc_management_port=record.get("grpc_management_port"),
        _process=process,
    )


def _failure(record: dict[str, Any] | None, process: subprocess.Popen[bytes], timeout_s: float) -> TruelineError:
    if record is not None:
        return child.revived(record["code"], record)
    if process.poll() is None:
        return TruelineError(f"the server was not ready within {timeout_s:g} s")
    return TruelineError(
        f"the server process ended with exit code {process.returncode} before it was ready; its log says why"
    )
