"""Counters of the hot path, and who reads them beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trueline.serve.counters import BOUNDS_ROWS, VersionStats
from trueline.serve.models.catalog import Models


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


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_a_scrape_in_its_thread_does_not_stumble_over_models_that_come_and_go() -> None:
    models, names = Models(), [f"model {number}" for number in range(300)]
    with ThreadPoolExecutor(1) as scraping:
        seen = scraping.submit(lambda: {(len(models.all()) > 300, models.ready) for _ in range(5000)})
        while not seen.done():
            for name in names:
                models.add(name, "1")
            for name in names:
                models.remove(name, "1")
        assert seen.result() == {(False, False)}
