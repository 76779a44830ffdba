"""Limits of one connection in bytes and seconds, and what follows from them. Pure; `now` is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
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
    """A request has this long to arrive, plus the time of its bytes at `slowest_bytes_per_s`."""
    slowest_bytes_per_s: int = 16 * 2**10
    write_s: float = 30.0
    """A client that reads nothing of its response for this long is cut off."""
    linger_s: float = 2.0
    """After a refusal in the middle of a request, input is dropped for this long, so that the client reads why."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a connection has been in each state; None: it is not."""

    writing: float | None = None
    lingering: float | None = None
    receiving: float | None = None
    received_bytes: int = 0
    idle: float | None = None


Verdict = Literal["keep", "abort", "close", "refuse"]


def judge(waits: Waits, now: float, limits: HttpLimits) -> Verdict:
    """Whether to keep a connection, close it, abort it, or refuse its half-received request."""
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
