"""Statuses that differ from TorchServe's on purpose are TorchServe's again with --torchserve-strict."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from trueline import serve
from trueline.errors import Overloaded, RequestError
from trueline.serve.handlers.failures import DIED, HandlerFailed, Hung
from trueline.torchserve import responses
from trueline.web.auth import Forbidden, Unauthorized
from worlds import archives, bundles, servers
from worlds.cases import few
from worlds.waiting import until


@pytest.mark.parametrize(
    ("refused", "ours", "theirs"),
    [
        (HandlerFailed(DIED), (503, "InternalServerException"), (500, "InternalServerException")),
        (Hung("gave no answer within 1 s"), (504, "RequestTimeoutException"), (500, "InternalServerException")),
        (Overloaded("full"), (429, "ServiceUnavailableException"), (503, "ServiceUnavailableException")),
        (Unauthorized("no token"), (401, "InvalidKeyException"), (400, "InvalidKeyException")),
        (Forbidden("wrong"), (403, "InvalidKeyException"), (400, "InvalidKeyException")),
        (RequestError("no"), (400, "BadRequestException"), (400, "BadRequestException")),
    ],
)
def test_a_refusal_has_our_status_or_torchserves(
    refused: RequestError, ours: tuple[int, str], theirs: tuple[int, str]
) -> None:
    for strict, (status, kind) in ((False, ours), (True, theirs)):
        found = responses.error(refused, strict=strict)
        told = json.loads(found.body)
        assert (found.status, told["code"], told["type"]) == (status, status, kind)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_server_answers_with_our_statuses_or_torchserves(tmp_path: Path, strict: bool) -> None:
    (tmp_path / "store").mkdir()
    bundles.double_plus(tmp_path / "store" / "tiny.bundle")
    with serve.start(
        model_store=str(tmp_path / "store"),
        load="tiny",
        management_port=0,
        key_file=str(tmp_path / "keys.json"),
        max_body_bytes=1000,
        torchserve_strict=strict,
    ) as running:
        keys = json.loads((tmp_path / "keys.json").read_text())
        with httpx.Client(timeout=60) as client:

            def told(method: str, url: str, kind: str = "", **more: object) -> tuple[int, str]:
                token = {"authorization": f"Bearer {keys[kind]['key']}"} if kind else {}
                found = client.request(method, url, headers=token, **more)  # type: ignore[arg-type]
                return found.status_code, found.json()["type"] if found.text.startswith('{\n  "code"') else found.text

            predict, described = f"{running.url}/predictions/tiny", f"{running.management_url}/models/tiny"
            if strict:
                assert told("POST", predict, content=b"[1, 2, 3]") == (400, "InvalidKeyException")
                assert told("GET", described, "inference") == (400, "InvalidKeyException")
                assert told("PUT", f"{described}?min_worker=-1", "management") == (500, "InternalServerException")
                assert told("POST", predict, "inference", content=b"x" * 1001) == (413, "")
                assert told("GET", f"{running.url}/", "inference")[0] == 405
            else:
                assert told("POST", predict, content=b"[1, 2, 3]") == (401, "InvalidKeyException")
                assert told("GET", described, "inference") == (403, "InvalidKeyException")
                assert told("PUT", f"{described}?min_worker=-1", "management") == (400, "BadRequestException")
                assert told("POST", predict, "inference", content=b"x" * 1001) == (413, "BadRequestException")
                assert told("GET", f"{running.url}/", "inference") == (200, '{"status":"alive"}')
            missing = client.get(f"{running.url}/v2/models/tiny")
            assert (missing.status_code, list(missing.json())) == (401, ["error"]), "other faces are as ever"


@pytest.mark.slow
def test_a_registration_that_does_not_wait_is_answered_at_once_as_torchserve_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    bundles.double_plus(store / "tiny.bundle")
    bundles.double_plus(store / "torn.bundle")
    weights = next(path for path in (store / "torn.bundle").rglob("*.onnx"))
    weights.write_bytes(weights.read_bytes()[:-9])
    with (
        serve.start(model_store=str(store), management_port=0, torchserve_strict=True) as running,
        httpx.Client(base_url=str(running.management_url), timeout=60) as client,
    ):
        how = "initial_workers=1&synchronous=false"
        for model in ("tiny", "torn"):
            answer = client.post(f"/models?url={model}.bundle&model_name={model}&{how}")
            assert (answer.status_code, answer.json()) == (202, {"status": "Processing worker updates..."})
        until(lambda: client.get("/models/tiny").json()[0]["workers"], "'tiny' has its worker")
        until(lambda: client.get("/models/torn").status_code == 404, "'torn' is refused")
        assert client.post(f"/models?url=tiny.bundle&model_name=tiny&{how}").status_code == 409
        assert client.post(f"/models?url=none.bundle&model_name=none&{how}").status_code == 404
    assert "registration.failed" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "kind"), few([("", "dict"), ("decode_input_request=false\n", "bytes")], 1, pytest.mark.jobs)
)
def test_json_and_text_reach_a_handler_as_values_or_as_they_came(tmp_path: Path, told: str, kind: str) -> None:
    from trueline.torchserve import config as properties

    code = "def handle(data, context):\n    return data and [type(row['body']).__name__ for row in data]\n"
    (tmp_path / "store").mkdir()
    archives.mar(tmp_path / "store" / "noop.mar", code)
    config = tmp_path / "config.properties"
    config.write_text(f"model_store={tmp_path / 'store'}\nload_models=noop.mar\n{told}")
    options = properties.read(config, {}).options
    with serve.start(allow_code=True, **options) as running:
        asked = {"content": b'{"a": 1}', "headers": {"content-type": "application/json"}, "timeout": 60}
        found = servers.post(f"{running.url}/predictions/noop", **asked).text  # type: ignore[arg-type]
        assert found == ("dict" if kind == "dict" else "bytearray")
