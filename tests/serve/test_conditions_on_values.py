"""A version that was proven for finite numbers refuses others on every path, and no other request pays for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.bundle.values import Values
from trueline.serve.batching.policy import Policy
from trueline.web.messages import Request, Response
from trueline.wire import inference_pb2 as pb
from worlds import bundles, servers
from worlds.servers import TinyApp

FINITE = Values(finite=True)
PATH = "/v2/models/tiny/infer"
GOOD, BAD = [1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]
WORDS = "input 'x' has nan at [0, 1], proven only for values that are finite"


def binary(row: list[float]) -> tuple[bytes, dict[str, str]]:
    """A request with its tensor behind the JSON; JSON itself has no NaN."""
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": 12}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"content_type": "application/octet-stream", "inference_header_content_length": str(len(head))}
    return head + np.array(row, np.float32).tobytes(), headers


def said(response: Response) -> str:
    return str(json.loads(response.body)["error"])


@pytest.mark.parametrize("inline", [True, False])
def test_a_nan_is_refused_and_the_same_form_is_answered_before_and_after(inline: bool, tmp_path: Path) -> None:
    with TinyApp(tmp_path, inline=inline, values=FINITE) as app:
        for _ in range(6):  # the first requests teach the fast path
            for row, status in ((GOOD, 200), (BAD, 400), (GOOD, 200)):
                body, headers = binary(row)
                found = app.ask("POST", PATH, body, **headers)
                assert found.status == status
                if status == 400:
                    assert WORDS in said(found)
        assert app.tiny.stats.failed == 0  # the request's fault, not the program's


def test_a_repeated_form_of_a_conditional_version_is_answered_on_the_fast_path(tmp_path: Path) -> None:
    with TinyApp(tmp_path, values=FINITE) as app:
        body, headers = binary(GOOD)
        for _ in range(4):
            assert app.ask("POST", PATH, body, **headers).status == 200
        assert app.tiny.bound_runs is not None
        assert app.tiny.bound_runs.kinds


def test_a_record_with_nan_gets_its_own_400_and_its_batch_is_answered(tmp_path: Path) -> None:
    with TinyApp(
        tmp_path, inline=False, policy=Policy(batch=True, max_batch=8, max_delay_s=0.01), values=FINITE
    ) as app:

        async def ask_all() -> list[Response]:
            waiting: list[Any] = []
            for row in (GOOD, BAD, GOOD, GOOD, BAD):
                body, headers = binary(row)
                named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
                waiting.append(app.routes.answer(Request("POST", PATH.encode(), named, body)))
            done = [asyncio.ensure_future(_finish(one)) for one in waiting]
            return list(await asyncio.gather(*done))

        found = app.loop.run_until_complete(ask_all())
        assert [one.status for one in found] == [200, 400, 200, 200, 400]


async def _finish(answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    answer.add_done_callback(lambda one: done.set_result(one.result()))
    return await done


@pytest.mark.slow
def test_every_protocol_refuses_it_and_the_description_says_the_range(tmp_path: Path) -> None:
    import grpc

    bundles.double_plus(tmp_path / "tiny.bundle", values=Values(low=0.0, high=11.0))
    with servers.running(tmp_path / "tiny.bundle", name="tiny", grpc_port=0) as server:
        for row, status in ((GOOD, 200), ([1.0, -2.0, 3.0], 400)):
            tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": row}
            for path, body in (("v2/models/tiny/infer", {"inputs": [tensor]}), ("predictions/tiny", row)):
                found = servers.post(f"{server.url}/{path}", json=body)
                assert found.status_code == status, path
                assert status == 200 or "has -2.0 at" in found.text
            asked = pb.ModelInferRequest(model_name="tiny")
            given = asked.inputs.add(name="x", datatype="FP32", shape=[1, 3])
            given.contents.fp32_contents.extend(row)
            with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
                infer = channel.unary_unary(
                    "/inference.GRPCInferenceService/ModelInfer",
                    request_serializer=pb.ModelInferRequest.SerializeToString,
                    response_deserializer=pb.ModelInferResponse.FromString,
                )
                if status == 200:
                    assert infer(asked).outputs[0].name == "y"
                else:
                    with pytest.raises(grpc.RpcError) as refused:
                        infer(asked)
                    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "x is from 0 to 11" in servers.get(f"{server.url}/openapi.json").text
