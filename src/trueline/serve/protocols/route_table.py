"""The seam between the router and the paths of a protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trueline.web.messages import Request

if TYPE_CHECKING:
    from trueline.serve.protocols.dispatch import Answer

    Handler = Callable[[Request], Answer]
    """Answers one request, now or later. Raises RequestError, NotFound."""


class RouteTable(Protocol):
    """The paths of one protocol. Each passes `tests/conformance/route_table.py`."""

    def match(self, parts: list[str]) -> Handler | None:
        """The handler for the path whose segments are `parts`; None: the path is not this protocol's."""
        ...
