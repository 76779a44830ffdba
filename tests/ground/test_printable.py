"""What clients and files of strangers say reaches a log or a terminal as printable text, in one line."""

from __future__ import annotations

import pytest

from trueline import events
from trueline.cli import app
from trueline.cli._progress import format_event
from trueline.errors import UsageError

HOSTILE = "x\n2026-01-01 00:00:00 INFO server.stopped\r\x1b[2J\x07\x9b31m\u202e\u2028\x85\x7f"


@pytest.mark.parametrize(
    "line",
    [
        events.render("request.failed", {"path": HOSTILE, "why": HOSTILE}),
        events.render("request.failed", {HOSTILE: "a"}),
        format_event("job.failed", {"why": HOSTILE}),
        format_event("unknown.event", {"why": HOSTILE}),
        events.printable(HOSTILE),
    ],
)
def test_a_log_line_is_one_line_whatever_it_tells(line: str) -> None:
    """The class of CVE-2024-0095: forged entries, and sequences that a terminal obeys."""
    assert line.isprintable()
    assert "server.stopped" in line


def test_text_of_several_lines_keeps_them_and_nothing_else_that_is_not_printable() -> None:
    text = "bundle\tx\n  ü 漢 \x1b[31mred\r"
    assert events.printable(text, multiline=True) == "bundle\tx\n  ü 漢 \\x1b[31mred\\r"
    assert events.printable("", multiline=True) == ""


def test_an_error_of_the_command_line_drives_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UsageError(f"no such thing: {HOSTILE}", hint=HOSTILE)

    monkeypatch.setattr(app.trueline, "main", fail)
    assert app.run(["x"]) == 2
    told = capsys.readouterr().err
    assert told.replace("\n", "").isprintable()
