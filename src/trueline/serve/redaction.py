"""Why something failed, in words for clients: they name no path of this machine."""

from __future__ import annotations

import re

from trueline import events
from trueline.errors import TruelineError

_PATHS = re.compile(r"(?:/[\w.+-]+){2,}(?::\d+)?:?\s*")


def public_reason(error: TruelineError) -> str:
    """Why a version failed, in words that name no path."""
    if error.code in ("not_proven", "archive"):
        return error.message
    events.emit("version.refused", code=error.code, why=error.message)
    return f"the bundle was refused ({error.code}); the server's log says why"


def without_paths(message: str) -> str:
    """`message` with file names taken out: runtimes put lines of their own sources into messages.

    >>> without_paths("the program refuses these values: /src/core/gather.cc:45 index 9 is out of bounds")
    'the program refuses these values: index 9 is out of bounds'
    """
    return _PATHS.sub("", message)
