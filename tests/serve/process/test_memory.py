"""Memory that a large request left goes back to the system, and never while runs as large still come."""

from __future__ import annotations

import itertools
from pathlib import Path

import psutil
import pytest

from trueline.serve.process.memory import PAUSE_S, QUIET_S, WORTH_BYTES, MemoryHistory
from worlds import bundles, servers
from worlds.waiting import until

LOW = 100 * 2**20
HIGH = LOW + WORTH_BYTES + 1


def test_memory_is_given_back_once_no_large_run_came_for_a_while() -> None:
    history = MemoryHistory()
    assert not history.is_due(10.0, LOW, 0.0)
    assert not history.is_due(10.1, HIGH, 10.0)
    assert not history.is_due(10.2, HIGH, 10.1)  # large runs still come
    assert history.is_due(10.1 + QUIET_S, HIGH, 10.1)


def test_what_is_in_use_is_tried_ever_less_often_until_the_next_large_run() -> None:
    history = MemoryHistory()
    history.is_due(0.0, LOW, 0.0)
    times = []
    for now in range(10, 1000):
        if history.is_due(float(now), HIGH, 1.0):
            times.append(now)
            history.note_given_back(float(now), 0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:3] == [2, 4, 8]
    assert max(gaps) == PAUSE_S[1]
    history.is_due(1000.0, HIGH, 1000.0)
    assert history.is_due(1001.0, HIGH, 1000.0)


def test_small_growth_is_left_alone() -> None:
    history = MemoryHistory()
    history.is_due(0.0, LOW, 0.0)
    assert not history.is_due(100.0, LOW + WORTH_BYTES, 0.0)


@pytest.mark.slow
@pytest.mark.long
def test_a_server_keeps_little_of_its_largest_request(tmp_path: Path) -> None:
    with servers.running(bundles.double_plus(tmp_path / "b").path) as server:
        process = psutil.Process(server.pid)
        url, row = server.url + "/v2/models/tiny/infer", b"0,0,0,"
        body = b'{"inputs":[{"name":"x","shape":[%d,3],"datatype":"FP32","data":[%b]}]}'
        assert servers.post(url, content=body % (1, (row * 1)[:-1])).status_code == 200
        before = process.memory_info().rss
        assert servers.post(url, content=body % (1_000_000, (row * 1_000_000)[:-1])).status_code == 200
        until(lambda: process.memory_info().rss - before < 100 * 2**20, "the memory of the request is given back")
