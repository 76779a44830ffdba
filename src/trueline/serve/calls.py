"""What gRPC services here are made with: statuses, tokens, refusals, the listener. Imported where it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from trueline import events
from trueline.errors import PortInUse, RequestError

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
FAILED = "the model failed on this request; the server's log says why"

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[str, Context], None]
"""Refuses a method by raising RequestError."""
Code = Callable[[RequestError], grpc.StatusCode]


def code_of(error: RequestError) -> grpc.StatusCode:
    """The status for a refusal.

    >>> code_of(RequestError("no")).name
    'INVALID_ARGUMENT'
    """
    usual = grpc.StatusCode.INTERNAL if error.status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    return CODES.get(error.status, usual)


def header(context: Context, name: str) -> bytes | None:
    """A value of the call's metadata."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value.encode("latin-1") if isinstance(value, str) else bytes(value)
    return None


def unary(
    name: str,
    kind: type[Any],
    answer: Callable[[Any, Context], Awaitable[Any]],
    check: Check,
    code: Code = code_of,
) -> grpc.RpcMethodHandler[Any, Any]:
    """One question, one answer; what is raised becomes the call's status, and says nothing of our insides."""

    async def call(request: Any, context: Context) -> Any:
        try:
            check(name, context)
            return await answer(request, context)
        except Exception as error:  # noqa: BLE001 - blind on purpose: one call fails, never the server
            await _end(name, error, context, code)

    return grpc.unary_unary_rpc_method_handler(
        call, request_deserializer=kind.FromString, response_serializer=lambda message: message.SerializeToString()
    )


def streamed(
    name: str,
    kind: type[Any],
    answers: Callable[[Any, Context], AsyncIterator[Any]],
    check: Check,
    code: Code = code_of,
) -> grpc.RpcMethodHandler[Any, Any]:
    """One question, answers one after the other."""

    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            check(name, context)
            async for answer in answers(request, context):
                yield answer
        except Exception as error:  # noqa: BLE001 - blind on purpose: one call fails, never the server
            await _end(name, error, context, code)

    return grpc.unary_stream_rpc_method_handler(
        call, request_deserializer=kind.FromString, response_serializer=lambda message: message.SerializeToString()
    )


def both_ways(
    kind: type[Any], answers: Callable[[AsyncIterator[Any], Context], AsyncIterator[Any]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Questions and answers as they come; what fails is told in its answer."""
    return grpc.stream_stream_rpc_method_handler(
        answers, request_deserializer=kind.FromString, response_serializer=lambda message: message.SerializeToString()
    )


async def _end(name: str, error: Exception, context: Context, code: Code) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, RequestError):
        hint = f"; {error.hint}" if error.hint else ""
        await context.abort(code(error), error.message + hint)
    events.emit("request.failed", path=name, why=f"{type(error).__name__}: {error}")
    await context.abort(grpc.StatusCode.INTERNAL, FAILED)


def service(name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> grpc.GenericRpcHandler[Any, Any]:
    """What a server is given."""
    found: grpc.GenericRpcHandler[Any, Any] = grpc.method_handlers_generic_handler(name, dict(methods))
    return found


async def serve(
    handlers: Sequence[grpc.GenericRpcHandler[Any, Any]],
    host: str,
    port: int,
    *,
    body_bytes: int,
    credentials: Any = None,
    shared: bool = False,
) -> tuple[grpc.aio.Server, int]:
    """A server that answers on `host` and `port` (0: a free one), and its port. Raises PortInUse.

    With `credentials` it speaks TLS; a `shared` port is listened on by other processes too.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
        ]
    )
    server.add_generic_rpc_handlers(tuple(handlers))
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as error:
        raise PortInUse(
            f"port {port} on {host} is in use, or not for this user: gRPC cannot listen there",
            hint="stop the process that listens there, or choose another port (0 takes a free one)",
        ) from error
    await server.start()
    return server, found
