"""Rollouts while clients send requests: an operation either loses none, or is refused and changes nothing."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from worlds import archives, bundles, servers
from worlds.cases import few
from worlds.waiting import until

pytestmark = pytest.mark.slow

ECHO = """
    def handle(data, context):
        return [[3.0, 5.0, 7.0]] * len(data or [])
"""


class Load:
    """Clients that send requests to one model, in both protocols, and count the statuses."""

    def __init__(self, url: str, *, tensors: bool = True) -> None:
        """`tensors`: the model takes them."""
        self.statuses: Counter[int] = Counter()
        self._tensors = tensors
        self._url, self._stop = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]

    def _ask(self, number: int) -> None:
        tensor = {"name": "x", "shape": [8, 3], "datatype": "FP32", "data": [[1, 2, 3]] * 8}
        infer = "/v2/models/pair/infer", json.dumps({"inputs": [tensor]})
        path, body = infer if self._tensors and number % 2 else ("/predictions/pair", json.dumps([[1, 2, 3]] * 8))
        with httpx.Client(base_url=self._url, timeout=100.0) as client:
            while not self._stop.is_set():
                self.statuses[client.post(path, content=body).status_code] += 1

    def wait(self) -> None:
        """Returns when each operation so far has met further requests."""
        before = self.statuses.total()
        until(lambda: self.statuses.total() > before + 20, "further requests")

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            self.wait()
            yield
            self.wait()
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()


@pytest.fixture(params=few(["archives", "bundles"], 1, pytest.mark.jobs))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Two versions of `pair`."""
    if request.param == "bundles":
        return bundles.store(tmp_path, "pair/1", "pair/2")
    for version in ("1", "2"):
        archives.mar(tmp_path / f"pair-{version}.mar", ECHO, modelName="pair", modelVersion=version)
    return tmp_path


@pytest.mark.jobs
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_rollout_in_every_order_of_its_operations_loses_no_request(store: Path, processes: int) -> None:
    """Issue: a rollout without `initial_workers` cost 3,976 requests."""
    first, second = [one.name for one in sorted(store.iterdir()) if one.name.startswith("pair-")] or [
        "pair/1.bundle",
        "pair/2.bundle",
    ]
    with (
        servers.running(
            store=store, load=first, allow_code=True, management_port=0, processes=processes, drain_s=60.0
        ) as running,
        httpx.Client(base_url=str(running.management_url), timeout=100.0) as manager,
    ):

        def act(method: str, path: str, *statuses: int) -> None:
            found = manager.request(method, path)
            assert found.status_code in statuses, (method, path, found.text)
            load.wait()

        def settle(version: str, workers: int) -> None:
            """Returns when all processes have followed."""
            url = f"{running.management_url}/models/pair/{version}"

            def has_followed() -> bool:
                answer = servers.get(url)
                found = answer.json()[0] if answer.status_code == 200 else {"minWorkers": None}
                return found["minWorkers"] == workers == len(found["workers"])

            servers.eventually(lambda: all(has_followed() for _ in range(4)))  # 40 connections reach both

        load = Load(running.url, tensors=first.endswith(".bundle"))
        with load.running():
            for new, old, source in (("2", "1", second), ("1", "2", first), ("2", "1", second)):
                if manager.get(f"/models/pair/{new}").status_code == 404:
                    act("POST", f"/models?url={source}", 200)  # without initial_workers: it has none
                act("PUT", f"/models/pair/{new}?min_worker=0&synchronous=true", 200)
                settle(new, 0)
                act("PUT", f"/models/pair/{new}/set-default", 409)
                act("PUT", f"/models/pair/split?{old}=50&{new}=50", 409)
                act("PUT", f"/models/pair/{new}/canary?weight=50", 409)
                act("DELETE", f"/models/pair/{old}", 403)  # the default
                act("PUT", f"/models/pair/{new}?min_worker=1", 202)
                act("PUT", f"/models/pair/{new}/set-default", 200)  # waits for the worker
                act("PUT", f"/models/pair/{old}?min_worker=0&synchronous=true", 200)
                settle(old, 0)
                act("PUT", f"/models/pair/{old}/set-default", 409)
            act("DELETE", "/models/pair/1", 200)
        assert set(load.statuses) == {200}, load.statuses


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_rollout_by_the_repository_api_loses_no_request_and_an_unload_answers_those_under_way(
    tmp_path: Path, processes: int
) -> None:
    store = bundles.store(tmp_path, "pair/1", "pair/2")
    with servers.running(store=store, load="pair/1.bundle", management_port=0, processes=processes) as running:
        load = Load(running.url)
        repository = f"{running.url}/v2/repository/models/pair"
        with load.running():
            for _ in range(3):
                assert servers.post(f"{repository}/load").status_code == 200
                load.wait()
        assert set(load.statuses) == {200}, load.statuses
        after = Load(running.url)
        with after.running():
            assert servers.post(f"{repository}/unload").status_code == 200
            servers.eventually(lambda: servers.get(f"{running.url}/v2/models/pair").status_code == 404)
        assert set(after.statuses) == {200, 404}, "answered, or said to be gone"


def test_a_default_that_is_scaled_to_nothing_answers_what_it_has_and_says_that_it_is_not_ready(tmp_path: Path) -> None:
    with servers.running(store=bundles.store(tmp_path, "pair/1"), load="all", management_port=0) as running:
        ready = f"{running.url}/v2/health/ready"
        for _ in range(3):
            load = Load(running.url)
            with load.running():
                assert servers.put(f"{running.management_url}/models/pair?min_worker=0").status_code == 202
                assert servers.get(ready).status_code == 503
                load.wait()
                assert servers.put(f"{running.management_url}/models/pair?min_worker=1").status_code == 202
                assert servers.get(ready).status_code == 200
            assert set(load.statuses) == {200, 503}, "no request without an answer"
