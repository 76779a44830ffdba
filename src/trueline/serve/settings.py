"""The settings of a server: one value for calls, command lines and child processes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from trueline.settings import check, declared_settings, setting

_NETWORK = "Network"
_SECURITY = "Security"
_MODELS = "Models and versions"
_RUNNING = "How a model runs"
_LIMITS = "Batching and limits"
_TORCHSERVE = "TorchServe"
_OBSERVABILITY = "Observability"

_file = partial(setting, None, metavar="FILE")
_folder = partial(setting, None, metavar="DIR")
_port = partial(setting, None, metavar="PORT", low=0, high=65535)
_seconds = partial(setting, metavar="SECONDS", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How to serve a bundle, a store of bundles, or both."""

    source: str | None = None
    """Path of a bundle, `models:/name@alias`, `models:/name/3`, or a URL that fsspec reads,
    `s3://bucket/digits.tlb#sha256:…`."""
    name: str | None = setting(
        None, "Name of the model in URLs; by default the bundle's.", metavar="NAME", section=_MODELS
    )
    version: str | None = setting(
        None, "Version of SOURCE; by default the registry's, or 1.", metavar="VERSION", section=_MODELS
    )
    host: str = setting("127.0.0.1", "Address to listen on.", section=_NETWORK)
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", low=0, high=65535, section=_NETWORK)
    key_file: str | None = _file(
        "Require the tokens in FILE (created when missing); needed off loopback.", section=_SECURITY
    )
    certificate: str | None = _file("Use TLS, with the certificate chain in this PEM file.", section=_SECURITY)
    private_key: str | None = _file("The certificate's private key, if it is in another file.", section=_SECURITY)
    client_ca: str | None = _file("Require client certificates of this authority.", section=_SECURITY)
    trusted_keys: str | None = _file("Serve only what one of these Ed25519 public keys has signed.", section=_SECURITY)
    cors_origin: str = setting(
        "", "Allow pages of this origin, or *, to read answers.", metavar="ORIGIN", section=_SECURITY
    )
    cors_methods: str = setting(
        "", "Methods for such pages; by default all of the server.", metavar="METHODS", section=_SECURITY
    )
    cors_headers: str = setting("", "Further request headers for such pages.", metavar="HEADERS", section=_SECURITY)
    allowed_hosts: str = setting(
        "",
        "Without tokens: further names of the server, with commas, as behind a proxy; * for any.",
        metavar="NAMES",
        section=_SECURITY,
    )
    program: str = setting("", "Run this program of the bundle, not its default.", metavar="FORMAT", section=_RUNNING)
    device: str = setting(
        "", "cuda, cuda:1, or OpenVINO's GPU; by default the CPU.", metavar="DEVICE", section=_RUNNING
    )
    precision: str = setting(
        "", "bf16 or fp16; the golden records are checked with it.", metavar="NAME", section=_RUNNING
    )
    threads: int = setting(
        0, "Threads of one run; 0: one if runs are short, else the runtime's.", metavar="N", low=0, section=_RUNNING
    )
    max_batch: int = setting(64, "Most rows of one run.", low=1, section=_LIMITS)
    max_values: int = setting(0, "Most numbers of one request; 0: as proven.", metavar="N", low=0, section=_LIMITS)
    max_size: int = setting(0, "Largest size of a free dimension; 0: as proven.", metavar="N", low=0, section=_LIMITS)
    max_delay_s: float | None = _seconds(
        None, "How long an idle model waits for more requests; by default learned.", flag="max-delay", section=_LIMITS
    )
    max_queue: int = setting(256, "Requests that may wait for a model.", low=1, section=_LIMITS)
    max_body_bytes: int = setting(
        64 * 2**20,
        "Largest request body, also after decompression.",
        metavar="MIB",
        flag="max-body",
        low=1,
        unit=2**20,
        section=_LIMITS,
    )
    run_memory_bytes: int = setting(
        0,
        "Most memory of runs; 0: half of the machine's.",
        metavar="MIB",
        flag="run-memory",
        low=0,
        unit=2**20,
        section=_LIMITS,
    )
    model_store: str | None = _folder(
        "Folder of bundles that clients may load by name on the management port.", section=_MODELS
    )
    workflow_store: str | None = _folder(
        "Folder of TorchServe's workflows; by default the model store.", section=_TORCHSERVE
    )
    allowed_urls: str = setting(
        "",
        "Let clients load from http(s) addresses that match one of these, with commas.",
        metavar="REGEX",
        section=_MODELS,
    )
    models: str = setting(
        "",
        'JSON with defaults of model-config.yaml by MODEL/VERSION; "" is for all archives.',
        metavar="JSON",
        section=_TORCHSERVE,
    )
    load: str = setting(
        "",
        "What to load from the store at start: models, entries, name=entry, with commas; or all.",
        metavar="NAMES",
        section=_MODELS,
    )
    watch: bool = setting(
        False, "Follow the store for what --load names: new, changed and removed bundles.", section=_MODELS
    )
    follow_s: float = _seconds(
        10.0, "Seconds between checks of the store or the alias; 0: never.", flag="follow", section=_MODELS
    )
    management_port: int | None = _port("Port for management; 8081 with a store.", section=_NETWORK)
    grpc_port: int | None = _port("Port for gRPC requests, in both protocols.", section=_NETWORK)
    grpc_management_port: int | None = _port("Port for TorchServe's management over gRPC.", section=_NETWORK)
    metrics_port: int | None = _port("Port for /metrics only.", section=_NETWORK)
    state: str | None = _file("Keep what is served in FILE, and restore it at start.", section=_MODELS)
    processes: int = setting(1, "Server processes that share the ports.", low=1, high=64, section=_NETWORK)
    hide_examples: bool = setting(
        False, "Show no golden record in /openapi.json, /try and the curl line: for private data.", section=_NETWORK
    )
    shared: bool = False  # several processes listen on the same ports
    joins: bool = False  # it listens only when it is ready, since other processes answer already
    most_threads: int = 0  # upper bound of threads of one run if `threads` is 0; 0: no bound
    siblings: int = 1  # processes of this server, which divide the memory
    shared_weights: str | None = None  # folder for the weights that its processes share
    resumed: bool = False  # only the state file says what is served; `source` and `load` have been applied
    traces: str | None = setting(
        None, "Send OpenTelemetry spans to this collector (OTLP over HTTP).", metavar="URL", section=_OBSERVABILITY
    )
    access_log: str | None = _file(
        "Write one line of JSON for each request; `-`: standard error.", section=_OBSERVABILITY
    )
    tracking_uri: str | None = setting(
        None, "MLflow store; by default MLFLOW_TRACKING_URI or ./mlflow.db.", metavar="URI", section=_MODELS
    )
    drain_s: float = _seconds(
        30.0, "How long accepted requests may take after SIGTERM.", flag="drain", section=_NETWORK
    )
    allow_code: bool = setting(
        False, "Run handlers of TorchServe's archives (.mar), in processes of their own.", section=_TORCHSERVE
    )
    handler_memory_bytes: int = setting(
        0,
        "Address space of a handler's process; 0: no bound.",
        metavar="MIB",
        flag="handler-memory",
        low=0,
        unit=2**20,
        section=_TORCHSERVE,
    )
    torchserve_strict: bool = setting(
        False, "TorchServe's status codes also where the server's are more precise.", section=_TORCHSERVE
    )
    lifeline: bool = False  # stop when standard input ends, with the parent process

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
    allowed_hosts: str
    program: str
    device: str
    precision: str
    threads: int
    max_batch: int
    max_values: int
    max_size: int
    max_delay_s: float | None
    max_queue: int
    max_body_bytes: int
    run_memory_bytes: int
    model_store: str | Path | None
    workflow_store: str | Path | None
    allowed_urls: str
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
    hide_examples: bool


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
    kinds = {one.name: one.kind for one in declared_settings(ServeSettings)} | {"most_threads": int, "siblings": int}
    parser.add_argument("source", nargs="?")
    for field in fields(ServeSettings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        elif field.name != "source":
            parser.add_argument(flag, type=kinds.get(field.name, str), default=field.default)
    return ServeSettings(**vars(parser.parse_args(arguments)))
