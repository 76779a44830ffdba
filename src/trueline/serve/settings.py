"""The settings of a server: one value for calls, command lines and child processes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from trueline.settings import check, declared_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How to serve a bundle, a store of bundles, or both."""

    source: str | None = None
    """Path of a bundle, `models:/name@alias`, `models:/name/3`, or a URL that fsspec reads,
    `s3://bucket/digits.tlb#sha256:…`."""
    name: str | None = setting(None, "Name of the model in URLs; the bundle's own if left out.", metavar="NAME")
    version: str | None = setting(
        None, "Version of SOURCE; that of the registry, or 1, if left out.", metavar="VERSION"
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    key_file: str | None = setting(
        None, "Ask for the tokens in FILE (made when missing), e.g. off loopback.", metavar="FILE"
    )
    certificate: str | None = setting(None, "Speak TLS, with the certificate chain in this PEM file.", metavar="FILE")
    private_key: str | None = setting(None, "Its private key, if that is in a file of its own.", metavar="FILE")
    client_ca: str | None = setting(None, "Require client certificates of this authority.", metavar="FILE")
    trusted_keys: str | None = setting(
        None, "Serve only what one of these Ed25519 public keys has signed.", metavar="FILE"
    )
    cors_origin: str = setting("", "Let pages of this origin, or *, read answers.", metavar="ORIGIN")
    cors_methods: str = setting(
        "", "Methods that such pages may use; all that the server knows if left out.", metavar="METHODS"
    )
    cors_headers: str = setting(
        "", "Request headers that they may send beside those that the server knows.", metavar="HEADERS"
    )
    program: str = setting("", "Run this of a bundle's programs, not the one it names.", metavar="FORMAT")
    device: str = setting("", "cuda, cuda:1, or OpenVINO's GPU; the CPU if left out.", metavar="DEVICE")
    precision: str = setting(
        "",
        "bf16 or fp16, where the runtime computes in it; a version that then fails its golden examples is refused.",
        metavar="NAME",
    )
    threads: int = setting(
        0, "Threads of one run; 0: one when runs are short, else as many as the runtime likes.", metavar="N", low=0
    )
    max_batch: int = setting(64, "Records that are run together at most.", low=1)
    max_delay_s: float | None = setting(
        None,
        "How long an idle model waits for more requests; learned from its runs and requests if left out.",
        metavar="SECONDS",
        flag="max-delay",
        low=0,
    )
    max_queue: int = setting(256, "Requests that may wait for a model.", low=1)
    max_body_bytes: int = setting(
        64 * 2**20, "Largest request body, also after decompression.", metavar="MIB", flag="max-body", low=1, unit=2**20
    )
    model_store: str | None = setting(
        None, "A folder of bundles that may be loaded by name on the management port.", metavar="DIR"
    )
    workflow_store: str | None = setting(
        None, "A folder of TorchServe's workflows; the model store by default.", metavar="DIR"
    )
    models: str = setting(
        "",
        'JSON in model-config.yaml\'s words for versions that bring none, by MODEL/VERSION; "" is for every archive.',
        metavar="JSON",
    )
    load: str = setting(
        "",
        "What of the store to load at start, with commas between: models, entries, name=entry; or all.",
        metavar="NAMES",
    )
    watch: bool = setting(
        False,
        "Keep what --load names as the store has it: new bundles come, changed ones take over, removed ones leave.",
    )
    follow_s: float = setting(
        10.0, "Seconds between looks at the store or the alias; 0: never.", metavar="SECONDS", flag="follow", low=0
    )
    management_port: int | None = setting(
        None, "Port to manage versions on; 8081 with a store.", metavar="PORT", low=0, high=65535
    )
    grpc_port: int | None = setting(
        None, "Port of requests over gRPC, in both protocols.", metavar="PORT", low=0, high=65535
    )
    grpc_management_port: int | None = setting(
        None, "Port of TorchServe's management over gRPC.", metavar="PORT", low=0, high=65535
    )
    metrics_port: int | None = setting(
        None, "A further port that answers /metrics alone.", metavar="PORT", low=0, high=65535
    )
    state: str | None = setting(None, "Remembers what is served in FILE, and brings it back at start.", metavar="FILE")
    processes: int = setting(1, "Server processes that share the ports.", low=1, high=64)
    shared: bool = False
    """Several processes listen on the same ports."""
    joins: bool = False
    """It listens only when it is ready, since other processes answer already."""
    most_threads: int = 0
    """Upper bound of threads of one run if `threads` is 0; 0: no bound."""
    shared_weights: str | None = None
    """Folder for the weights that its processes share."""
    resumed: bool = False
    """Only the state file says what is served; `source` and `load` have been applied."""
    traces: str | None = setting(None, "Send OpenTelemetry spans to this collector (OTLP over HTTP).", metavar="URL")
    access_log: str | None = setting(
        None, "Write one line of JSON for each request; `-`: standard error.", metavar="FILE"
    )
    tracking_uri: str | None = setting(
        None, "MLflow store; MLFLOW_TRACKING_URI or ./mlflow.db when left out.", metavar="URI"
    )
    drain_s: float = setting(
        30.0, "How long requests under way may take after SIGTERM.", metavar="SECONDS", flag="drain", low=0
    )
    allow_code: bool = setting(
        False, "Run the handlers of TorchServe's model archives (.mar), each in a process of its own."
    )
    handler_memory_bytes: int = setting(
        0,
        "Address space of a handler's process; 0: not bounded.",
        metavar="MIB",
        flag="handler-memory",
        low=0,
        unit=2**20,
    )
    torchserve_strict: bool = setting(False, "TorchServe's statuses also where the server's own say more.")
    lifeline: bool = False
    """Stop when standard input ends, with the parent process."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def guarded(self) -> bool:
        """Whether clients need a token or a certificate."""
        return self.key_file is not None or self.client_ca is not None


class ServeOptions(TypedDict, total=False):
    """Arguments of `serve` and `start` besides source and port; a test compares them with ServeSettings."""

    name: str | None
    version: str | None
    host: str
    key_file: str | Path | None
    certificate: str | Path | None
    private_key: str | Path | None
    client_ca: str | Path | None
    trusted_keys: str | Path | None
    cors_origin: str
    cors_methods: str
    cors_headers: str
    program: str
    device: str
    precision: str
    threads: int
    max_batch: int
    max_delay_s: float | None
    max_queue: int
    max_body_bytes: int
    model_store: str | Path | None
    workflow_store: str | Path | None
    models: str
    load: str
    watch: bool
    follow_s: float
    management_port: int | None
    grpc_port: int | None
    grpc_management_port: int | None
    metrics_port: int | None
    state: str | Path | None
    processes: int
    traces: str | None
    access_log: str | Path | None
    tracking_uri: str | None
    drain_s: float
    allow_code: bool
    handler_memory_bytes: int
    torchserve_strict: bool


def of(source: str | Path | None, port: int, options: ServeOptions, **internal: Any) -> ServeSettings:
    """Raises UsageError for a value out of its range."""
    given: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return ServeSettings(source=None if source is None else str(source), port=port, **given, **internal)


def to_arguments(settings: ServeSettings) -> list[str]:
    """The command line of `settings`, the inverse of `from_arguments`.

    >>> to_arguments(ServeSettings(source="a.bundle", port=0))
    ['--port=0', 'a.bundle']
    """
    arguments = []
    for field in fields(ServeSettings):
        value = getattr(settings, field.name)
        if field.name == "source" or value == field.default:
            continue
        flag = "--" + field.name.replace("_", "-")
        arguments.append(flag if value is True else f"{flag}={value}")
    return [*arguments, *([settings.source] if settings.source is not None else [])]


def from_arguments(arguments: Sequence[str]) -> ServeSettings:
    parser = argparse.ArgumentParser("python -m trueline.serve", description="Serve bundles.", allow_abbrev=False)
    kinds = {one.name: one.kind for one in declared_settings(ServeSettings)} | {"most_threads": int}
    parser.add_argument("source", nargs="?")
    for field in fields(ServeSettings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        elif field.name != "source":
            parser.add_argument(flag, type=kinds.get(field.name, str), default=field.default)
    return ServeSettings(**vars(parser.parse_args(arguments)))
