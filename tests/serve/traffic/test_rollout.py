"""A new version that does worse loses its traffic by itself; one in the shadow is seen by nobody but its manager."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.errors import RequestError, StorageError
from trueline.serve.batching.policy import Policy
from trueline.serve.counters import BOUNDS_S, Histogram, VersionStats
from trueline.serve.traffic.canary import CanaryRule, CanaryVerdict, Sample, judge, lower_bound, median_s, sample
from worlds import bundles
from worlds.servers import StoreApp


def seen(answered: int, failed: int = 0, seconds: float = 0.001) -> Sample:
    histogram = Histogram(BOUNDS_S)
    for _ in range(answered):
        histogram.add(seconds)
    return Sample(answered=answered, failed=failed, seconds=histogram.cells)


@pytest.mark.parametrize(
    ("base", "canary", "act"),
    [
        (seen(900), seen(100), "watch"),
        (seen(900), seen(99, 1), "watch"),
        (seen(9), seen(0, 1), "watch"),
        (seen(9), seen(0, 2), "roll back"),
        (seen(900), seen(97, 5), "roll back"),
        (seen(800, 100), seen(90, 12), "watch"),
        (seen(900), seen(100, seconds=0.1), "roll back"),
        (seen(900), seen(20, seconds=0.1), "watch"),
        (seen(0), seen(100, seconds=0.1), "watch"),
        (seen(900), seen(200), "promote"),
    ],
)
def test_a_canary_is_judged_by_what_it_did_beside_the_other(base: Sample, canary: Sample, act: str) -> None:
    assert judge(base, canary, CanaryRule(promote_after=200)).act == act


@given(requests=st.integers(1, 300), failed=st.integers(0, 300))
def test_the_bound_lies_below_the_share(requests: int, failed: int) -> None:
    failed = min(failed, requests)
    assert 0 <= lower_bound(failed, requests) <= failed / requests


@given(seconds=st.floats(1e-5, 9.0))
def test_the_median_lies_in_the_cell_of_what_was_seen(seconds: float) -> None:
    found = median_s(seen(11, seconds=seconds))
    cell = Histogram(BOUNDS_S)
    cell.add(seconds)
    other = Histogram(BOUNDS_S)
    other.add(found)
    assert abs(cell.cells.index(1) - other.cells.index(1)) <= 1


class Failing:
    """A session whose program fails on every request from some time on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.format = inner.format
        self.signature = inner.signature
        self.broken = True

    def run(self, inputs: Any) -> Any:
        if self.broken:
            raise RuntimeError("the kernel is gone")
        return self.inner.run(inputs)


@pytest.fixture
def pair_app(tmp_path: Path) -> Iterator[StoreApp]:
    """Two versions of `pair`, both loaded."""
    with StoreApp(bundles.store(tmp_path, "pair/1", "pair/2")) as made:
        for version in ("1", "2"):
            assert made.manage("POST", f"/models?url=pair/{version}.bundle&initial_workers=1")[0] == 200
        yield made


def broken(app: StoreApp, version: str) -> Failing:
    """Breaks a version after it was proven."""
    loaded = app.models.find("pair", version).loaded
    failing = Failing(loaded.session)
    object.__setattr__(loaded, "session", failing)
    return failing


def ask(app: StoreApp, times: int) -> list[int]:
    return [app.ask("POST", "/predictions/pair", b"[1, 2, 3]", x_trueline_key=f"k{i}")[0] for i in range(times)]


def test_a_canary_that_fails_gives_the_traffic_back_before_many_requests_are_lost(pair_app: StoreApp) -> None:
    assert pair_app.manage("PUT", "/models/pair/2/canary?weight=30") == (
        200,
        {"status": 'Version "2" is a canary of model "pair" with 0.3 of its requests'},
    )
    broken(pair_app, "2")
    traffic = pair_app.management._traffic
    lost = 0
    for _ in range(20):
        lost += ask(pair_app, 20).count(503)
        traffic.tick()
    assert 2 <= lost <= 20
    told = pair_app.manage("GET", "/models/pair/traffic")[1]
    assert told["default"] == "1"
    assert told["split"] == {}
    assert told["canary"]["verdict"] == "roll back"
    assert "requests failed" in told["canary"]["why"]
    assert set(ask(pair_app, 50)) == {200}


def test_a_canary_that_does_well_takes_all_the_traffic(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary?weight=50&promote_after=10")
    assert pair_app.manage("PUT", "/models/pair/2/canary")[0] == 409
    assert set(ask(pair_app, 60)) == {200}
    pair_app.management._traffic.tick()
    assert pair_app.models.default("pair") == "2"
    assert pair_app.models.split("pair") is None
    assert pair_app.manage("DELETE", "/models/pair/canary")[0] == 404


def test_a_canary_ends_by_hand_and_when_somebody_sends_the_traffic_elsewhere(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary")
    assert pair_app.manage("DELETE", "/models/pair/canary")[0] == 200
    assert pair_app.models.split("pair") is None
    pair_app.manage("PUT", "/models/pair/2/canary")
    pair_app.manage("PUT", "/models/pair/1/set-default")
    pair_app.management._traffic.tick()
    assert pair_app.manage("GET", "/models/pair/traffic")[1]["canary"]["over"] is True
    assert pair_app.models.default("pair") == "1"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/models/pair/1/canary", 409),
        ("/models/pair/9/canary", 404),
        ("/models/zzz/1/canary", 404),
        ("/models/pair/2/canary?weight=0", 400),
        ("/models/pair/2/canary?weight=100", 400),
        ("/models/pair/2/canary?weight=x", 400),
        ("/models/pair/2/canary?max_error_rate=2", 400),
        ("/models/pair/2/canary?max_latency_ratio=0.5", 400),
        ("/models/pair/2/canary?min_requests=0", 400),
        ("/models/pair/9/shadow", 404),
    ],
)
def test_a_trial_that_makes_no_sense_is_refused(pair_app: StoreApp, path: str, status: int) -> None:
    assert pair_app.manage("PUT", path)[0] == status
    assert pair_app.models.split("pair") is None


def test_a_shadow_is_compared_and_never_answers(pair_app: StoreApp) -> None:
    assert pair_app.manage("PUT", "/models/pair/2/shadow")[0] == 200
    assert set(ask(pair_app, 5)) == {200}
    pair_app.run(settled())
    told = pair_app.manage("GET", "/models/pair/traffic")[1]["shadow"]
    assert (told["asked"], told["agreed"], told["differed"], told["failed"]) == (5, 5, 0, 0)

    failing = broken(pair_app, "2")
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}).encode()
    assert pair_app.ask("POST", "/v2/models/pair/infer", body)[1]["model_version"] == "1"
    pair_app.run(settled())
    failing.broken = False
    inner = failing.inner.run
    failing.inner.run = lambda inputs: {"y": inner(inputs)["y"] + np.float32(0.5)}
    assert set(ask(pair_app, 2)) == {200}
    pair_app.run(settled())
    told = pair_app.manage("GET", "/models/pair/traffic")[1]["shadow"]
    assert (told["asked"], told["agreed"], told["differed"], told["failed"]) == (8, 5, 2, 1)
    assert told["maxAbsError"] == 0.5
    assert "output 'y' differs by 0.5" in told["firstDifference"]
    assert pair_app.manage("DELETE", "/models/pair/shadow")[0] == 200
    assert pair_app.manage("DELETE", "/models/pair/shadow")[0] == 404
    pair_app.manage("PUT", "/models/pair/2/shadow")
    pair_app.manage("DELETE", "/models/pair/2")
    assert pair_app.models.shadows == {}


async def settled() -> None:
    """Returns when what was put off until after the answers has been done."""


@pytest.mark.parametrize(
    ("base", "canary", "act"),
    [
        (seen(50), seen(50, seconds=0.1), "roll back"),
        (seen(50), seen(49, seconds=0.1), "watch"),
        (seen(49), seen(50, seconds=0.1), "watch"),
        (seen(900), seen(199), "watch"),
        (seen(900), seen(199, 1), "promote"),
        (seen(0), seen(200), "promote"),
        (seen(900), seen(198, 2), "promote"),
        (seen(900), seen(0, 2), "roll back"),
        (seen(900), seen(0, 1), "watch"),
        (seen(900), seen(148, 2), "watch"),
        (seen(900), seen(140, 10), "roll back"),
        (seen(900), seen(500, 500), "roll back"),
        (seen(0, 900), seen(0, 900), "promote"),
    ],
)
def test_a_canary_is_judged_from_the_first_request_on_that_the_rule_names(
    base: Sample, canary: Sample, act: str
) -> None:
    assert judge(base, canary, CanaryRule(promote_after=200)).act == act


def test_the_median_may_be_as_many_times_the_others_as_the_rule_says_and_no_more() -> None:
    base, canary = seen(100, seconds=0.001), seen(100, seconds=0.01)
    ratio = median_s(canary) / median_s(base)
    assert judge(base, canary, CanaryRule(max_latency_ratio=1.001 * ratio)).act == "watch"
    assert judge(base, canary, CanaryRule(max_latency_ratio=0.999 * ratio)).act == "roll back"
    assert judge(base, seen(100, seconds=0.0025), CanaryRule()).act == "roll back", "2.5 times, of 2 that are allowed"


def test_failures_count_from_the_beginning_of_the_canary_on_and_beside_those_of_the_other(pair_app: StoreApp) -> None:
    canary, base = (pair_app.models.find("pair", version) for version in ("2", "1"))
    canary.stats.failed, base.stats.failed = 50, 7
    pair_app.manage("PUT", "/models/pair/2/canary?weight=50&promote_after=10")
    traffic = pair_app.management._traffic
    traffic.tick()
    assert pair_app.manage("GET", "/models/pair/traffic")[1]["canary"]["failed"] == 0
    assert pair_app.models.split("pair") is not None
    canary.stats.failed += 5
    traffic.tick()
    told = pair_app.manage("GET", "/models/pair/traffic")[1]["canary"]
    assert (told["requests"], told["failed"], told["verdict"]) == (5, 5, "roll back")


def test_a_canary_gets_the_share_that_was_asked_for_and_the_other_the_rest(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary?weight=10")
    split = pair_app.models.split("pair")
    assert split is not None
    assert {version: round(weight, 6) for version, weight in split.weights.items()} == {"1": 0.9, "2": 0.1}
    keys = [f"user-{number}" for number in range(2000)]
    second = sum(pair_app.models.find("pair", key=key).version == "2" for key in keys)
    assert 150 <= second <= 250


def test_a_canary_is_looked_at_again_and_again_until_it_is_over(
    pair_app: StoreApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(pair_app.loop, "call_later", lambda delay, act: later.append(act))
    pair_app.manage("PUT", "/models/pair/2/canary")
    for _ in range(3):
        assert len(later) == 1
        later.pop()()
    pair_app.manage("DELETE", "/models/pair/canary")
    later.pop()()
    assert later == []
    pair_app.manage("PUT", "/models/pair/2/canary")
    assert len(later) == 1, "a second canary is looked at as the first was"


def test_a_canary_that_is_over_moves_the_traffic_though_the_state_cannot_be_written(
    pair_app: StoreApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary?weight=50&promote_after=1")
    traffic = pair_app.management._traffic

    def full(*_: Any) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(pair_app.fleet, "_keep", full)
    traffic.end_canary("pair")
    assert pair_app.models.split("pair") is None
    assert pair_app.models.default("pair") == "1"


def test_a_canary_whose_version_was_replaced_or_left_out_of_the_split_is_over(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary")
    pair_app.fleet.set_split("pair", {"1": 1})
    pair_app.management._traffic.tick()
    assert pair_app.manage("GET", "/models/pair/traffic")[1]["canary"]["over"] is True
    assert pair_app.models.split("pair") is not None, "a split that was set by hand stays"


@pytest.mark.parametrize(("wait", "asked"), [(2, 1), (3, 0)])
def test_a_shadow_is_left_out_when_its_queue_is_more_than_half_full(
    pair_app: StoreApp, monkeypatch: pytest.MonkeyPatch, wait: int, asked: int
) -> None:
    pair_app.manage("PUT", "/models/pair/2/shadow")
    shadow = pair_app.models.shadows["pair"]
    monkeypatch.setattr(type(shadow.version), "num_waiting", property(lambda _: wait))
    monkeypatch.setattr(type(shadow.version), "policy", property(lambda _: Policy(max_requests=4)))
    x = {"x": np.array([[1, 2, 3]], np.float32)}
    shadow.show(x, {"y": np.array([[3, 5, 7]], np.float32)})
    assert (shadow.asked, shadow.left_out, shadow.agreed) == (asked, 1 - asked, asked)


def test_a_shadow_that_fails_in_any_way_is_counted_and_raises_nothing(
    pair_app: StoreApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_app.manage("PUT", "/models/pair/2/shadow")
    shadow = pair_app.models.shadows["pair"]

    def broken_ask(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(shadow.version), "ask", broken_ask)
    shadow.show({"x": np.array([[1, 2, 3]], np.float32)}, {})
    assert (shadow.asked, shadow.failed) == (1, 1)


def test_a_shadow_that_answers_what_it_shadows_is_not_asked_again(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/1/shadow")
    assert set(ask(pair_app, 3)) == {200}
    pair_app.run(settled())
    assert pair_app.models.shadows["pair"].asked == 0


def cells(**counts: int) -> list[int]:
    """Requests by the histogram's cells, of which `c3` is the fourth."""
    return [counts.get(f"c{number}", 0) for number in range(len(BOUNDS_S) + 1)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], 0.0),
        (cells(), 0.0),
        (cells(c0=1), 2.5e-5),
        (cells(c0=4), 2.5e-5),
        (cells(c0=2, c1=2), 5e-5),
        (cells(c0=1, c1=3), 5e-5 + 5e-5 / 3),
        (cells(c0=1, c2=4), 1e-4 + 1.5e-4 * 1.5 / 4),
        (cells(c4=10, c12=3), 5e-4 + 5e-4 * 6.5 / 10),
        (cells(c16=1), 7.5),
        (cells(c17=1), 15.0),
        (cells(c0=1, c17=5), 10.0 + 10.0 * 2 / 5),
    ],
)
def test_the_median_lies_in_its_cell_in_proportion(found: list[int], expected: float) -> None:
    assert median_s(Sample(answered=sum(found), failed=3, seconds=found)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("failed", "requests", "bound"),
    [
        (0, 0, 0.0),
        (0, 50, 0.0),
        (1, 1, 0.206543291474),
        (2, 2, 0.342371952890),
        (1, 3, 0.061490315276),
        (3, 10, 0.107789287486),
        (1, 100, 0.001767386566),
        (50, 100, 0.403829828590),
        (300, 300, 0.987356570002),
    ],
)
def test_the_bound_is_the_lower_end_of_wilsons_interval(failed: int, requests: int, bound: float) -> None:
    assert lower_bound(failed, requests) == pytest.approx(bound, abs=1e-11)


def test_a_rule_takes_every_value_up_to_its_bounds() -> None:
    usual = CanaryRule()
    assert (usual.max_error_rate, usual.max_latency_ratio) == (0.01, 2.0)
    assert (usual.min_requests, usual.promote_after) == (50, 0)
    edge = CanaryRule(max_error_rate=0.0, max_latency_ratio=1.0, min_requests=1, promote_after=0)
    assert (edge.max_error_rate, edge.max_latency_ratio, edge.min_requests, edge.promote_after) == (0.0, 1.0, 1, 0)
    assert CanaryRule(max_error_rate=0.999).max_error_rate == 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_error_rate": -0.001}, "max_error_rate is from 0 up to 1"),
        ({"max_error_rate": 1.0}, "got 1 and 2"),
        ({"max_latency_ratio": 0.999}, "got 0.01 and 0.999"),
        ({"max_latency_ratio": float("nan")}, "got 0.01 and nan"),
        ({"min_requests": 0}, "min_requests is at least 1 and promote_after at least 0; got 0 and 0"),
        ({"promote_after": -1}, "got 50 and -1"),
    ],
)
def test_a_rule_refuses_every_value_beyond_its_bounds(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CanaryRule(**change)


ALLOWED = lower_bound(5, 50)


@pytest.mark.parametrize(
    ("base", "canary", "rule", "verdict"),
    [
        (seen(90), seen(10), CanaryRule(), CanaryVerdict("watch")),
        (seen(90, 10), seen(88, 12), CanaryRule(), CanaryVerdict("watch")),
        (
            seen(90, 10),
            seen(50, 50),
            CanaryRule(),
            CanaryVerdict("roll back", "50 of 100 requests failed; 0.11 of them would be allowed"),
        ),
        (
            seen(0),
            seen(0, 2),
            CanaryRule(max_error_rate=0.02),
            CanaryVerdict("roll back", "2 of 2 requests failed; 0.02 of them would be allowed"),
        ),
        (seen(0), seen(0, 1), CanaryRule(max_error_rate=0.02), CanaryVerdict("watch")),
        (seen(0), seen(45, 5), CanaryRule(max_error_rate=ALLOWED), CanaryVerdict("watch")),
        (
            seen(0),
            seen(45, 5),
            CanaryRule(max_error_rate=0.99 * ALLOWED),
            CanaryVerdict("roll back", "5 of 50 requests failed; 0.043 of them would be allowed"),
        ),
        (seen(60), seen(60), CanaryRule(max_latency_ratio=1.0), CanaryVerdict("watch")),
        (
            seen(60, seconds=0.001),
            seen(60, seconds=0.01),
            CanaryRule(),
            CanaryVerdict(
                "roll back", "its median is 7.5 ms, the other version's 0.75 ms; 2 times that would be allowed"
            ),
        ),
        (seen(60, seconds=0.001), seen(60, seconds=0.005), CanaryRule(max_latency_ratio=5.1), CanaryVerdict("watch")),
        (seen(60), seen(99), CanaryRule(promote_after=100), CanaryVerdict("watch")),
        (seen(60), seen(100), CanaryRule(promote_after=100), CanaryVerdict("promote", "100 requests, 0 failed")),
        (seen(60), seen(99, 1), CanaryRule(promote_after=100), CanaryVerdict("promote", "100 requests, 1 failed")),
        (seen(60), seen(1), CanaryRule(promote_after=1), CanaryVerdict("promote", "1 requests, 0 failed")),
        (seen(0), seen(0), CanaryRule(), CanaryVerdict("watch")),
    ],
)
def test_a_verdict_says_what_to_do_and_why(
    base: Sample, canary: Sample, rule: CanaryRule, verdict: CanaryVerdict
) -> None:
    assert judge(base, canary, rule) == verdict


def test_what_a_version_did_is_counted_from_its_beginning_or_since_an_earlier_look() -> None:
    stats = VersionStats()
    stats.failed = 3
    stats.request_s.add(0.001, 5)
    first = sample(stats)
    assert first == Sample(answered=5, failed=3, seconds=cells(c4=5))
    assert first.requests == 8
    stats.failed = 10
    stats.request_s.add(0.001, 2)
    stats.request_s.add(20.0, 4)
    assert first.seconds == cells(c4=5), "a sample stays as it was taken"
    assert sample(stats) == Sample(answered=11, failed=10, seconds=cells(c4=7, c17=4))
    since = sample(stats, first)
    assert since == Sample(answered=6, failed=7, seconds=cells(c4=2, c17=4))
    assert since.requests == 13


# versions that lose their workers


def test_a_canary_is_not_rolled_back_onto_a_version_that_has_lost_its_workers(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary?weight=50")
    pair_app.manage("PUT", "/models/pair/1?min_worker=0&max_worker=0")
    status, said = pair_app.manage("DELETE", "/models/pair/canary")
    assert (status, said["type"]) == (409, "ConflictStatusException")
    assert "/models/pair/2/set-default" in said["message"]
    traffic = pair_app.management._traffic
    traffic._end(traffic._canaries["pair"], CanaryVerdict("roll back", "it was slow"))
    assert pair_app.models.default("pair") == "2"
    assert set(ask(pair_app, 50)) == {200}


def test_a_canary_that_has_lost_its_workers_is_not_promoted(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/2/canary?weight=50&promote_after=10")
    ask(pair_app, 60)
    pair_app.manage("PUT", "/models/pair/2?min_worker=0&max_worker=0")
    pair_app.management._traffic.tick()
    assert pair_app.models.default("pair") == "1"
    assert set(ask(pair_app, 50)) == {200}


def test_a_version_whose_requests_would_go_to_one_without_workers_is_not_unregistered(pair_app: StoreApp) -> None:
    pair_app.manage("PUT", "/models/pair/split?1=0&2=100")
    pair_app.manage("PUT", "/models/pair/1?min_worker=0&max_worker=0")
    assert set(ask(pair_app, 50)) == {200}
    status, said = pair_app.manage("DELETE", "/models/pair/2")
    assert (status, said["type"]) == (409, "ConflictStatusException")
    assert "PUT /models/pair/1?min_worker=1" in said["message"]
    assert set(ask(pair_app, 50)) == {200}
    pair_app.manage("PUT", "/models/pair/1?min_worker=1")
    assert pair_app.manage("DELETE", "/models/pair/2")[0] == 200
    assert set(ask(pair_app, 50)) == {200}
