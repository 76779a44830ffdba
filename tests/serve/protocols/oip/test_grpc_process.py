"""Triton's own gRPC client, unmodified, against a server process; and what a client can get wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest

from trueline import serve
from trueline.errors import PortInUse
from trueline.serve import RunningServer
from trueline.torchserve.grpc import INFERENCE, MANAGEMENT
from trueline.wire import torchserve_pb2
from worlds import bundles, servers

pytestmark = pytest.mark.slow

client_of = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")


KEYS: dict[str, str] = {}
"""Of the server's key file."""


@pytest.fixture(scope="module")
def grpc_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = bundles.store(tmp_path_factory.mktemp("store"), "tiny/1", "tiny/2", max_rows=64)
    keys = store.parent / "key_file.json"
    with servers.running(store=store, load="tiny", grpc_port=0, key_file=keys) as server:
        KEYS.update(servers.keys_in(keys))
        yield server


@pytest.fixture(scope="module")
def client(grpc_server: RunningServer) -> Iterator[Any]:
    with client_of.InferenceServerClient(f"127.0.0.1:{grpc_server.grpc_port}") as made:
        yield made


def given(array: np.ndarray[Any, Any], name: str = "x", datatype: str = "FP32") -> Any:
    made = client_of.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def token(kind: str = "inference") -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[kind]}"}


def test_tritons_grpc_client_works_unmodified(client: Any) -> None:
    mine = token()
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", headers=mine)
    assert client.get_server_metadata(headers=mine).name == "trueline"
    metadata = client.get_model_metadata("tiny", headers=mine)
    assert list(metadata.versions) == ["1", "2"]
    assert list(metadata.inputs[0].shape) == [-1, 3]
    assert client.get_model_config("tiny", headers=mine).config.input[0].data_type == 11  # TYPE_FP32
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for version in ("", "1", "2"):
        answer = client.infer("tiny", [given(array)], model_version=version, request_id="7", headers=mine)
        assert answer.get_response().id == "7"
        assert answer.get_response().model_version == (version or "2")
        assert np.array_equal(answer.as_numpy("y"), array * 2 + 1)
    stats = client.get_inference_statistics("tiny", "2", headers=mine).model_stats[0]
    assert stats.inference_count == 4
    assert stats.inference_stats.success.ns > 0
    assert {one.version for one in client.get_model_repository_index(headers=mine).models} == {"1", "2"}


def test_tritons_asyncio_clients_work_unmodified_over_http_and_grpc(grpc_server: RunningServer) -> None:
    over_grpc = pytest.importorskip("tritonclient.grpc.aio")
    over_http = pytest.importorskip("tritonclient.http.aio", reason="aiohttp is not installed")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    async def both() -> list[Any]:
        answers = []
        async with over_grpc.InferenceServerClient(f"127.0.0.1:{grpc_server.grpc_port}") as client:
            assert await client.is_server_ready()
            answers += await asyncio.gather(*(client.infer("tiny", [given(array)], headers=token()) for _ in range(3)))
        async with over_http.InferenceServerClient(grpc_server.url.removeprefix("http://")) as client:
            assert await client.is_server_ready()
            asked = over_http.InferInput("x", [2, 3], "FP32")
            asked.set_data_from_numpy(array)
            answers += await asyncio.gather(*(client.infer("tiny", [asked], headers=token()) for _ in range(3)))
        return answers

    for answer in asyncio.run(both()):
        assert np.array_equal(answer.as_numpy("y"), array * 2 + 1)


def test_a_stream_answers_each_request_and_outlives_a_bad_one(client: Any) -> None:
    answers: Queue[Any] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=token())
    array = np.ones((1, 3), np.float32)
    for name in ("x", "zz", "x"):
        client.async_stream_infer("tiny", [given(array, name)])
    seen = [answers.get(timeout=120) for _ in range(3)]
    client.stop_stream()
    assert [error is None for _, error in seen] == [True, False, True]
    assert "unexpected input 'zz'" in str(seen[1][1])
    assert seen[2][0].as_numpy("y").tolist() == [[3.0, 3.0, 3.0]]


@pytest.mark.parametrize(
    ("model", "version", "inputs", "status", "words"),
    [
        ("zzz", "", [given(np.ones((1, 3), np.float32))], "NOT_FOUND", "model 'zzz' is not served here"),
        ("tiny", "9", [given(np.ones((1, 3), np.float32))], "NOT_FOUND", "no version '9'"),
        ("tiny", "", [given(np.ones((1, 4), np.float32))], "INVALID_ARGUMENT", "size 4 in dimension 1, expected 3"),
        ("tiny", "", [given(np.ones((65, 3), np.float32))], "INVALID_ARGUMENT", "at most 64"),
        ("tiny", "", [given(np.ones((1, 3), np.int64), datatype="INT64")], "INVALID_ARGUMENT", "datatype INT64"),
        ("tiny", "", [given(np.ones((1, 3), np.float32), "zz")], "INVALID_ARGUMENT", "unexpected input 'zz'"),
        ("tiny", "", [given(np.ones((1, 3), np.float32))] * 2, "INVALID_ARGUMENT", "given twice"),
    ],
)
def test_a_clients_fault_has_its_code_and_its_words(
    client: Any, model: str, version: str, inputs: list[Any], status: str, words: str
) -> None:
    with pytest.raises(client_of.InferenceServerException) as refused:
        client.infer(model, inputs, model_version=version, headers=token())
    assert refused.value.status() == f"StatusCode.{status}"
    assert words in refused.value.message()


def test_typed_contents_are_read_and_their_range_is_checked(grpc_server: RunningServer) -> None:
    service = pytest.importorskip("tritonclient.grpc.service_pb2")
    stubs = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")
    with grpc.insecure_channel(f"127.0.0.1:{grpc_server.grpc_port}") as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        request = service.ModelInferRequest(model_name="tiny")
        x = request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
        x.contents.fp32_contents.extend([1.0, 2.0, 3.0])
        mine = tuple(token().items())
        answer = stub.ModelInfer(request, metadata=mine)
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3.0, 5.0, 7.0]
        x.contents.fp32_contents.append(4.0)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, metadata=mine)
        assert "has 4 fp32_contents, its shape [1, 3] says 3" in refused.value.details()
        request.raw_input_contents.append(b"\0" * 12)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, metadata=mine)
        assert "contents beside raw_input_contents" in refused.value.details()


def test_without_a_token_only_health_is_told(client: Any) -> None:
    for headers, status in (
        ({}, "UNAUTHENTICATED"),
        ({"authorization": "Bearer nonsense"}, "PERMISSION_DENIED"),
        (token("management"), "PERMISSION_DENIED"),
    ):
        with pytest.raises(client_of.InferenceServerException) as refused:
            client.infer("tiny", [given(np.ones((1, 3), np.float32))], headers=headers)
        assert refused.value.status() == f"StatusCode.{status}"
    with pytest.raises(client_of.InferenceServerException) as refused:
        client.unload_model("tiny", headers=token())
    assert refused.value.status() == "StatusCode.PERMISSION_DENIED"


def test_the_repository_loads_and_unloads_over_grpc(client: Any) -> None:
    manager, mine = token("management"), token()
    client.load_model("tiny", headers=manager)
    assert [one.version for one in client.get_model_repository_index(headers=mine).models] == ["2"]
    client.unload_model("tiny", headers=manager)
    with pytest.raises(client_of.InferenceServerException):
        client.infer("tiny", [given(np.ones((1, 3), np.float32))], headers=mine)
    client.load_model("tiny", headers=manager)
    assert client.is_model_ready("tiny", headers=mine)
    with pytest.raises(client_of.InferenceServerException) as refused:
        client.load_model("absent", headers=manager)
    assert refused.value.status() == "StatusCode.NOT_FOUND"


@pytest.mark.parametrize(
    "call",
    [
        lambda client, mine: client.register_system_shared_memory("r", "/r", 64, headers=mine),
        lambda client, mine: client.get_system_shared_memory_status(headers=mine),
        lambda client, mine: client.unregister_system_shared_memory(headers=mine),
        lambda client, mine: client.register_cuda_shared_memory("r", b"0" * 64, 0, 64, headers=mine),
        lambda client, mine: client.unregister_cuda_shared_memory(headers=mine),
    ],
)
def test_calls_for_regions_of_shared_memory_are_refused_in_words(client: Any, call: Any) -> None:
    with pytest.raises(client_of.InferenceServerException) as refused:
        call(client, token())
    assert "UNIMPLEMENTED" in str(refused.value)
    assert "shared-memory regions are not supported" in str(refused.value)


def test_tensors_in_shared_memory_and_classes_are_refused_over_grpc(client: Any) -> None:
    mine, array = token(), np.zeros((1, 3), np.float32)
    there = client_of.InferInput("x", [1, 3], "FP32")
    there.set_shared_memory("r", 12)
    out = client_of.InferRequestedOutput("y")
    out.set_shared_memory("r", 12)
    for inputs, outputs, words in (
        ([there], None, "input 'x' is in a shared-memory region"),
        ([given(array)], [out], "output 'y' is in a shared-memory region"),
        ([given(array)], [client_of.InferRequestedOutput("y", class_count=3)], "requests classification"),
    ):
        with pytest.raises(client_of.InferenceServerException, match=words) as refused:
            client.infer("tiny", inputs, outputs=outputs, headers=mine)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_grpc_port_in_use_is_one_clear_error(grpc_server: RunningServer, tmp_path: Path) -> None:
    source = bundles.double_plus(tmp_path / "tiny.bundle").path
    with pytest.raises(PortInUse, match=f"port {grpc_server.grpc_port} on 127.0.0.1 is in use"):
        serve.start(source, grpc_port=grpc_server.grpc_port)


def test_bytes_that_are_no_message_are_the_clients_fault(grpc_server: RunningServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_server.grpc_port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"\xff\xff", metadata=tuple(token().items()), timeout=120)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "the call's bytes are no ModelInferRequest"


def test_every_call_is_a_line_of_the_access_log_and_so_is_every_request_of_a_stream(tmp_path: Path) -> None:
    source, log = bundles.double_plus(tmp_path / "tiny.bundle").path, tmp_path / "access.jsonl"
    array = np.ones((1, 3), np.float32)
    answers: Queue[Any] = Queue()
    with serve.start(source, grpc_port=0, grpc_management_port=0, access_log=str(log)) as running:
        with client_of.InferenceServerClient(f"127.0.0.1:{running.grpc_port}") as client:
            client.infer("tiny", [given(array)], request_id="r-1", headers={"x-request-id": "r-2"})
            with pytest.raises(client_of.InferenceServerException):
                client.infer("zzz", [given(array)], request_id="r-3")
            client.start_stream(lambda result, error: answers.put(error))
            for name in ("x", "zz"):
                client.async_stream_infer("tiny", [given(array, name)])
            assert [answers.get(timeout=120) is None for _ in range(2)] == [True, False]
            client.stop_stream()
        asked = torchserve_pb2.PredictionsRequest(model_name="tiny", input={"data": b"[1, 2, 3]"})
        with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
            streamed = channel.unary_stream(f"/{INFERENCE}/StreamPredictions")
            assert len(list(streamed(asked.SerializeToString(), timeout=120))) == 1
        with grpc.insecure_channel(f"127.0.0.1:{running.grpc_management_port}") as channel:
            channel.unary_unary(f"/{MANAGEMENT}/ListModels")(b"", timeout=120)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    fields = ("face", "method", "model", "status", "code", "id")
    assert [tuple(line[field] for field in fields) for line in lines] == [
        ("grpc", "ModelInfer", "tiny", 200, "OK", "r-2"),
        ("grpc", "ModelInfer", "zzz", 404, "NOT_FOUND", "r-3"),
        ("grpc", "ModelStreamInfer", "tiny", 200, "OK", None),
        ("grpc", "ModelStreamInfer", "tiny", 400, "INVALID_ARGUMENT", None),
        ("grpc", "StreamPredictions", "tiny", 200, "OK", None),
        ("grpc_management", "ListModels", None, 200, "OK", None),
    ]
    assert lines[0]["path"] == "/inference.GRPCInferenceService/ModelInfer"
    assert all(line["ms"] > 0 and line["at"] > 1.7e9 for line in lines)
    assert lines[0]["bytes_in"] > 12 < lines[0]["bytes_out"]
    assert lines[4]["bytes_in"] == len(asked.SerializeToString())


def test_a_call_that_is_cancelled_is_a_line_too(tmp_path: Path) -> None:
    source, log = bundles.double_plus(tmp_path / "tiny.bundle").path, tmp_path / "access.jsonl"
    answers: Queue[Any] = Queue()
    with (
        serve.start(source, grpc_port=0, access_log=str(log), max_batch=64, max_delay_s=200.0) as running,
        client_of.InferenceServerClient(f"127.0.0.1:{running.grpc_port}") as client,
    ):
        waits = [given(np.ones((40, 3), np.float32))]
        call = client.async_infer("tiny", waits, lambda result, error: answers.put(error))
        page = f"{running.url}/metrics?name[]=trueline_waiting_requests"
        servers.eventually(lambda: re.search(r"^trueline_waiting_requests\S* 1", servers.get(page).text, re.MULTILINE))
        call.cancel()
        assert answers.get(timeout=120) is not None
    (line,) = [line for line in map(json.loads, log.read_text().splitlines()) if line["face"] == "grpc"]
    assert (line["method"], line["status"], line["code"]) == ("ModelInfer", 499, "CANCELLED")
