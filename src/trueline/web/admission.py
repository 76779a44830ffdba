"""Which connections a server takes, and which it closes for them, so that one client does not shut out others.

With all connections in use, those that wait for nothing give way: HTTP lets a server close an idle connection at any
time (RFC 9112, section 9.5). With none of these, only vital requests, such as health checks, are answered.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Collection
from typing import Generic, Literal, Protocol, TypeVar

from trueline.web.messages import Answer, App, Request, Response, date_line
from trueline.web.origin import PageRule
from trueline.web.parser import HttpLimits

STALLED_S = 1.0
"""A transfer without a byte for this long may be ended when memory is short."""
Admission = Literal["whole", "vital", "none"]
"""What a new connection may ask for."""


class Peer(Protocol):
    """A connection, as far as it matters here."""

    client: str
    """Its address."""

    @property
    def spare_since(self) -> float | None:
        """Since when it has no request, or only the beginning of a head; None: it has a request."""
        ...

    @property
    def stalls_since(self) -> float | None:
        """When the last bytes came, if it holds the beginning of a long body."""
        ...

    def close(self) -> None: ...

    def refuse(self, status: int, message: str) -> None:
        """Refuses the request that it receives."""
        ...


P = TypeVar("P", bound=Peer)


def admit(peers: Collection[P], new: P, limits: HttpLimits) -> tuple[list[P], Admission]:
    """Which of `peers` to close, and what `new`, one of them, may ask for.

    Those that give way have had no request the longest, and belong to the client with the most connections.
    """
    above = len(peers) - limits.connections
    if above <= 0:
        return [], "whole"
    spare = [(since, other) for other in peers if other is not new and (since := other.spare_since) is not None]
    if not spare:
        return [], "vital" if above <= limits.spare else "none"
    heaviest = Counter(other.client for other in peers).most_common(1)[0][0]
    own = [one for one in spare if one[1].client == heaviest] or spare
    num = max(above, limits.connections // 32)  # looking through all of them is not worth it for one
    return [other for _, other in heapq.nsmallest(num, own, key=lambda one: one[0])], "whole"


def find_stalled(peers: Collection[P], now: float) -> P | None:
    """The connection whose long body has not grown for the longest time."""
    stalled = [(since, other) for other in peers if (since := other.stalls_since) is not None]
    since, peer = min(stalled, key=lambda one: one[0], default=(now, None))
    return peer if now - since > STALLED_S else None


class VitalOnly:
    """The App of connections beyond the limit: answers what is vital, and refuses the rest."""

    def __init__(self, app: App, limits: HttpLimits, is_vital: Callable[[str], bool]) -> None:
        self._app, self._limits, self._is_vital = app, limits, is_vital

    def answer(self, request: Request) -> Answer:
        if self._is_vital(request.path):
            return self._app.answer(request)
        response = self._app.refuse(request.path, 503, explain_full(self._limits))
        response.close = True
        return response

    def refuse(self, path: str, status: int, message: str) -> Response:
        return self._app.refuse(path, status, message)


def explain_full(limits: HttpLimits) -> str:
    return f"all {limits.connections} connections of this server are in use; try again later"


class Shared(Generic[P]):
    """What the connections of one server share: its App, its limits, and each other."""

    def __init__(
        self,
        app: App,
        limits: HttpLimits,
        loop: asyncio.AbstractEventLoop,
        is_vital: Callable[[str], bool],
        pages: PageRule | None,
    ) -> None:
        self.pages = pages
        self.app = app
        self.limits = limits
        self.loop = loop
        self.draining = False
        """Whether every response is the last of its connection."""
        self.date = date_line()
        """The Date header line of this second."""
        self.buffered = 0
        """Bytes of long bodies, of all connections."""
        self.vital = VitalOnly(app, limits, is_vital)
        """The App of connections beyond the limit."""
        self.connections: set[P] = set()
        self.empty = asyncio.Event()
        self.empty.set()

    def admit(self, connection: P) -> Admission:
        """Counts the connection; with too many, closes some that have been idle the longest."""
        self.connections.add(connection)
        self.empty.clear()
        evicted, admission = admit(self.connections, connection, self.limits)
        for other in evicted:
            other.close()
            self.connections.discard(other)
        return admission

    def find_room(self, asking: P) -> bool:
        """Whether `asking` may keep the long body that it receives; ends transfers that make no progress if need be."""
        while self.buffered > self.limits.buffered_bytes:
            stalled = find_stalled(self.connections, self.loop.time())
            if stalled is None or stalled is asking:
                return False
            stalled.refuse(503, "the server has too many long bodies that do not arrive; send it again")
        return True

    def forget(self, connection: P) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self.empty.set()
