"""Exit codes of a worker, and the report of the error that ends it."""

import traceback
from pathlib import Path

from trueline.errors import TruelineError

UNREACHABLE_EXIT = 75  # the network failed, for this process alone
LOST_EXIT = 77  # the device or a reader of this process failed, and with it this process alone

MOST_CHARS = 600
"""Of the message of a user's or a library's error."""


def describe(error: Exception, code: str) -> tuple[str, str, str]:
    """Code, message and hint; an error of other code gets `code`, and the user's line as its hint."""
    if isinstance(error, TruelineError):
        return error.code, error.message, error.hint
    return code, f"{type(error).__name__}: {_shorten(str(error))}", locate(error)


def _shorten(message: str) -> str:
    """Its first paragraph: below it torch lists every kernel that it has."""
    first = message.strip().partition("\n\n")[0]
    return first if len(first) <= MOST_CHARS else f"{first[:MOST_CHARS]}…"


def locate(error: Exception) -> str:
    """The user's line that raised: the innermost frame outside of Trueline and of installed libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[2])
    users = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith(ours)]
    frame = users[-1] if users else frames[-1]
    return f"at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}; the worker's log has the whole traceback"
