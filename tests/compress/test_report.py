"""The report shows which candidates no other one beats."""

from __future__ import annotations

from typing import Any

from trueline.compress import report
from trueline.compress.candidate import CompressedCandidate


def row(name: str, loss: float | None, speed: float, size: int, **more: Any) -> CompressedCandidate:
    facts: dict[str, Any] = {"kind": "static", "verdict": "offered", **more}
    return CompressedCandidate(
        name=name, loss=loss, loss_high=loss, vs_fp32={1: speed}, size_bytes=size, memory_bytes=10, **facts
    )


ROWS = [
    row("fast", 0.02, 4.0, 100),
    row("exact", 0.0, 2.0, 100),
    row("slower than fast", 0.02, 3.0, 100),
    row("small", 0.03, 1.0, 50),
    row("the same as fast", 0.02, 4.0, 100),
    row("not judged", None, 9.0, 1, verdict="failed"),
]


def test_the_front_is_what_no_other_candidate_beats_in_loss_speed_and_size() -> None:
    assert report.find_front(ROWS) == {"fast", "exact", "small", "the same as fast"}


def test_table_values_and_page_mark_the_front() -> None:
    lines = report.as_table(ROWS).splitlines()
    at = lines[0].index("front")
    assert {line[:18].strip(): line[at] for line in lines[1:6]}["exact"] == "*"
    assert "slower than fast  offered  " in report.as_table(ROWS)
    assert report.as_facts(ROWS, {})["front"] == ["exact", "fast", "small", "the same as fast"]
    page = report.as_page(ROWS, {"name": "digits", "budget_amount": 0.05})
    assert page.count("stroke-opacity") == 4


FACTS = {"name": "digits", "target": "latency", "metric": "accuracy", "budget": "accuracy=0.05", "budget_amount": 0.05}


def test_the_page_says_what_was_sealed_and_what_it_has_lost() -> None:
    page = report.as_page([*ROWS, row("worst", 0.9, 9.0, 9, why="ruined: worst: <b>")], {**FACTS, "chosen": "fast"})
    assert "Sealed: <b>fast</b>" in page
    assert "+0.0200 lost, 0.0200 at most" in page
    assert page.count("<td>sealed</td>") == 1
    ruined = report.as_page(
        [row("worst", 0.9, 9.0, 9, why="ruined: worst: <b>")], {**FACTS, "budget_amount": None, "chosen": "worst"}
    )
    assert "<p class=bad>ruined: worst: &lt;b&gt;</p>" in ruined
    assert "None" not in ruined


def test_the_page_says_that_nothing_is_sealed_and_why_none_is_faster() -> None:
    page = report.as_page(ROWS, {**FACTS, "chosen": "", "none_is_faster": "a call takes 9 us"})
    assert "Nothing is sealed" in page
    assert page.count("None is faster: a call takes 9 us") == 1
    assert "<td>sealed</td>" not in page


def test_columns_without_text_are_not_on_the_page() -> None:
    page = report.as_page(ROWS, FACTS)
    assert "<th>x fp32</th>" not in page  # no row has times
    assert "<th>size</th>" in page
