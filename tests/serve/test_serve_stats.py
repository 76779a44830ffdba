"""Counters of the hot path."""

from __future__ import annotations

from trueline.serve.stats import BOUNDS_ROWS, VersionStats


def test_rows_of_all_runs_and_runs_by_rows_follow_from_what_is_counted() -> None:
    stats = VersionStats()
    for requests, rows in ((1, 1), (1, 1), (3, 5), (2, 1000)):
        stats.count_run(requests, rows, 0.5, 0.25)
    assert stats.rows == 1007
    assert stats.batch_rows.total == 1007
    assert stats.batch_rows.count == 4
    cells = dict(zip((*BOUNDS_ROWS, None), stats.batch_rows.cells, strict=True))
    assert (cells[1.0], cells[8.0], cells[None]) == (2, 1, 1)
    assert (stats.infer_s, stats.queue_s) == (0.5 * 7, 1.0)
