"""Progress of a job in a notebook: a bar and one line that change, with the link of the job's page while it runs.

The bar is HTML's own, so that it needs no ipywidgets and stays in the notebook's file; elsewhere the line is text.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from html import escape
from typing import Any

from trueline import events

EVERY_S = 0.5
_SHOWN = {"view.published": "{workers} workers ({why})", "worker.killed": "killed {worker}", "job.halting": "{why}"}


def is_kernel() -> bool:
    """Whether this process runs the cells of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


class ProgressLine:
    """A listener of events; `show` gets plain text and HTML."""

    def __init__(self, show: Any) -> None:
        self._show, self._shown_at = show, 0.0
        self._text = self._note = self._page = self._bar = ""

    def __call__(self, name: str, fields: dict[str, events.Field]) -> None:
        if name == "page.opened":
            self._page = str(fields["url"])
        elif name == "step.applied":
            step, total = int(fields["step"] or 0) + 1, int(fields["total"] or 0)
            self._bar = f'<progress value="{step}" max="{total}"></progress> '
            self._text = f"step {step}/{total}, loss {float(fields['loss'] or 0):.4g}"
        elif name in _SHOWN:
            self._note = _SHOWN[name].format_map(fields)
        else:
            return
        if name != "step.applied" or time.monotonic() > self._shown_at + EVERY_S:
            self.show()

    def show(self, *, ended: bool = False) -> None:
        """Shows the newest line; after the end without the link, whose token the notebook's file would keep."""
        self._shown_at = time.monotonic()
        text = "; ".join(filter(None, (self._text, self._note)))
        link = "" if ended or not self._page else f' <a href="{escape(self._page)}" target="_blank">page of the job</a>'
        self._show(text, f"{self._bar}<code>{escape(text)}</code>{link}")


@contextmanager
def _show_progress() -> Iterator[None]:
    display: Any = importlib.import_module("IPython.display").display
    handle = display({"text/plain": "the job starts"}, raw=True, display_id=True)
    line = ProgressLine(lambda text, html: handle.update({"text/plain": text, "text/html": html}, raw=True))
    try:
        with events.listening(line):
            yield
    finally:
        line.show(ended=True)


def progress() -> Any:
    """Shows the events of a job in a notebook while the block runs; elsewhere nothing."""
    return _show_progress() if is_kernel() else nullcontext()
