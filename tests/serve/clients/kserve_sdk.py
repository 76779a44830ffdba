"""What a user of KServe's own SDK does, unmodified; run by the SDK's interpreter: kserve_sdk.py URL GRPC_ADDRESS.

The model `tiny` answers 2 x + 1 for x of shape [batch, 3].
"""

import asyncio
import sys
from collections.abc import Awaitable

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

URL, GRPC = sys.argv[1:]
RECORDS = np.arange(6, dtype=np.float32).reshape(2, 3)
WANTED = (2 * RECORDS + 1).tolist()


def request(binary: bool) -> InferRequest:
    given = InferInput(name="x", shape=[2, 3], datatype="FP32")
    given.set_data_from_numpy(RECORDS, binary_data=binary)
    return InferRequest(model_name="tiny", infer_inputs=[given], request_id="7")


async def refused(call: Awaitable[object]) -> int:
    """The status of a call that has to fail."""
    try:
        answer = await call
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    raise AssertionError(f"answered: {answer}")


async def first_protocol() -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    assert await client.is_server_live(URL)
    assert await client.is_model_ready(URL, "tiny")
    answer = await client.infer(URL, {"instances": RECORDS.tolist()}, model_name="tiny")
    assert answer == {"predictions": WANTED}, answer
    assert await refused(client.explain(URL, "tiny", {"instances": RECORDS.tolist()})) == 404


async def second_protocol() -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(URL)
    assert await client.is_server_ready(URL)
    assert await client.is_model_ready(URL, "tiny")
    for binary in (False, True):
        answer = await client.infer(URL, request(binary), model_name="tiny")
        assert answer.id == "7", answer
        assert answer.outputs[0].as_numpy().tolist() == WANTED, answer
    assert await refused(client.infer(URL, request(False), model_name="zzz")) == 404


async def by_grpc() -> None:
    client = InferenceGRPCClient(GRPC)
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("tiny")
    for binary in (False, True):
        answer = await client.infer(request(binary))
        assert answer.outputs[0].as_numpy().reshape(2, 3).tolist() == WANTED, answer
    await client.close()


async def main() -> None:
    await first_protocol()
    await second_protocol()
    await by_grpc()
    print("all calls of the SDK were answered")


asyncio.run(main())
