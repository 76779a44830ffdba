"""Modules say what happened; whoever runs them decides how it looks.

An event is a name of the form `noun.verb` and fields. `emit` hands it to every listener of this process
(progress bars, the live page, tests) and to the logger `trueline`, as one line. Nothing is configured here:
the CLI attaches the handler, a library user attaches their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Field = str | int | float | bool | None
Listener = Callable[[str, dict[str, Field]], None]

logger = logging.getLogger("trueline")
_listeners: list[Listener] = []


def render(name: str, fields: dict[str, Field]) -> str:
    """One line for an event.

    >>> render("worker.lost", {"worker": "w1", "held_s": 3.0, "why": "exit code 9"})
    'worker.lost worker=w1 held_s=3 why="exit code 9"'
    """
    return " ".join([name, *(f"{key}={_text(value)}" for key, value in fields.items())])


def _text(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def emit(name: str, /, **fields: Field) -> None:
    """Reports event `name` (`noun.verb`) with `fields` to the listeners and the log."""
    for listener in tuple(_listeners):
        listener(name, fields)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", render(name, fields))


def has_listener() -> bool:
    """Whether anybody hears what is emitted: a listener of this process, or its log."""
    return bool(_listeners) or logger.isEnabledFor(logging.INFO)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener(name, fields)` for every event of this process while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
