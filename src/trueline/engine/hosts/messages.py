"""What a joined host and the master send each other over one stream, in msgpack.

    host                                            master
      Greeting ──▶                                    or the call is refused, in words
                                         ◀── Welcome
      (fetches the files, starts its agent)
      CoresOffer ──▶                                  from here on it gets workers
      ProcessReport, ProcessOutput, Pulse ──▶
                        ◀── AddOrder, KillOrder, Pulse, JournalCopy, HostList, EventLines
      Withdrawal ──▶                                  its workers leave between two steps
                                         ◀── Dismissal

A host that reconnects begins with its Greeting again, with the same `id`, and offers what still runs.
"""

import msgspec

from trueline.engine.contract import ProcessSpec, Seen

SERVICE = "trueline.engine.v1.Hosts"
JOIN, FETCH, SETTLE, AGREE = (f"/{SERVICE}/{name}" for name in ("Join", "Fetch", "Settle", "Agree"))
PULSE_S = 0.5
"""Time between two pulses of a host; the master answers each."""
PULSES = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
]
"""Both ends ask each other every two seconds, so that a link that was cut is noticed and a new connection is made."""
CHUNK = 1 << 20
"""Bytes of a file in one message."""
CERTIFICATE_NAME = "master.trueline"
"""The name in the certificate of every master: the CA is made for one launch, so addresses and names say nothing."""


class Greeting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    id: str
    """Random, for as long as the host lends its cores."""
    name: str
    address: str
    """Of the route to the master, or of the chosen interface: where its workers listen."""
    versions: dict[str, str]
    """Of trueline, Python and torch."""


class CoresOffer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    cores: int
    running: tuple[Seen, ...] = ()
    """Every process that it has started, also those that have ended."""
    standby: str = ""
    """HOST:PORT where a master on this host would listen, if that of the job's host died; empty: it takes no master."""
    memory: int = 0
    """Bytes that were free when the host joined; 0: unknown."""


class Pulse(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    load: float = 0.0
    """Of the host: processes that want a core, averaged over a minute."""
    sent_at: float = 0.0
    """When the host sent it, by its own clock of durations. The answer repeats it."""
    clock: float = 0.0
    """Of an answer: the master's wall clock."""
    off_s: float = 0.0
    """How far the host's wall clock is ahead of the master's, as it has measured."""


class ProcessReport(msgspec.Struct, frozen=True, tag=True):
    seen: Seen


class ProcessOutput(msgspec.Struct, frozen=True, tag=True):
    ref: str
    data: bytes


class Withdrawal(msgspec.Struct, frozen=True, tag=True):
    """The host takes its cores back."""


class ScriptValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the script of a worker decides for the job, in a call of `AGREE`; the answer is empty, or says why not."""

    epochs: int
    global_batch: int
    seed: int


class TravelledFile(msgspec.Struct, frozen=True):
    """A file of the job as a joined host gets it: its path in the job's folder there, and its content by SHA-256."""

    path: str
    digest: str
    size: int


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    job: str
    secret: str
    lease_s: float
    preload: tuple[str, ...]
    """Modules that the host's agent imports once for all workers."""
    files: tuple[TravelledFile, ...]
    packages: dict[str, str] = {}
    """Versions of what the recipe imports, as the master's host has them."""
    store: str = ""
    """Where checkpoints are written, and every host has to see `probe`."""
    probe: str = ""
    kit: bytes = b""
    """What a successor of the master needs, beside the files and the journal; empty: there is to be none."""


class AddOrder(msgspec.Struct, frozen=True, tag=True):
    spec: ProcessSpec


class KillOrder(msgspec.Struct, frozen=True, tag=True):
    ref: str
    grace_s: float = 0.0


class Dismissal(msgspec.Struct, frozen=True, tag=True):
    why: str


class JournalCopy(msgspec.Struct, frozen=True, tag=True):
    """Rows of the master's journal, as (kind, body in JSON). `begins`: what was sent before is void."""

    rows: tuple[tuple[str, bytes], ...]
    begins: bool = False


class EventLines(msgspec.Struct, frozen=True, tag=True):
    """A piece of the job's events, as its file has them. `begins`: what was sent before is void."""

    lines: bytes
    begins: bool = False


class KnownHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host as the next master has to know it."""

    id: str
    name: str
    address: str
    cores: int
    leaving: bool
    alive: list[str]
    standby: str = ""
    memory: int = 0


class HostList(msgspec.Struct, frozen=True, tag=True):
    """All joined hosts, in the order in which they joined: that of the master's successors."""

    hosts: tuple[KnownHost, ...]


FromHost = Greeting | CoresOffer | Pulse | ProcessReport | ProcessOutput | Withdrawal
FromMaster = Welcome | AddOrder | KillOrder | Pulse | Dismissal | JournalCopy | HostList | EventLines

encode = msgspec.msgpack.encode
decode_from_master = msgspec.msgpack.Decoder(FromMaster).decode
_decode_from_host = msgspec.msgpack.Decoder(FromHost).decode


class UnreadableMessage(msgspec.Struct, frozen=True):
    """What a host of another version has sent: gRPC would end the call without a reason that its user understands."""

    why: str


def decode_from_host(data: bytes) -> FromHost | UnreadableMessage:
    try:
        message: FromHost = _decode_from_host(data)
    except msgspec.DecodeError as error:
        return UnreadableMessage(str(error))
    return message
