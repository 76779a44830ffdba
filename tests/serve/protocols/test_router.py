"""Both faces without a socket: what each path, method and body is answered."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from trueline.serve.batching.policy import Policy
from trueline.serve.models.version import ProgramVersion
from trueline.web.messages import Request, RequestHead, Response
from worlds.servers import TinyApp

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}).encode()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyApp]:
    with TinyApp(tmp_path_factory.mktemp("tiny")) as made:
        yield made


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[TinyApp]:
    """The same model, never run on the loop itself."""
    with TinyApp(tmp_path, inline=False) as made:
        yield made


@pytest.mark.parametrize("path", ["/invocations", "/invocations?model_name=tiny", "/models/tiny/invoke"])
def test_older_clients_find_the_model_where_sagemaker_and_older_torchserves_had_it(app: TinyApp, path: str) -> None:
    assert json.loads(app.ask("POST", path, b"[1, 2, 3]").body) == [3.0, 5.0, 7.0]
    assert app.ask("DELETE", path).status == 405


@pytest.mark.parametrize("path", ["/tiny/predict", "/tiny/1/predict"])
def test_the_oldest_routes_answer_too(app: TinyApp, path: str) -> None:
    assert json.loads(app.ask("POST", path, b"[1, 2, 3]").body) == [3.0, 5.0, 7.0]
    missing = app.ask("POST", path.replace("tiny", "zzz"), b"[1, 2, 3]")
    assert (missing.status, json.loads(missing.body)["message"]) == (404, "Model not found: zzz")


def test_an_invocation_of_several_models_has_to_name_one(tmp_path: Path) -> None:
    app = TinyApp(tmp_path)
    app.models.add("other", "1")
    answer = app.ask("POST", "/invocations", b"[1, 2, 3]")
    assert (answer.status, json.loads(answer.body)["message"]) == (400, "Parameter model_name is required.")
    app.close()


def test_a_model_that_is_called_as_an_older_route_keeps_its_place_in_the_other_protocols(tmp_path: Path) -> None:
    app = TinyApp(tmp_path)
    app.models.add("predict", "1")
    found = app.ask("GET", "/v1/models/predict")
    assert (found.status, json.loads(found.body)) == (503, {"name": "predict", "ready": False})
    app.close()


OIP_TABLE = [
    ("GET", "/v2", b"", 200),
    ("GET", "/v2/", b"", 200),
    ("HEAD", "/v2", b"", 200),
    ("POST", "/v2", b"", 405),
    ("GET", "/v2/health/live", b"", 200),
    ("GET", "/v2/health/ready", b"", 200),
    ("DELETE", "/v2/health/ready", b"", 405),
    ("GET", "/v2/models/tiny", b"", 200),
    ("GET", "/v2/models/tiny/versions/1", b"", 200),
    ("GET", "/v2/models/tiny/ready", b"", 200),
    ("GET", "/v2/models/tiny/versions/1/ready", b"", 200),
    ("POST", "/v2/models/tiny/ready", b"", 405),
    ("GET", "/v2/models/zzz", b"", 404),
    ("GET", "/v2/models/zzz/ready", b"", 404),
    ("GET", "/v2/models/tiny/versions/9", b"", 404),
    ("GET", "/v2/models/tiny/versions/9/ready", b"", 404),
    ("POST", "/v2/models/tiny/infer", BODY, 200),
    ("POST", "/v2/models/tiny/versions/1/infer", BODY, 200),
    ("GET", "/v2/models/tiny/infer", BODY, 405),
    ("POST", "/v2/models/zzz/infer", BODY, 404),
    ("POST", "/v2/models/tiny/versions/9/infer", BODY, 404),
    ("POST", "/v2/models/tiny/infer", b"{", 400),
    ("POST", "/v2/models/tiny/infer", b"", 400),
    ("POST", "/v2/models/tiny/infer", b'{"inputs": []}', 400),
    ("POST", "/v2/models/tiny/infer", BODY.replace(b'"x"', b'"zz"'), 400),
    ("POST", "/v2/models/tiny/infer", BODY.replace(b"FP32", b"INT64"), 400),
    ("POST", "/v2/models/tiny/infer", BODY.replace(b"FP32", b"BYTES"), 400),
    ("POST", "/v2/models/tiny/infer", BODY.replace(b"[1, 3]", b"[3, 1]"), 400),
    ("POST", "/v2/models/tiny/infer", BODY.replace(b"[1, 3]", b"[0, 3]").replace(b"[1, 2, 3]", b"[]"), 400),
    ("GET", "/v2/nope", b"", 404),
    ("GET", "/v2/models", b"", 404),
    ("GET", "/v2/models/tiny/versions", b"", 404),
    ("GET", "/v2/models/../../etc", b"", 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), OIP_TABLE)
def test_the_open_inference_protocol_answers_as_its_table_says(
    app: TinyApp, method: str, path: str, body: bytes, status: int
) -> None:
    found = app.ask(method, path, body)
    assert found.status == status
    answer = json.loads(found.body)
    if status >= 400:
        assert list(answer) == ["error"]
        assert isinstance(answer["error"], str)
    if status == 405:
        assert b"allow: " in found.headers


TORCHSERVE_TABLE = [
    ("GET", "/ping", b"", 200, None, None),
    ("POST", "/ping", b"", 200, None, None),
    ("HEAD", "/ping", b"", 200, None, None),
    ("DELETE", "/ping", b"", 405, "MethodNotAllowedException", None),
    ("DELETE", "/", b"", 405, "MethodNotAllowedException", None),
    ("GET", "/nope", b"", 404, "ResourceNotFoundException", None),
    ("GET", "/v20", b"", 404, "ResourceNotFoundException", None),
    ("POST", "/predictions/tiny", b"[1, 2, 3]", 200, None, None),
    ("PUT", "/predictions/tiny", b"[1, 2, 3]", 200, None, None),
    ("GET", "/predictions/tiny/1", b"[1, 2, 3]", 200, None, None),
    ("POST", "/predictions/tiny/1/extra/path", b"[1, 2, 3]", 200, None, None),
    ("DELETE", "/predictions/tiny", b"", 405, "MethodNotAllowedException", None),
    ("POST", "/predictions/zzz", b"[]", 404, "ModelNotFoundException", "Model not found: zzz"),
    (
        "POST", "/predictions/tiny/9", b"[]", 404, "ModelVersionNotFoundException",
        "Model version: 9 does not exist for model: tiny",
    ),
    ("POST", "/predictions/tiny", b"", 400, "BadRequestException", None),
    ("POST", "/predictions/tiny", b"{", 400, "BadRequestException", None),
    ("POST", "/predictions/tiny", b"[1, 2]", 400, "BadRequestException", None),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "kind", "message"), TORCHSERVE_TABLE)
def test_torchserves_routes_answer_as_its_table_says(
    app: TinyApp, method: str, path: str, body: bytes, status: int, kind: str | None, message: str | None
) -> None:
    found = app.ask(method, path, body)
    assert found.status == status
    assert b"x-request-id: " in found.headers
    assert b"pragma: no-cache\r\n" in found.headers
    assert b"cache-control: no-cache; no-store, must-revalidate, private\r\n" in found.headers
    assert b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n" in found.headers
    assert found.close == (status >= 400)
    answer = json.loads(found.body)
    if kind is not None:
        assert (answer["code"], answer["type"]) == (status, kind)
        assert found.body == json.dumps(answer, indent=2).encode() + b"\n"
    if message is not None:
        assert answer["message"] == message


def test_the_root_says_alive_as_kserves_sdk_asks_it(app: TinyApp) -> None:
    found = app.ask("GET", "/")
    assert (found.status, json.loads(found.body)) == (200, {"status": "alive"})


def test_ping_is_torchserves_to_the_byte(app: TinyApp) -> None:
    assert app.ask("GET", "/ping").body == b'{\n  "status": "Healthy"\n}\n'


def test_an_answer_echoes_the_id_and_says_what_it_gives(app: TinyApp) -> None:
    body = BODY.replace(b'{"inputs"', b'{"id": "q-7", "inputs"')
    assert json.loads(app.ask("POST", "/v2/models/tiny/infer", body).body) == {
        "model_name": "tiny",
        "model_version": "1",
        "id": "q-7",
        "outputs": [{"name": "y", "shape": [1, 3], "datatype": "FP32", "data": [3.0, 5.0, 7.0]}],
    }


def test_metadata_shows_symbols_as_minus_one_and_what_was_measured(app: TinyApp) -> None:
    found = json.loads(app.ask("GET", "/v2/models/tiny").body)
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert found["platform"] == "onnxruntime_onnx"
    assert found["versions"] == ["1"]
    assert found["parameters"]["inline_values"] > 0


@pytest.mark.parametrize(
    "headers",
    [{"content_encoding": "br"}, {"content_type": "multipart/form-data; boundary=x"}, {"content_type": "image/png"}],
)
@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", "/predictions/tiny"])
def test_a_body_in_a_form_that_nobody_here_reads_is_refused_with_415(
    app: TinyApp, path: str, headers: dict[str, str]
) -> None:
    assert app.ask("POST", path, BODY, **headers).status == 415


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/v2/models/tiny/infer", BODY, [3.0, 5.0, 7.0]),
        ("/predictions/tiny", b"[1, 2, 3]", [3.0, 5.0, 7.0]),
        ("/predictions/tiny", b"[[1, 2, 3]]", [[3.0, 5.0, 7.0]]),
    ],
)
def test_a_program_run_in_a_thread_answers_the_same(queued: TinyApp, path: str, body: bytes, answer: Any) -> None:
    found = json.loads(queued.ask("POST", path, body).body)
    assert (found["outputs"][0]["data"] if isinstance(found, dict) else found) == answer


def test_a_request_outside_the_proven_range_is_refused_before_it_waits(queued: TinyApp) -> None:
    found = queued.ask("POST", "/predictions/tiny", json.dumps([[1, 2, 3]] * 9).encode())
    assert found.status == 400
    assert "at most 8" in json.loads(found.body)["message"]


def test_a_client_that_goes_away_takes_its_request_out_of_the_queue(queued: TinyApp) -> None:
    gate = threading.Event()
    queued.pool.submit(gate.wait)
    running = queued.routes.answer(Request("POST", b"/v2/models/tiny/infer", {}, BODY))
    queued.loop.run_until_complete(asyncio.sleep(0))
    waiting = queued.routes.answer(Request("POST", b"/v2/models/tiny/infer", {}, BODY))
    assert isinstance(running, asyncio.Future)
    assert isinstance(waiting, asyncio.Future)
    assert queued.tiny.num_waiting == 1
    waiting.cancel()
    queued.loop.run_until_complete(asyncio.sleep(0))
    queued.loop.run_until_complete(asyncio.sleep(0))
    assert queued.tiny.num_waiting == 0
    gate.set()
    assert queued.loop.run_until_complete(running).status == 200
    assert queued.tiny.stats.rows == 1


@pytest.mark.parametrize("where", ["parameter", "header"])
def test_a_request_says_how_urgent_it_is(queued: TinyApp, where: str) -> None:
    """Of different shapes, so that they cannot share a run."""
    gate = threading.Event()
    queued.pool.submit(gate.wait)
    order: list[str] = []

    def ask(name: str, priority: str, rows: int) -> asyncio.Future[Response]:
        tensor = {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": [1, 2, 3] * rows}
        told = {"parameters": {"priority": int(priority)}} if where == "parameter" else {}
        headers = {b"x-trueline-priority": priority.encode()} if where == "header" else {}
        found = queued.routes.answer(
            Request("POST", b"/v2/models/tiny/infer", headers, json.dumps({"inputs": [tensor]} | told).encode())
        )
        assert isinstance(found, asyncio.Future)
        found.add_done_callback(lambda _: order.append(name))
        return found

    first = ask("first", "3", 8)
    queued.loop.run_until_complete(asyncio.sleep(0))
    queued.loop.run_until_complete(asyncio.sleep(0))
    others = [ask("later", "5", 8), ask("usual", "3", 8), ask("urgent", "1", 8)]
    gate.set()
    queued.loop.run_until_complete(asyncio.gather(first, *others))
    assert order == ["first", "urgent", "usual", "later"]


@pytest.mark.parametrize("given", [-1, "high", 1.5, True])
def test_a_priority_that_is_none_is_a_client_fault(app: TinyApp, given: Any) -> None:
    body = BODY.replace(b'{"inputs"', b'{"parameters": {"priority": %s}, "inputs"' % json.dumps(given).encode())
    found = app.ask("POST", "/v2/models/tiny/infer", body)
    assert found.status == 400
    assert "1, the most urgent, to 5" in json.loads(found.body)["error"]


def test_a_deadline_that_passes_is_504(queued: TinyApp) -> None:
    gate = threading.Event()
    queued.pool.submit(gate.wait)
    body = BODY.replace(b'{"inputs"', b'{"parameters": {"timeout": 1000}, "inputs"')
    assert queued.ask("POST", "/v2/models/tiny/infer", body).status == 504
    gate.set()


def test_overload_is_429_with_retry_after_on_both_faces(tmp_path: Path) -> None:
    app = TinyApp(tmp_path, inline=False, policy=Policy(max_requests=0))
    for path, body in (("/v2/models/tiny/infer", BODY), ("/predictions/tiny", b"[1, 2, 3]")):
        found = app.ask("POST", path, body)
        assert found.status == 429
        assert b"retry-after: 1\r\n" in found.headers
    app.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[TinyApp]:
    """One request runs, one waits, and no more may."""
    app = TinyApp(tmp_path, inline=False, policy=Policy(max_requests=1))
    gate = threading.Event()
    app.pool.submit(gate.wait)
    under_way = []
    for _ in range(2):
        found = app.routes.answer(Request("POST", b"/v2/models/tiny/infer", {}, BODY))
        assert isinstance(found, asyncio.Future)
        app.loop.run_until_complete(asyncio.sleep(0))
        under_way.append(found)
    yield app
    gate.set()
    app.loop.run_until_complete(asyncio.gather(*under_way))
    app.close()


def test_what_is_remembered_of_a_refusal_ends_with_the_full_queue_and_with_the_version(full: TinyApp) -> None:
    """Requests with a head that is known, as a kept-alive client sends them."""
    target, headers = b"/v2/models/tiny/infer", {b"content-length": b"%d" % len(BODY)}
    head = RequestHead("POST", target, "/v2/models/tiny/infer", frozenset(headers))

    def ask(body: bytes = BODY) -> Any:
        return full.routes.answer(Request("POST", target, headers, body, True, False, head))

    first, second = ask(), ask()
    assert (first.status, second.status) == (429, 429)
    assert second is first
    urgent = json.dumps(json.loads(BODY) | {"parameters": {"priority": 1}}).encode()
    assert not isinstance(ask(urgent), Response)  # it takes the place of the one that waits
    assert ask().status == 429
    full.models.show(ProgramVersion(model="tiny", version="1"))
    assert ask().status == 503
    full.models.show(full.tiny)
    assert ask().status == 429
    assert full.routes.stats.by_status[429] >= 4


@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", "/predictions/tiny", "/v1/models/tiny:predict"])
def test_a_full_queue_refuses_before_it_reads_what_is_asked(full: TinyApp, path: str) -> None:
    found = full.ask("POST", path, b"no request at all")
    assert found.status == 429
    assert b"retry-after: 1\r\n" in found.headers


@pytest.mark.parametrize("key", ["priority", "prior\\u0069ty"])
def test_a_full_queue_still_reads_who_is_more_urgent(full: TinyApp, key: str) -> None:
    body = BODY.replace(b'{"inputs"', b'{"parameters": {"%b": 1}, "inputs"' % key.encode())
    urgent = full.routes.answer(Request("POST", b"/v2/models/tiny/infer", {}, body))
    by_header = full.routes.answer(Request("POST", b"/v2/models/tiny/infer", {b"x-trueline-priority": b"1"}, BODY))
    assert isinstance(urgent, asyncio.Future)
    assert isinstance(by_header, Response)  # as urgent as the one that waits now
    assert by_header.status == 429
    assert full.ask("POST", "/v2/models/tiny/infer", BODY, x_trueline_priority="high").status == 400
    full.tiny.scale(0)
    assert full.ask("POST", "/v2/models/tiny/infer", BODY).status == 503
    full.tiny.scale(1)


def test_a_model_that_loads_or_failed_is_503_with_the_reason_and_the_server_is_not_ready(tmp_path: Path) -> None:
    app = TinyApp(tmp_path)
    slow = app.models.add("slow", "1")
    assert json.loads(app.ask("GET", "/v2/models/slow/ready").body)["reason"] == "loading"
    assert app.ask("POST", "/v2/models/slow/infer", BODY).status == 503
    assert app.ask("GET", "/v2/models/slow").status == 503
    assert app.ask("GET", "/v2/health/ready").status == 503
    assert json.loads(app.ask("GET", "/v2/health/ready").body) == {"ready": False}
    assert app.ask("GET", "/ping").status == 500
    refused = app.ask("POST", "/v2/models/slow/infer", BODY)
    assert b"retry-after: 1\r\n" in refused.headers
    slow.fail("the golden record '4' differs")
    found = app.ask("GET", "/v2/models/slow/ready")
    assert (found.status, json.loads(found.body)["reason"]) == (503, "the golden record '4' differs")
    ping = app.ask("GET", "/ping")
    assert (ping.status, json.loads(ping.body)) == (500, {"status": "Unhealthy"})
    assert app.ask("POST", "/predictions/slow", b"[1]").status == 503
    assert app.ask("GET", "/v2/health/live").status == 200
    app.close()


def test_a_model_that_breaks_says_nothing_of_the_servers_insides(tmp_path: Path) -> None:
    app = TinyApp(tmp_path)

    def broken(inputs: Any) -> Any:
        raise OSError("/secret/place/model.onnx is gone")

    loaded = app.tiny.loaded
    session = type("Broken", (), {"run": staticmethod(broken), "signature": loaded.session.signature, "format": "x"})()
    for inline in (loaded.plan.inline_values, 0):
        plan = replace(loaded.plan, inline_values=inline)
        app.tiny.make_ready(replace(loaded, session=session, plan=plan), Policy(), app.pool, app.loop)
        found = app.ask("POST", "/v2/models/tiny/infer", BODY)
        assert found.status == 500
        assert b"secret" not in found.body
        found = app.ask("POST", "/predictions/tiny", b"[1, 2, 3]")
        assert (found.status, json.loads(found.body)["type"]) == (503, "InternalServerException")
        assert b"secret" not in found.body
    assert app.tiny.stats.failed == 4
    app.close()


def test_metrics_count_what_was_answered(tmp_path: Path) -> None:
    app = TinyApp(tmp_path)
    app.ask("POST", "/predictions/tiny", b"[[1, 2, 3], [4, 5, 6]]")
    app.ask("POST", "/predictions/tiny", b"[")
    page = app.ask("GET", "/metrics")
    assert page.content_type.startswith(b"text/plain; version=0.0.4")
    samples = {
        (sample.name, sample.labels.get("status") or sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(page.body.decode())
        for sample in family.samples
    }
    assert samples[("trueline_answers_total", "200")] == 1
    assert samples[("trueline_answers_total", "400")] == 1
    assert samples[("trueline_request_seconds_count", None)] == 1
    assert samples[("trueline_run_rows_bucket", "1.0")] == 0
    assert samples[("trueline_run_rows_bucket", "2.0")] == 1
    assert samples[("Requests2XX_total", None)] == 1  # the parser adds `_total`
    assert samples[("ts_inference_requests_total", None)] == 1
    app.close()


def test_metrics_of_the_host_stand_under_torchserves_names_in_its_form(app: TinyApp) -> None:
    app.ask("GET", "/ping")
    page = app.ask("GET", "/metrics").body.decode()
    for name in ("Requests2XX", "CPUUtilization", "MemoryUsed", "DiskAvailable"):
        assert re.search(rf'^{name}\{{Level="Host",Hostname="[^"]+",\}} \d+\.\d+', page, re.MULTILINE), name
    assert re.search(r'^ts_queue_latency_microseconds\{hostname="[^"]+",model_name="tiny"', page, re.MULTILINE)
    assert {family.name for family in text_string_to_metric_families(page)} > {"MemoryUtilization", "trueline_ready"}


def test_metrics_may_be_asked_for_by_name(app: TinyApp) -> None:
    page = app.ask("GET", "/metrics?name[]=trueline_ready&name[]=trueline_answers_total&name[]=none").body.decode()
    found = {family.name for family in text_string_to_metric_families(page)}
    assert found == {"trueline_ready", "trueline_answers"}


def test_options_of_a_model_are_the_document_of_what_it_is_asked(app: TinyApp) -> None:
    found = app.ask("OPTIONS", "/predictions/tiny")
    told = json.loads(found.body)
    assert (found.status, told["openapi"][:2], told["info"]["title"]) == (200, "3.", "tiny")
    assert {"/predictions/tiny", "/v2/models/tiny/infer"} <= set(told["paths"])
    assert "/ping" not in told["paths"]
    assert app.ask("OPTIONS", "/predictions/zzz").status == 404


PATHS = st.sampled_from(["/v2/models/tiny/infer", "/predictions/tiny", "/predictions/tiny/1", "/v2/models/tiny"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    path=PATHS, method=st.sampled_from(["POST", "GET", "PUT"]), at=st.integers(0, len(BODY)), junk=st.binary(max_size=8)
)
def test_no_body_whatever_is_answered_with_5xx(app: TinyApp, path: str, method: str, at: int, junk: bytes) -> None:
    found = app.ask(method, path, BODY[:at] + junk + BODY[at + len(junk) :])
    assert found.status < 500
    assert b"Traceback" not in found.body


@given(path=st.text(max_size=20))
def test_no_path_whatever_is_answered_with_5xx(app: TinyApp, path: str) -> None:
    assert app.ask("GET", "/" + path).status in (200, 400, 404, 405)
