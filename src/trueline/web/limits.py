"""What one connection may take: bytes, seconds, and how both are judged. Pure; `now` is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of the HTTP front end."""

    body_bytes: int = 64 * 2**20
    head_bytes: int = 64 * 2**10
    chunks: int = 64 * 2**10
    """Of one body; each costs more than its bytes."""
    connections: int = 2048
    pipelined: int = 32
    """Requests read ahead on one connection before reading pauses."""
    idle_s: float = 75.0
    """A kept-alive connection without a request is closed after this."""
    receive_s: float = 20.0
    """A request has this long to arrive, plus what its bytes take at `slowest_bytes_per_s`."""
    slowest_bytes_per_s: int = 16 * 2**10
    write_s: float = 30.0
    """A client that reads none of its answer for this long is cut off."""
    linger_s: float = 2.0
    """After a refusal in the middle of a request, input is thrown away for this long, so that the client reads why."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a connection waits for what; None: it does not."""

    writing: float | None = None
    lingering: float | None = None
    receiving: float | None = None
    received_bytes: int = 0
    idle: float | None = None


Verdict = Literal["keep", "abort", "close", "refuse"]


def judge(waits: Waits, now: float, limits: HttpLimits) -> Verdict:
    """What to do with a connection at `now`: keep it, close it, abort it, or refuse its half-received request."""
    if waits.writing is not None and now - waits.writing > limits.write_s:
        return "abort"
    if waits.lingering is not None:
        return "close" if now - waits.lingering > limits.linger_s else "keep"
    if waits.receiving is not None:
        allowed_s = limits.receive_s + waits.received_bytes / limits.slowest_bytes_per_s
        return "refuse" if now - waits.receiving > allowed_s else "keep"
    if waits.idle is not None and now - waits.idle > limits.idle_s:
        return "close"
    return "keep"
