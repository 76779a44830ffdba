"""What a server is told: one value, the same in a call, in a command line and in the child process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to serve a bundle, a store of bundles, or both."""

    source: str | None = None
    """Path of a bundle (folder or packed file), `models:/name@alias`, `models:/name/3`, or a URL of a store that fsspec
    reads, `s3://bucket/digits.tlb#sha256:…`."""
    name: str | None = None
    """The model's name in paths; the bundle's own by default."""
    version: str | None = None
    """The registry's, or `1`, by default."""
    host: str = "127.0.0.1"
    port: int = 8080
    """0 takes a free one."""
    key_file: str | None = None
    """File of the tokens that are asked for; made when missing. An address that other machines reach needs it, or
    `client_ca`.
    """
    certificate: str | None = None
    """PEM file of the server's certificate chain: all ports then speak TLS."""
    private_key: str | None = None
    """PEM file of its key, if that is not in the same file."""
    client_ca: str | None = None
    """PEM file of the authority whose certificates clients have to show."""
    trusted_keys: str | None = None
    """PEM file of Ed25519 public keys: only what one of them has signed is served, bundle or archive."""
    cors_origin: str = ""
    """The origin whose pages a browser lets read answers, `https://example.org`, or `*`; empty: none."""
    cors_methods: str = ""
    """What such pages may ask with; empty: what the server knows."""
    cors_headers: str = ""
    """Headers that they may send beside those that the server knows."""
    program: str = ""
    """Format of the program to run, of those that a bundle has; empty: the one that it says. `aotinductor` is machine
    code and needs `allow_code`."""
    device: str = ""
    """`cpu`, `cuda`, `cuda:1`, or a device of OpenVINO's; empty: the CPU."""
    precision: str = ""
    """`bf16` or `fp16` where the runtime has it; a version that then fails its golden examples is refused."""
    threads: int = 0
    """Threads of one run; 0: one when runs are short, else as many as the runtime likes."""
    max_batch: int = 64
    """Records that are run together at most."""
    max_delay_s: float | None = None
    """How long an idle model waits for company; None: as long as pays, by what is learned of its runs and requests."""
    max_queue: int = 256
    """Requests that may wait for a model."""
    max_body_bytes: int = 64 * 2**20
    model_store: str | None = None
    """Folder of bundles that clients of the management port may load by name."""
    workflow_store: str | None = None
    """Folder of the workflows that clients of the management port may register by name; the model store by default."""
    models: str = ""
    """How versions run that say nothing of it themselves: JSON in model-config.yaml's words, by `MODEL/VERSION`, or
    under an empty name for every archive."""
    load: str = ""
    """What of the store is loaded at start, with commas between: models, entries, `name=entry`; or `all`."""
    watch: bool = False
    """Keep what `load` names as the store has it: new bundles come, changed ones take over, removed ones leave."""
    follow_s: float = 10.0
    """Between two looks at the store, or at an alias of the registry, which is followed when it moves; 0: never."""
    management_port: int | None = None
    """Where versions are managed; 0 takes a free one, None: nowhere."""
    grpc_port: int | None = None
    """Where the protocol, and TorchServe's inference API, are spoken over gRPC; None: nowhere."""
    grpc_management_port: int | None = None
    """Where TorchServe's management API is spoken over gRPC; None: nowhere."""
    metrics_port: int | None = None
    """A further port that answers /metrics alone."""
    state: str | None = None
    """File of what is to be served: restored at start, written after each act of management."""
    processes: int = 1
    """Server processes that share the ports and the wanted state."""
    shared: bool = False
    """This is one of several processes that listen on the same ports."""
    joins: bool = False
    """Others of them answer already: this one listens when it is ready, and no sooner."""
    most_threads: int = 0
    """Its share of the cores: threads of one run where `threads` leaves them to the server; 0: no bound."""
    shared_weights: str | None = None
    """Folder of this server alone where its processes lay the weights that they share."""
    resumed: bool = False
    """The state file alone says what is served: `source` and `load` were followed before."""
    traces: str | None = None
    """URL of an OpenTelemetry collector that takes OTLP over HTTP."""
    access_log: str | None = None
    """File that gets a line of JSON for each request over HTTP; `-`: standard error."""
    tracking_uri: str | None = None
    drain_s: float = 30.0
    """How long requests under way may take after SIGTERM."""
    allow_code: bool = False
    """Run the handlers of model archives, each in a process of its own. Without it archives are refused."""
    handler_memory_bytes: int = 0
    """Address space of one such process; 0: not bounded."""
    torchserve_strict: bool = False
    """TorchServe's statuses also where ours are better."""
    lifeline: bool = False
    """Stop when standard input ends: a child process that dies with its parent."""

    @property
    def guarded(self) -> bool:
        """Whether clients have to say who they are: by a token, or by a certificate."""
        return self.key_file is not None or self.client_ca is not None


_KINDS: dict[str, type] = {"int": int, "int | None": int, "float": float, "float | None": float}
"""How a field's annotation is read from a command line; all else is text."""


class Options(TypedDict, total=False):
    """The fields of Settings that a caller of `start` may give beside source and port."""

    name: str | None
    version: str | None
    host: str
    key_file: str | None
    certificate: str | None
    private_key: str | None
    client_ca: str | None
    trusted_keys: str | None
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
    model_store: str | None
    workflow_store: str | None
    models: str
    load: str
    watch: bool
    follow_s: float
    management_port: int | None
    grpc_port: int | None
    grpc_management_port: int | None
    metrics_port: int | None
    state: str | None
    processes: int
    traces: str | None
    access_log: str | None
    tracking_uri: str | None
    drain_s: float
    allow_code: bool
    handler_memory_bytes: int
    torchserve_strict: bool


def to_arguments(settings: Settings) -> list[str]:
    """The command line that says `settings`; `from_arguments` reads it back.

    >>> to_arguments(Settings(source="a.bundle", port=0))
    ['--port=0', 'a.bundle']
    """
    arguments = []
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if field.name == "source" or value == field.default:
            continue
        flag = "--" + field.name.replace("_", "-")
        arguments.append(flag if value is True else f"{flag}={value}")
    return [*arguments, *([settings.source] if settings.source is not None else [])]


def from_arguments(arguments: Sequence[str]) -> Settings:
    """The settings in a command line."""
    parser = argparse.ArgumentParser("python -m trueline.serve", description="Serve bundles.", allow_abbrev=False)
    parser.add_argument("source", nargs="?")
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        elif field.name != "source":
            kind = _KINDS.get(str(field.type), str)
            parser.add_argument(flag, type=kind, default=field.default)
    return Settings(**vars(parser.parse_args(arguments)))
