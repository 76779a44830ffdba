"""Model archives behind a real server: TorchServe's clients see what they saw. Plain Python handlers, no torch."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from trueline import serve
from trueline.errors import TruelineError
from trueline.serve import RunningServer
from worlds import archives, servers

pytestmark = pytest.mark.slow

ECHO = """
    import os
    from ts.protocol.otf_message_handler import send_intermediate_predict_response

    def handle(data, context):
        if data is None:
            return None
        context.metrics.add_counter("echoed", len(data))
        answers = []
        for index, row in enumerate(data):
            if row.get("act") == b"exit":
                os._exit(3)
            if row.get("act") == b"pieces":
                send_intermediate_predict_response([b"one "], context.request_ids, "", 200, context)
                return [b"two"]
            context.set_response_header(index, "x-seen", context.get_request_header(index, "url_path") or "none")
            answers.append({
                "names": sorted(row),
                "body": row["body"] if isinstance(row.get("body"), dict) else None,
                "explain": context.get_request_header(index, "explain"),
                "token": context.get_request_header(index, "authorization"),
            })
        return answers
"""


@pytest.fixture(scope="module")
def archive_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("store")
    archives.mar(store / "echo.mar", ECHO, modelName="echo", config="minWorkers: 1\nresponseTimeout: 30")
    archives.mar(store / "second.mar", archives.DOUBLE, modelName="double", modelVersion="2.0")
    archives.mar(store / "broken.mar", "import no_such_module", modelName="broken")
    state = store / "state.json"
    with servers.running(store=store, load="echo", management_port=0, allow_code=True, state=state) as server:
        yield server


@pytest.mark.jobs
def test_predictions_and_explanations_are_answered_by_the_archives_own_handler(archive_server: RunningServer) -> None:
    with httpx.Client(base_url=archive_server.url, timeout=60) as client:
        answer = client.post("/predictions/echo", json={"x": 1}, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert answer.json() == {"names": ["body"], "body": {"x": 1}, "explain": "False", "token": None}
        assert "content-type" not in answer.headers
        assert answer.headers["x-seen"] == "none"
        assert answer.text.startswith('{\n  "names"'), "TorchServe indents by two"
        assert answer.headers["x-request-id"]
        form = client.put("/predictions/echo/1.0/extra/path", files={"data": b"\xff\xd8"}, data={"target": "1"})
        assert form.json()["names"] == ["data", "target"]
        assert form.headers["x-seen"] == "extra/path"
        for path in ("/explanations/echo", "/v1/models/echo:explain", "/v2/models/echo/explain"):
            assert client.post(path, json={}).json()["explain"] == "True"
        assert client.post("/v2/models/nope/explain", json={}).status_code == 404
        with client.stream("POST", "/predictions/echo", data={"act": "pieces"}) as pieces:
            assert pieces.headers["transfer-encoding"] == "chunked"
            assert pieces.headers["ts_stream_next"] == "true"
            assert b"".join(pieces.iter_raw()) == b"one two"
        assert client.post("/v1/models/echo:predict", json={"x": 2}).json()["body"] == {"x": 2}
        assert client.get("/v2/models/echo").json()["platform"] == "torchserve_archive"
        assert "/explanations/echo" in client.get("/openapi.json").json()["paths"]
        assert re.search(r'echoed\{Hostname="[^"]+",Level="Model",ModelName="echo"', client.get("/metrics").text)
        assert client.get("/ping").json() == {"status": "Healthy"}
        assert client.post("/predictions/nope").json() == {
            "code": 404,
            "type": "ModelNotFoundException",
            "message": "Model not found: nope",
        }


def test_a_worker_that_dies_under_a_request_is_said_at_once_and_the_next_is_answered(
    archive_server: RunningServer,
) -> None:
    with httpx.Client(base_url=archive_server.url, timeout=60) as client:
        dead = client.post("/predictions/echo", data={"act": "exit"})
        assert (dead.status_code, dead.json()["message"]) == (503, "Worker died.")
        assert dead.json()["type"] == "InternalServerException"
        assert client.post("/predictions/echo", json={"x": 1}).status_code == 200


def test_a_handlers_process_gains_no_privileges_and_leaves_no_core(archive_server: RunningServer) -> None:
    (facts,) = servers.get(f"{archive_server.management_url}/models/echo").json()
    process = Path(f"/proc/{facts['workers'][0]['pid']}")
    assert "NoNewPrivs:\t1\n" in (process / "status").read_text()
    assert re.search(r"Max core file size +0 +0 ", (process / "limits").read_text())


def test_archives_are_registered_scaled_described_and_unregistered_in_torchserves_words(
    archive_server: RunningServer,
) -> None:
    assert archive_server.management_url is not None
    with (
        httpx.Client(base_url=archive_server.management_url, timeout=120) as management,
        httpx.Client(base_url=archive_server.url, timeout=60) as client,
    ):
        told = management.post("/models", params={"url": "second.mar"})
        assert told.json()["status"] == (
            'Model "double" Version: 2.0 registered with 0 initial workers. '
            "Use scale workers API to add workers for the model."
        )
        idle = client.post("/predictions/double", json={"x": 4})
        assert idle.status_code == 503
        assert idle.json()["message"].startswith('Model "double" has no worker to serve inference request.')
        (silent,) = management.get("/models/double", params={"customized": "true"}).json()
        assert (silent["modelVersion"], "customizedMetadata" in silent) == ("2.0", False)
        scaled = management.put("/models/double", params={"min_worker": 1, "synchronous": "true"})
        assert scaled.json()["status"] == "Workers scaled to 1 for model: double"
        assert client.post("/predictions/double", json={"x": 4}).json() == {"doubled": 8}
        facts = management.get("/models/double").json()[0]
        assert (facts["runtime"], facts["minWorkers"], facts["batchSize"]) == ("python", 1, 1)
        assert facts["workers"][0]["pid"] != archive_server.pid
        assert facts["workers"][0]["memoryUsage"] > 2**20
        own = management.get("/models/echo", params={"customized": "true"}).json()[0]
        assert own["customizedMetadata"]["names"] == [], "the handler is asked with the header `describe`"
        again = management.post("/models", params={"url": "second.mar"})
        assert (again.status_code, again.json()["type"]) == (409, "ConflictStatusException")
        broken = management.post("/models", params={"url": "broken.mar", "initial_workers": 1})
        assert broken.status_code == 500
        assert broken.json()["message"].startswith("Failed to start workers for model broken version: 1.0: ")
        odd = management.post("/models", params={"url": "second.mar", "runtime": "python4"})
        assert (odd.status_code, odd.json()["message"]) == (400, "Invalid RuntimeType value: python4")
        third = {"url": "second.mar", "model_version": "3.0", "initial_workers": 1, "synchronous": "false"}
        later = management.post("/models", params=third)
        assert (later.status_code, later.json()["status"]) == (202, "Processing worker updates...")
        assert client.post("/predictions/double/3.0", json={"x": 4}).json() == {"doubled": 8}
        kept = management.delete("/models/double")
        assert (kept.status_code, kept.json()["type"]) == (403, "InvalidModelVersionException")
        assert management.delete("/models/double/3.0/?timeout=1").status_code == 200
        gone = management.delete("/models/double")
        assert gone.json() == {"status": 'Model "double" unregistered'}
        assert not Path(f"/proc/{facts['workers'][0]['pid']}").exists()
        assert client.post("/predictions/double", json={"x": 4}).status_code == 404


def test_handlers_die_with_their_server_and_a_restart_brings_them_back(tmp_path: Path) -> None:
    archives.mar(tmp_path / "double.mar", archives.DOUBLE, modelName="double")
    state = str(tmp_path / "state.json")
    with serve.start(tmp_path / "double.mar", allow_code=True, state=state, management_port=0) as running:
        assert (running.model, running.version) == ("double", "1.0")
        assert running.management_url is not None
        pid = servers.get(f"{running.management_url}/models/double").json()[0]["workers"][0]["pid"]
        handler = os.pidfd_open(pid)
        os.kill(running.pid, signal.SIGKILL)
        assert select.select([handler], [], [], 100)[0], "the handler's process ends"
        os.close(handler)
    assert json.loads(Path(state).read_text())["models"]["double"]["default"] == "1.0"
    with servers.running(store=tmp_path, state=state, allow_code=True) as again:
        assert servers.post(f"{again.url}/predictions/double", json={"x": 3}).json() == {"doubled": 6}


def test_a_server_that_was_not_allowed_to_run_code_does_not_start_with_an_archive(tmp_path: Path) -> None:
    path = archives.mar(tmp_path / "double.mar", archives.DOUBLE)
    with pytest.raises(TruelineError, match="this server runs none"), serve.start(path):
        pass
