"""How many workers a server runs: what is refused, with which numbers, and through which of its doors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from trueline.errors import TruelineError
from trueline.serve.handlers import budget
from trueline.serve.handlers import config as plans
from trueline.serve.handlers.archive import Manifest
from trueline.serve.handlers.budget import WORKER_BYTES, WorkerBudget, workers_of_model
from trueline.serve.models.loader import MAX_LANES
from trueline.serve.models.servable import TooManyWorkers
from worlds import archives, bundles, servers
from worlds.servers import StoreApp

MOST = workers_of_model()
MANIFEST = Manifest(model="noop", handler="noop.py")


def test_workers_are_bounded_by_the_memory_that_those_of_all_models_take() -> None:
    held = WorkerBudget(memory_bytes=10 * WORKER_BYTES)
    held.reserve("a", "a", 4)
    held.reserve("b", "b", 6)
    with pytest.raises(TooManyWorkers, match=r"7 workers of model 'b' take about 224 MiB .* those of other models 128"):
        held.reserve("b", "b", 7)
    with pytest.raises(TooManyWorkers) as refused:
        held.reserve("c", "c", 1)
    assert refused.value.status == 400
    assert "has 320 MiB" in refused.value.message
    assert refused.value.hint.startswith("0 workers are possible now")
    held.reserve("a", "a", 1)
    held.reserve("c", "c", 3)
    held.release("b")
    held.release("b")
    held.reserve("c", "c", 9)


def test_a_worker_counts_with_its_measured_size_and_fewer_are_always_accepted() -> None:
    held = WorkerBudget(memory_bytes=10 * WORKER_BYTES)
    held.reserve("a", "a", 4)
    with pytest.raises(TooManyWorkers, match="5 workers of model 'a' take about 480 MiB"):
        held.reserve("a", "a", 5, 3 * WORKER_BYTES)
    held.reserve("a", "a", 3, 5 * WORKER_BYTES)
    held.reserve("a", "a", 2)
    with pytest.raises(TooManyWorkers):
        held.reserve("a", "a", 3)


def test_processes_beside_each_other_divide_the_memory_and_unknown_memory_is_no_bound() -> None:
    with pytest.raises(TooManyWorkers):
        WorkerBudget(memory_bytes=10 * WORKER_BYTES, processes=4).reserve("a", "a", 3)
    WorkerBudget(memory_bytes=0).reserve("a", "a", MOST)
    with pytest.raises(TooManyWorkers, match=f"{MOST + 1} workers of model 'a' are more than the {MOST} "):
        WorkerBudget(memory_bytes=0).reserve("a", "a", MOST + 1)


def test_a_process_is_measured_without_what_it_shares() -> None:
    assert 2**20 < budget.private_bytes(os.getpid()) < 2**36
    assert budget.private_bytes(2**22 + 1) == 0
    assert budget.largest_bytes(iter([])) == 0


@pytest.mark.parametrize(
    ("config", "given", "named"),
    [
        ({"minWorkers": 10_000}, {}, "10000 workers of model 'noop' (minWorkers of its configuration)"),
        ({"minWorkers": 10_000}, {"initial_workers": "1"}, "10000 workers of model 'noop' (minWorkers"),
        ({"minWorkers": 1, "maxWorkers": 10_000}, {}, "10000 workers of model 'noop' (maxWorkers of"),
        ({}, {"initial_workers": "10000"}, "10000 workers of model 'noop' (initial_workers)"),
        ({}, {"initial_workers": "1" * 30}, "1" * 30 + " workers of model 'noop' (initial_workers)"),
        ({"minWorkers": MOST + 1}, {}, f"{MOST + 1} workers"),
    ],
)
def test_a_number_in_a_configuration_or_a_call_is_refused_by_its_name(
    config: dict[str, Any], given: dict[str, str], named: str
) -> None:
    with pytest.raises(TooManyWorkers) as refused:
        plans.draw_up(MANIFEST, config, given)
    assert named in refused.value.message
    assert f"the {MOST} that one model may have" in refused.value.message


def test_the_bound_itself_is_accepted() -> None:
    assert plans.draw_up(MANIFEST, {"minWorkers": MOST, "maxWorkers": MOST}, {}).workers == MOST


@pytest.mark.parametrize("count", ["33", "10000", "9" * 12, "9" * 400])
def test_workers_of_a_bundle_above_the_bound_are_refused_at_every_door_and_the_old_number_stays(
    tmp_path: Path, count: str
) -> None:
    count = str(MAX_LANES + 1) if count == "33" else count
    bundles.double_plus(tmp_path / "tiny.bundle")
    with StoreApp(tmp_path) as app:
        app.manage("POST", "/models?url=tiny.bundle&model_name=tiny&initial_workers=2")
        doors = [
            ("POST", f"/models?url=tiny.bundle&model_name=more&initial_workers={count}"),
            ("POST", f"/models?url=tiny.bundle&model_name=more&initial_workers={count}&synchronous=false"),
            ("PUT", f"/models/tiny?min_worker={count}&max_worker={count}"),
            ("PUT", f"/models/tiny?min_worker=1&max_worker={count}&synchronous=true"),
            ("PUT", f"/models/tiny/1?min_worker={count}"),
        ]
        for method, path in doors:
            status, said = app.manage(method, path)
            assert (status, said["code"], said["type"]) == (400, 400, "BadRequestException")
            assert said["message"].startswith(f"{count[:100]} workers of model '")
            assert f"more than the {MAX_LANES} " in said["message"]
        assert app.models.names() == ["tiny"]
        assert app.models.find("tiny").policy.lanes == 2


@pytest.mark.parametrize("count", ["-1", "-3", "-99999999999"])
def test_fewer_than_no_workers_are_refused_by_name(tmp_path: Path, count: str) -> None:
    bundles.double_plus(tmp_path / "tiny.bundle")
    with StoreApp(tmp_path) as app:
        status, said = app.manage("POST", f"/models?url=tiny.bundle&model_name=tiny&initial_workers={count}")
        assert (status, said["message"]) == (400, f"initial_workers is 0 or more; got {count}")
        assert app.models.names() == []


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_ten_thousand_workers_of_an_archive_are_refused_and_none_is_started(tmp_path: Path, strict: bool) -> None:
    store = tmp_path / "store"
    store.mkdir()
    archives.mar(store / "noop.mar")
    archives.mar(store / "many.mar", config="minWorkers: 10000", modelName="many")
    usual = json.dumps({"late/1.0": {"maxWorkers": 10_000}})
    with (
        servers.running(
            store=store, load="noop", allow_code=True, management_port=0, torchserve_strict=strict, models=usual
        ) as running,
        httpx.Client(base_url=str(running.management_url), timeout=60) as client,
    ):
        doors = [
            ("POST", "/models?url=noop.mar&model_name=more&initial_workers=10000"),
            ("POST", "/models?url=many.mar&model_name=many&initial_workers=1"),
            ("POST", "/models?url=noop.mar&model_name=late&initial_workers=1"),
            ("PUT", "/models/noop?min_worker=10000&synchronous=true"),
            ("PUT", "/models/noop/1.0?min_worker=1&max_worker=10000"),
        ]
        for method, path in doors:
            found = client.request(method, path)
            assert (found.status_code, found.json()["type"]) == (400, "BadRequestException"), path
            assert found.json()["message"].startswith("10000 workers of model '")
            assert f"the {MOST} that one model may have" in found.json()["message"]
        (told,) = client.get("/models/noop").json()
        assert len(told["workers"]) == 1
        assert [one["modelName"] for one in client.get("/models").json()["models"]] == ["noop"]


@pytest.mark.slow
def test_too_many_workers_in_config_properties_end_the_start_with_the_number(tmp_path: Path) -> None:
    archives.mar(tmp_path / "noop.mar")
    usual = json.dumps({"": {"minWorkers": 10_000}})
    with (
        pytest.raises(TruelineError, match="10000 workers of model 'noop'"),
        servers.running(store=tmp_path, load="noop", allow_code=True, models=usual),
    ):
        pass
