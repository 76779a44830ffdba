"""Modules emit events; listeners and log handlers decide how they look.

An event is a name of the form `noun.verb` and fields. `emit` passes it to every listener of this process (progress
bars, the live page, tests) and to the logger `trueline`, as one line. The CLI, or the user of the library, attaches the
log handler.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trueline.errors import redact_urls

Field = str | int | float | bool | None
Listener = Callable[[str, dict[str, Field]], None]

logger = logging.getLogger("trueline")
_listeners: list[Listener] = []


def printable(text: str, *, multiline: bool = False) -> str:
    """`text` with everything that is not printable escaped, so that it neither ends a line of the log nor controls a
    terminal (control characters, C1 and the marks that reverse text included); `multiline` keeps line ends and tabs.

    Names, reasons and values may come from clients and from files of strangers. Sources: CWE-117, CWE-150,
    CVE-2024-0095.

    >>> printable("x\\n\\x1b[2J")
    'x\\\\n\\\\x1b[2J'
    """
    if multiline:
        return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def render(name: str, fields: dict[str, Field]) -> str:
    """One line for an event.

    >>> render("worker.lost", {"worker": "w1", "held_s": 3.0, "why": "exit code 9"})
    'worker.lost worker=w1 held_s=3 why="exit code 9"'
    """
    return printable(" ".join([name, *(f"{key}={_text(value)}" for key, value in fields.items())]))


def _text(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def emit(name: str, /, **fields: Field) -> None:
    """Reports event `name` (`noun.verb`) with `fields` to the listeners and the log, without credentials of URLs."""
    for key, value in fields.items():
        if isinstance(value, str) and "://" in value:
            fields[key] = redact_urls(value)
    for listener in tuple(_listeners):
        listener(name, fields)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", render(name, fields))


def has_listener() -> bool:
    """Whether events have a listener in this process, or its log is on."""
    return bool(_listeners) or logger.isEnabledFor(logging.INFO)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener(name, fields)` for every event of this process while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
