"""TorchServe's gRPC clients reach bundles and archives, and are answered in TorchServe's words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from trueline import serve
from trueline.serve import RunningServer
from trueline.torchserve.grpc import INFERENCE, MANAGEMENT
from trueline.wire import torchserve_pb2 as pb
from worlds import archives, bundles, servers

pytestmark = pytest.mark.slow

ECHO = """
    import os
    from ts.handler_utils.utils import send_intermediate_predict_response

    def handle(data, context):
        if data is None:
            return None
        act = data[0].get("act")
        if act == b"exit":
            os._exit(3)
        if act in (b"pieces", b"torn"):
            send_intermediate_predict_response([b"one "], context.request_ids, "", 200, context)
            if act == b"torn":
                raise RuntimeError("in the middle")
            return [b"two"]
        return [{name: str(bytes(value)) for name, value in row.items()} for row in data]
"""
KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def torchserve_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = bundles.store(tmp_path_factory.mktemp("store"), "tiny")
    archives.mar(store / "echo.mar", ECHO, modelName="echo", config="minWorkers: 1")
    ports = {"management_port": 0, "grpc_port": 0, "grpc_management_port": 0}
    keys = store.parent / "key_file.json"
    with servers.running(store=store, load="echo", key_file=keys, allow_code=True, **ports) as server:
        KEYS.update(servers.keys_in(keys))
        yield server


class Client:
    """What TorchServe's generated stubs do: a path of the service, a message in, a message out."""

    def __init__(self, port: int | None, service: str, key: str) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._service = service
        self._metadata = (("authorization", f"Bearer {KEYS[key]}"),)

    def call(self, method: str, request: Any, answer: Any) -> Any:
        made = self._channel.unary_unary(
            f"/{self._service}/{method}", type(request).SerializeToString, answer.FromString
        )
        return made(request, metadata=self._metadata, timeout=120)

    def stream(self, method: str, request: Any, answer: Any) -> list[Any]:
        made = self._channel.unary_stream(
            f"/{self._service}/{method}", type(request).SerializeToString, answer.FromString
        )
        return list(made(request, metadata=self._metadata, timeout=120))

    def talk(self, method: str, requests: Sequence[Any], answer: Any) -> list[Any]:
        made = self._channel.stream_stream(
            f"/{self._service}/{method}", type(requests[0]).SerializeToString, answer.FromString
        )
        return list(made(iter(requests), metadata=self._metadata, timeout=120))


@pytest.fixture
def inference(torchserve_server: RunningServer) -> Client:
    return Client(torchserve_server.grpc_port, INFERENCE, "inference")


@pytest.fixture
def management(torchserve_server: RunningServer) -> Client:
    return Client(torchserve_server.grpc_management_port, MANAGEMENT, "management")


def predict(model: str, version: str = "", sequence: str = "", **values: bytes) -> pb.PredictionsRequest:
    return pb.PredictionsRequest(model_name=model, model_version=version, input=values, sequence_id=sequence)


def refused(call: Any, *arguments: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments)
    return error.value.code(), error.value.details()


def test_fields_have_torchserves_numbers() -> None:
    def numbers(message: Any) -> dict[str, int]:
        return {field.name: field.number for field in message.DESCRIPTOR.fields}

    assert numbers(pb.PredictionsRequest) == {"model_name": 1, "model_version": 2, "input": 3, "sequence_id": 4}
    assert numbers(pb.PredictionResponse) == {"prediction": 1, "sequence_id": 2, "status": 3}
    assert " ".join(numbers(pb.RegisterModelRequest)) == (
        "batch_size handler initial_workers max_batch_delay model_name response_timeout runtime synchronous url "
        "s3_sse_kms startup_timeout"
    ), "1 to 11, in this order"
    assert predict("m", data=b"\x01").SerializeToString() == b"\x0a\x01m\x1a\x09\x0a\x04data\x12\x01\x01"


def test_a_model_is_registered_described_scaled_made_default_and_unregistered(
    management: Client, inference: Client
) -> None:
    def do(method: str, request: Any) -> str:
        found: str = management.call(method, request, pb.ManagementResponse).msg
        return found

    register = pb.RegisterModelRequest(url="tiny.bundle", initial_workers=1, batch_size=8)
    assert do("RegisterModel", register) == 'Model "tiny" Version: 1 registered with 1 initial workers'
    code, why = refused(do, "RegisterModel", register)
    assert (code, why) == (grpc.StatusCode.ALREADY_EXISTS, "Model version 1 is already registered for model tiny")
    described = json.loads(do("DescribeModel", pb.DescribeModelRequest(model_name="tiny")))
    assert (described[0]["modelName"], described[0]["batchSize"]) == ("tiny", 8)
    listed = json.loads(do("ListModels", pb.ListModelsRequest(limit=1)))
    assert ([one["modelName"] for one in listed["models"]], listed["nextPageToken"]) == (["echo"], "1")
    assert do("ScaleWorker", pb.ScaleWorkerRequest(model_name="tiny", min_worker=2)) == "Processing worker updates..."
    default = pb.SetDefaultRequest(model_name="tiny", model_version="1")
    assert do("SetDefault", default) == 'Default version successfully updated for model "tiny" to "1"'
    answer = inference.call("Predictions", predict("tiny", data=b"[1, 2, 3]"), pb.PredictionResponse)
    assert json.loads(answer.prediction) == [3.0, 5.0, 7.0]
    answer = inference.call("Predictions", predict("tiny", "1", x=b"[[1, 2, 3]]"), pb.PredictionResponse)
    assert json.loads(answer.prediction) == [[3.0, 5.0, 7.0]]
    code, why = refused(inference.call, "Predictions", predict("tiny", data=b"[1, 2]"), pb.PredictionResponse)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "'x'" in why
    assert do("UnregisterModel", pb.UnregisterModelRequest(model_name="tiny")) == 'Model "tiny" unregistered'
    code, why = refused(do, "DescribeModel", pb.DescribeModelRequest(model_name="tiny"))
    assert (code, why) == (grpc.StatusCode.NOT_FOUND, "Model not found: tiny")


def test_an_archive_answers_with_its_own_handler_in_pieces_where_it_sends_them(inference: Client) -> None:
    answer = inference.call("Predictions", predict("echo", sequence="s1", data=b"\x00\xff"), pb.PredictionResponse)
    assert (json.loads(answer.prediction), answer.sequence_id) == ({"data": str(b"\x00\xff")}, "s1")
    pieces = inference.stream("StreamPredictions", predict("echo", act=b"pieces"), pb.PredictionResponse)
    assert [one.prediction for one in pieces] == [b"one ", b"two"]
    whole = inference.call("Predictions", predict("echo", act=b"pieces"), pb.PredictionResponse)
    assert whole.prediction == b"one two"
    code, _ = refused(inference.stream, "StreamPredictions", predict("echo", act=b"torn"), pb.PredictionResponse)
    assert code == grpc.StatusCode.UNAVAILABLE, "half an answer is not taken for a whole one"
    told = inference.talk(
        "StreamPredictions2",
        [predict("echo", data=b"a"), predict("nope"), predict("echo", data=b"b")],
        pb.PredictionResponse,
    )
    assert [one.status.code for one in told] == [0, grpc.StatusCode.NOT_FOUND.value[0], 0]


def test_what_goes_wrong_has_a_status_and_words(inference: Client, torchserve_server: RunningServer) -> None:
    assert inference.call("Ping", pb.Nothing(), pb.HealthResponse).health == "Healthy"
    for request, code, words in [
        (predict("zzz", data=b"1"), grpc.StatusCode.NOT_FOUND, "model 'zzz' is not served here"),
        (predict("echo", "9", data=b"1"), grpc.StatusCode.NOT_FOUND, "has no version '9'"),
        (predict("", data=b"1"), grpc.StatusCode.INVALID_ARGUMENT, "Parameter model_name is required."),
        (predict("echo", act=b"exit"), grpc.StatusCode.UNAVAILABLE, "Worker died."),
    ]:
        found, why = refused(inference.call, "Predictions", request, pb.PredictionResponse)
        assert found == code, request
        assert words in why
    wrong = Client(torchserve_server.grpc_port, INFERENCE, "management")
    code, _ = refused(wrong.call, "Predictions", predict("echo", data=b"1"), pb.PredictionResponse)
    assert code == grpc.StatusCode.PERMISSION_DENIED
    servers.eventually(lambda: wrong.call("Ping", pb.Nothing(), pb.HealthResponse).health == "Healthy")  # it is open
    inference = Client(torchserve_server.grpc_management_port, MANAGEMENT, "inference")
    code, _ = refused(inference.call, "ListModels", pb.ListModelsRequest(), pb.ManagementResponse)
    assert code == grpc.StatusCode.PERMISSION_DENIED


def test_strict_statuses_are_torchserves(tmp_path: Path) -> None:
    bundles.double_plus(tmp_path / "tiny.bundle")
    with serve.start(tmp_path / "tiny.bundle", grpc_port=0, torchserve_strict=True) as running:
        KEYS.setdefault("inference", "none")
        client = Client(running.grpc_port, INFERENCE, "inference")
        code, _ = refused(client.call, "Predictions", predict("zzz", data=b"1"), pb.PredictionResponse)
        assert code == grpc.StatusCode.INTERNAL
        code, _ = refused(client.call, "Predictions", predict("tiny", data=b"?"), pb.PredictionResponse)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert servers.get(running.url).status_code == 405
