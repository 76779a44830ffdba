"""Forms that other servers' clients rely on, field by field: what TorchServe's and Triton's pages list is all there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from worlds import bundles
from worlds.servers import StoreApp

DESCRIBED = """modelName modelVersion modelUrl runtime minWorkers maxWorkers batchSize maxBatchDelay responseTimeout
startupTimeout maxRetryTimeoutInSec clientTimeoutInMills parallelType parallelLevel deviceType continuousBatching
useJobTicket useVenv stateful sequenceMaxIdleMSec sequenceTimeoutMSec maxNumSequence maxSequenceJobQueueSize
loadedAtStartup workers jobQueueStatus"""
WORKER = "id startTime status memoryUsage pid gpu gpuUsage"
TIMES = "success fail queue compute_input compute_infer compute_output cache_hit cache_miss"


@pytest.fixture(scope="module")
def asked_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreApp]:
    """One that serves `tiny`, and was asked once."""
    with StoreApp(bundles.store(tmp_path_factory.mktemp("store"), "tiny", max_rows=8)) as made:
        assert made.manage("POST", "/models?url=tiny.bundle&initial_workers=1")[0] == 200
        assert made.ask("POST", "/predictions/tiny", b"[1, 2, 3]")[0] == 200
        yield made


def test_a_description_has_every_field_of_torchserves_and_none_beside(asked_app: StoreApp) -> None:
    status, (told,) = asked_app.manage("GET", "/models/tiny")
    assert status == 200
    assert list(told) == DESCRIBED.split()
    (worker,) = told["workers"]
    assert list(worker) == WORKER.split()
    assert worker["status"] == "READY"
    assert list(told["jobQueueStatus"]) == ["remainingCapacity", "pendingRequests"]
    assert asked_app.manage("GET", "/models/tiny/all")[1] == asked_app.manage("GET", "/models/tiny/1")[1] == [told]
    assert asked_app.manage("GET", "/v1/models/tiny")[1] == {"name": "tiny", "ready": True}


def test_the_metadata_of_the_server_name_every_extension_that_it_speaks(asked_app: StoreApp) -> None:
    told = asked_app.ask("GET", "/v2")[1]
    assert told["name"] == "trueline"
    spoken = {"binary_tensor_data", "model_repository", "model_configuration", "statistics", "schedule_policy"}
    assert {*spoken, "parameters"} <= set(told["extensions"])


def test_statistics_have_every_time_that_tritons_have(asked_app: StoreApp) -> None:
    (told,) = asked_app.ask("GET", "/v2/models/tiny/stats")[1]["model_stats"]
    assert (told["name"], told["version"]) == ("tiny", "1")
    assert {"last_inference", "inference_count", "execution_count", "batch_stats", "memory_usage"} <= told.keys()
    assert set(told["inference_stats"]) == set(TIMES.split())
    assert all(set(one) == {"count", "ns"} for one in told["inference_stats"].values())


@pytest.mark.parametrize(
    ("given", "listed"), [("limit=1000", 100), ("limit=-1", 100), ("limit=x&next_page_token=y", 3)]
)
def test_numbers_of_a_list_that_are_none_or_too_large_are_the_usual_ones(
    tmp_path: Path, given: str, listed: int
) -> None:
    app = StoreApp(tmp_path)
    for number in range(listed if listed == 3 else 101):
        app.models.add(f"m{number:03}", "1")
    told = app.manage("GET", f"/models?{given}")[1]
    assert len(told["models"]) == listed
    assert ("nextPageToken" in told) == (listed == 100)
    app.close()


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"rows": []}'])
def test_what_is_no_request_of_kserves_first_protocol_is_said_in_its_words(asked_app: StoreApp, body: bytes) -> None:
    status, said = asked_app.ask("POST", "/v1/models/tiny:predict", body)
    assert status == 400
    assert said["error"].startswith("Unrecognized request format: ")


def test_a_coding_that_nobody_here_opens_is_refused_with_those_that_are(asked_app: StoreApp) -> None:
    status, said = asked_app.ask("POST", "/v2/models/tiny/infer", b"{}", content_encoding="br")
    assert status == 415
    assert "gzip" in said["error"]


def test_an_unload_may_say_what_becomes_of_what_depends_on_the_model(tmp_path: Path) -> None:
    bundles.double_plus(tmp_path / "tiny.bundle")
    app = StoreApp(tmp_path)
    app.manage("POST", "/models?url=tiny.bundle&initial_workers=1")
    given = b'{"parameters": {"unload_dependents": true}}'
    assert app.ask("POST", "/v2/repository/models/tiny/unload", given) == (200, None)
    assert app.ask("GET", "/v2/models/tiny")[0] == 404
    app.close()
