"""Lines of a job's events that depend on what came before."""

from __future__ import annotations

from trueline.cli._progress import EventText


def test_a_death_beside_parameter_servers_is_a_line_since_no_view_tells_of_it() -> None:
    text = EventText()
    lost = {"worker": "worker-1.0", "why": "killed by SIGKILL"}
    assert text.format("worker.lost", lost) is None  # the next view tells of it
    text.format("worker.started", {"worker": "server-0.0"})
    assert text.format("worker.lost", lost) == "  worker-1.0 is lost: killed by SIGKILL; another one takes its place"
