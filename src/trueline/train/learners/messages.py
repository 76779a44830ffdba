"""What the learners of a job and its master send each other, in msgpack over TLS.

    learner                                  master
      LearnerHello ──▶                         checks the token
      LearnerReady ──▶                         its files and data are there
                            ◀── StartCommand   to all, once all are ready
      CommandEnded, LearnerMetric, LearnerEvent ──▶
                            ◀── StopCommand
                            ◀── Dismiss

Both send a LearnerPulse each second. A connection whose LearnerHello says `tunnel` belongs to a process of the
learner's script, and carries the frames of `hook.py` from then on.
"""

import asyncio
import struct
from typing import Any, TypeVar

import msgspec

PULSE_S, SILENT_S = 1.0, 8.0
"""A side that sends nothing for longer is gone."""
MOST_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")


class LearnerHello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    token: str
    learner: int
    role: str
    """Name of its submission: an old one is sent away."""
    tunnel: bool = False
    generation: int = 0
    """Of a tunnel."""


class LearnerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    host: str
    address: str


class CommandEnded(msgspec.Struct, frozen=True, tag=True):
    generation: int
    code: int


class LearnerMetric(msgspec.Struct, frozen=True, tag=True):
    group: str
    step: int | None
    scalars: dict[str, float]


class LearnerEvent(msgspec.Struct, frozen=True, tag=True):
    name: str
    fields: dict[str, str | int | float | bool | None]


class StartCommand(msgspec.Struct, frozen=True, tag=True):
    generation: int


class StopCommand(msgspec.Struct, frozen=True, tag=True):
    grace_s: float


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    why: str


class LearnerPulse(msgspec.Struct, frozen=True, tag=True):
    pass


FromLearner = LearnerHello | LearnerReady | CommandEnded | LearnerMetric | LearnerEvent | LearnerPulse
FromGroupMaster = StartCommand | StopCommand | Dismiss | LearnerPulse
_Message = TypeVar("_Message")
decode_from_learner = msgspec.msgpack.Decoder(FromLearner).decode
decode_from_master = msgspec.msgpack.Decoder(FromGroupMaster).decode


def pack_frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    writer.write(pack_frame(msgspec.msgpack.encode(message)))


async def read_frame(reader: asyncio.StreamReader, most: int = MOST_BYTES) -> bytes:
    """Raises EOFError or OSError at the end of the connection, ValueError for a frame that is too long."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes, expected at most {most}")
    return await reader.readexactly(length)


async def receive(reader: asyncio.StreamReader, decode: Any, timeout_s: float = SILENT_S) -> Any:
    """The next message. Raises EOFError, OSError, ValueError; TimeoutError when nothing comes in time."""
    return decode(await asyncio.wait_for(read_frame(reader), timeout_s))
