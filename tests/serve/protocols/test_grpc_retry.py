"""A refused gRPC call says when to come back, in the forms that clients read."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

from trueline.errors import NotReady, Overloaded, RequestError
from trueline.serve.protocols import grpc_base
from trueline.torchserve.grpc import _Refused
from trueline.web.messages import Response


def status_class() -> Any:
    """google.rpc.Status, from its published fields."""
    file = descriptor_pb2.FileDescriptorProto(name="status.proto", package="t", syntax="proto3")
    file.dependency.append("google/protobuf/any.proto")
    made = file.message_type.add(name="Status")
    made.field.add(name="code", number=1, type=5, label=1)
    made.field.add(name="message", number=2, type=9, label=1)
    made.field.add(name="details", number=3, type=11, label=3, type_name=".google.protobuf.Any")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.FileDescriptorProto.FromString(_any_file()).SerializeToString())
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Status"))


def _any_file() -> bytes:
    found: bytes = AnyMessage.DESCRIPTOR.file.serialized_pb
    return found


@pytest.mark.parametrize("message", ["full", "ü" * 5000, ""])
@pytest.mark.parametrize("wait_s", [1, 10, 3600])
def test_the_details_are_a_status_with_a_retry_info(message: str, wait_s: int) -> None:
    sent = dict(grpc_base.encode_retry(grpc.StatusCode.UNAVAILABLE, message, wait_s))
    assert (sent["retry-after"], sent["grpc-retry-pushback-ms"]) == (str(wait_s), str(1000 * wait_s))
    status = status_class().FromString(sent["grpc-status-details-bin"])
    assert (status.code, status.message) == (14, message)
    (detail,) = status.details
    assert detail.type_url == "type.googleapis.com/google.rpc.RetryInfo"
    assert detail.value[:1] == b"\x0a", "retry_delay is the field 1"
    assert Duration.FromString(detail.value[2:]).seconds == wait_s


@pytest.mark.parametrize(
    ("error", "wait"),
    [
        (NotReady("loads", retry_after_s=1.0), "1"),
        (Overloaded("full", retry_after_s=6.7), "7"),
        (_Refused(Response(503, b'{"message": "loads"}', headers=b"pragma: no-cache\r\nretry-after: 10\r\n")), "10"),
        (_Refused(Response(404, b'{"error": "none"}')), None),
        (NotReady("no worker"), None),
        (RequestError("no"), None),
    ],
)
def test_a_client_gets_the_time_with_the_status(error: RequestError, wait: str | None) -> None:
    async def answer(request: bytes, context: Any) -> Any:
        raise error

    async def read(data: bytes) -> bytes:
        return data

    async def scene() -> Any:
        interceptor = grpc_base.AuthInterceptor(service="s", check=lambda name, context: None)
        handlers = grpc.method_handlers_generic_handler("s", {"M": interceptor.unary("M", read, answer)})
        server, port = await grpc_base.serve([handlers], "127.0.0.1", 0, body_bytes=2**20, connections=9)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary("/s/M")(b"")
            except grpc.aio.AioRpcError as refused:
                return refused
            finally:
                await server.stop(None)

    refused = asyncio.run(scene())
    assert refused.details() == error.message
    assert refused.code() == grpc_base.code_of(error)
    assert dict(refused.trailing_metadata()).get("retry-after") == wait
