"""What a server says of an error names no path, no line of source, no memory, no secret and no value of another client.

Triton CVE-2025-23320 (the name of a shared memory region in an error), CVE-2024-0103; MLflow CVE-2023-43472; Ray
CVE-2023-6021; and MLServer's tracebacks in answers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import pytest

from trueline.wire import inference_pb2, torchserve_pb2
from worlds import servers
from worlds.attacks import Target

pytestmark = pytest.mark.slow
INTERNAL = re.compile(
    r"Traceback|File \"|\.py\b|\.cc\b|line \d+, in|/(tmp|srv|home|root|usr|proc|dev)/|/dev/shm|psm_|memfd|hunter2"
    r"|0x[0-9a-f]{6,}|site-packages|onnxruntime::|torch\.|numpy\.|object at|<class|Errno"
)
TENSOR = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}


def check(target: Target, text: str) -> None:
    assert not INTERNAL.search(text), text[:500]
    for hidden in (target.store.parent, Path(__file__).parents[3]):
        assert str(hidden) not in text
    assert len(text) < 4000


@pytest.mark.parametrize(
    "entry", ["torn.bundle", "wrong.bundle", "tiny.bundle/bundle.json", "boom.mar/x", "pair", "gone.mar"]
)
def test_a_load_that_fails_says_why_without_a_path(target: Target, entry: str) -> None:
    management = target.server.management_url
    for place, query in (("models", ""), ("models", "&initial_workers=1&synchronous=true"), ("workflows", "")):
        found = servers.post(f"{management}/{place}?url={entry}&model_name=mine{query}")
        assert 400 <= found.status_code < 500, found.text
        check(target, found.text)
    model = entry.partition(".")[0]
    found = servers.post(f"{target.server.url}/v2/repository/models/{model}/load", json={})
    check(target, found.text)
    check(target, servers.post(f"{target.server.url}/v2/repository/index", json={}).text)
    servers.delete(f"{management}/models/pair")


def test_a_handler_that_fails_keeps_its_error_and_the_others_bodies_to_itself(target: Target) -> None:
    large = json.dumps({"x": "private words " * 20_000}).encode()  # it travels through shared memory
    for path in (
        "/predictions/boom", "/predictions/boom/1.0/more", "/explanations/boom", "/v1/models/boom:predict",
        "/v2/models/boom/infer", "/models/boom/invoke", "/boom/predict", "/invocations?model_name=boom",
    ):  # fmt: skip
        for body in (b"{}", large):
            found = servers.post(f"{target.server.url}{path}", content=body)
            assert found.status_code == 503, (path, found.text)
            check(target, found.text)
            assert "private words" not in found.text
    with grpc.insecure_channel(f"127.0.0.1:{target.server.grpc_port}") as channel:
        path = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
        call = channel.unary_unary(path, request_serializer=lambda one: one.SerializeToString())
        with pytest.raises(grpc.RpcError) as error:
            call(torchserve_pb2.PredictionsRequest(model_name="boom", input={"data": b"x"}), timeout=60)
        check(target, error.value.details())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3]}, {"shape": [1, 4]}, {"shape": [0, 3], "data": []}, {"datatype": "BYTES"}, {"datatype": "FP16"},
        {"name": "y"}, {"data": [[1], [2, 3]]}, {"data": [1e39, 2, 3]}, {"data": "x"}, {"data": [1, 2]},
        {"parameters": {"shared_memory_region": "triton_python_backend_shm_region_1", "shared_memory_byte_size": 12},
         "data": None},
        {"parameters": {"binary_data_size": -1}},
        {"shape": [2**31 - 1, 2**31 - 1]},
    ],
)  # fmt: skip
def test_a_request_that_is_refused_is_refused_in_words_of_the_protocol(
    target: Target, change: dict[str, object]
) -> None:
    body = {"inputs": [{key: value for key, value in (TENSOR | change).items() if value is not None}]}
    found = servers.post(f"{target.server.url}/v2/models/tiny/infer", json=body)
    assert found.status_code == (413 if change == {"shape": [2**31 - 1, 2**31 - 1]} else 400), found.text
    check(target, found.text)


@pytest.mark.parametrize("raw", [b"", b"\0" * 8, b"\xff" * 100, b"\0" * 13])
def test_grpc_bytes_that_are_no_tensor_are_refused_in_words_of_the_protocol(target: Target, raw: bytes) -> None:
    request = inference_pb2.ModelInferRequest(model_name="tiny", raw_input_contents=[raw])
    request.inputs.add(name="x", shape=[1, 3], datatype="FP32")
    with grpc.insecure_channel(f"127.0.0.1:{target.server.grpc_port}") as channel:
        for data in (request.SerializeToString(), raw + b"\x07"):
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as error:
                call(data, timeout=60)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
            check(target, error.value.details())  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/systemsharedmemory", "/cudasharedmemory"])
@pytest.mark.parametrize("act", ["/status", "/region/a/register", "/region/a/unregister", "/unregister"])
def test_no_request_names_memory(target: Target, path: str, act: str) -> None:
    """Triton CVE-2024-0088, CVE-2024-0116, CVE-2025-23319, CVE-2025-23329, CVE-2025-23333, CVE-2025-23334."""
    body = {"key": "/triton_python_backend_shm_region_1", "offset": 2**63, "byte_size": 2**63}
    for url in (f"{target.server.url}/v2{path}{act}", f"{target.server.management_url}/v2{path}{act}"):
        for method in ("GET", "POST"):
            assert servers.request(method, url, json=body).status_code == 404


@pytest.mark.parametrize(
    "path", ["/v2/logging", "/v2/trace/setting", "/v2/models/tiny/trace/setting", "/logging", "/admin"]
)
def test_no_request_chooses_a_file_that_the_server_writes(target: Target, path: str) -> None:
    """Triton CVE-2024-0087 and CVE-2024-0100: the log's and the trace's file, set by a client."""
    before = target.files()
    for method in ("POST", "PUT", "GET"):
        body = {"log_file": str(target.store.parent / "mine"), "trace_file": str(target.store.parent / "mine")}
        assert servers.request(method, f"{target.server.url}{path}", json=body).status_code in (404, 405)
    assert target.files() == before


@pytest.mark.long
def test_a_handler_that_repeats_a_client_splits_no_response(target: Target) -> None:
    """A line feed in a header of a handler ends the request, not the header (CWE-113)."""
    for text in (b"a\r\nset-cookie: x=1", b"a\nx: y", b"a\r\n\r\nHTTP/1.1 200 OK", b"a\0b", b"\x7f"):
        found = target.send(
            b"POST /predictions/echo HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(text), text)
        )
        assert found.count(b"HTTP/1.1 ") == 1
        assert b"set-cookie" not in found.lower()
        assert found[9:10] == b"5"
    assert servers.post(f"{target.server.url}/predictions/echo", content=b"fine").headers["x-echo"] == "fine"


def test_what_is_described_of_a_model_names_no_secret(target: Target) -> None:
    for path in ("/models", "/models/tiny", "/models/boom", "/models/boom/all", "/openapi.json", "/workflows", "/ping"):
        check_described(target, servers.get(f"{target.server.management_url}{path}").text)
    for path in (
        "/v2",
        "/v2/models/tiny",
        "/v2/models/tiny/config",
        "/v2/models/stats",
        "/dashboard/state",
        "/v1/models",
    ):
        check_described(target, servers.get(f"{target.server.url}{path}").text)


def check_described(target: Target, text: str) -> None:
    assert str(target.store.parent) not in text
    assert "hunter2" not in text
