"""What all gRPC services share: status codes, authentication, errors, the listener. Imported only where it is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as Any_
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from trueline import events
from trueline.errors import PortInUse, RequestError
from trueline.serve.faults import find_fault
from trueline.serve.protocols.dispatch import BytesInFlight, retry_after_s
from trueline.web.access_log import CLIENT_CLOSED, AccessLog, GrpcCallLog

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
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
FAILED = "the model failed on this request; the server's log says why"

HANDSHAKE_S, IDLE_S = 10, 300
"""A connection has this long until it speaks HTTP/2, and is closed when it has had no call for this long."""

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[str, Context], None]
"""Rejects a call of a method by raising RequestError."""
Read = Callable[[bytes], Awaitable[Any]]
"""The request in a message's bytes. Raises RequestError."""


def code_of(error: RequestError) -> grpc.StatusCode:
    """The status code for a rejected call.

    >>> code_of(RequestError("no")).name
    'INVALID_ARGUMENT'
    """
    usual = grpc.StatusCode.INTERNAL if error.status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    return CODES.get(error.status, usual)


def header(context: Context, name: str) -> bytes | None:
    """A value in the call's metadata."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value.encode() if isinstance(value, str) else bytes(value)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthInterceptor:
    """Wraps the methods of one service: checks the caller, maps errors to status codes, and writes the access log."""

    service: str
    check: Check
    code: Callable[[RequestError], grpc.StatusCode] = code_of
    log: AccessLog | None = None
    face: str = "grpc"
    in_flight: BytesInFlight = field(default_factory=BytesInFlight)

    def unary(
        self, name: str, kind: type[Any] | Read, answer: Callable[[Any, Context], Awaitable[Any]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """One request, one response. An exception becomes the call's status, without internal details.

        `kind` is the request's message, or reads its bytes.
        """

        async def call(data: bytes, context: Context) -> bytes:
            line = self._line(name, data, context)
            try:
                self.check(name, context)
                with self.in_flight.hold(len(data)):
                    request = line.note_model(await _read(kind, data))
                    response: bytes = (await answer(request, context)).SerializeToString()
            except BaseException as error:  # noqa: BLE001 - blind on purpose: one call fails, never the server
                return await self._end(line, error, context)
            line.end(len(response))
            return response

        return grpc.unary_unary_rpc_method_handler(call)

    def server_stream(
        self, name: str, kind: type[Any], answers: Callable[[Any, Context], AsyncIterator[Any]]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """One request, a stream of responses."""

        async def call(data: bytes, context: Context) -> AsyncIterator[bytes]:
            line, size = self._line(name, data, context), 0
            try:
                self.check(name, context)
                with self.in_flight.hold(len(data)):
                    request = line.note_model(await _read(kind, data))
                    async for answer in answers(request, context):
                        piece: bytes = answer.SerializeToString()
                        size += len(piece)
                        yield piece
            except BaseException as error:  # noqa: BLE001 - blind on purpose: one call fails, never the server
                await self._end(line, error, context)
                return
            line.end(size)

        return grpc.unary_stream_rpc_method_handler(call)

    def bidirectional(
        self,
        name: str,
        kind: type[Any] | Read,
        answers: Callable[[Any, Context], AsyncIterator[Any]],
        encode_error: Callable[[Any, grpc.StatusCode, str], Any],
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A stream of requests, each answered in order by `answers`. A request that fails is answered with
        `encode_error` and does not end the stream; one without the right token ends it. Each has a line in the access
        log.
        """

        async def call(stream: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            async for data in stream:
                line, size = self._line(name, data, context), 0
                request = None
                try:
                    self.check(name, context)
                    with self.in_flight.hold(len(data)):
                        request = line.note_model(await _read(kind, data))
                        async for answer in answers(request, context):
                            piece: bytes = answer.SerializeToString()
                            size += len(piece)
                            yield piece
                except Exception as error:  # noqa: BLE001 - blind on purpose: one request fails, never the stream
                    if request is None:
                        await self._end(line, error, context)
                        return
                    code, message = self._describe(name, find_fault(error) or error)
                    piece = encode_error(request, code, message).SerializeToString()
                    line.end(size + len(piece), status=_status(error), code=code.name)
                    yield piece
                except BaseException as error:  # noqa: BLE001 - a cancelled call is logged, and the error raised again
                    await self._end(line, error, context)
                else:
                    line.end(size)

        return grpc.stream_stream_rpc_method_handler(call)

    def _line(self, name: str, data: bytes, context: Context) -> GrpcCallLog:
        named = None if self.log is None else header(context, "x-request-id")
        return GrpcCallLog(self.log, self.face, f"/{self.service}/{name}", len(data), named)

    def _describe(self, name: str, error: Exception) -> tuple[grpc.StatusCode, str]:
        """Status code and message for the client."""
        if isinstance(error, RequestError):
            hint = f"; {error.hint}" if error.hint else ""
            return self.code(error), error.message + hint
        events.emit("request.failed", path=name, why=f"{type(error).__name__}: {error}")
        return grpc.StatusCode.INTERNAL, FAILED

    async def _end(self, line: GrpcCallLog, error: BaseException, context: Context) -> NoReturn:
        """Logs the call and ends it with the status of `error`."""
        if not isinstance(error, Exception):
            left_s = context.time_remaining()
            late = left_s is not None and left_s <= 0
            line.end(0, status=504 if late else CLIENT_CLOSED, code="DEADLINE_EXCEEDED" if late else "CANCELLED")
            raise error
        error = find_fault(error) or error
        code, message = self._describe(line.path.rpartition("/")[2], error)
        line.end(0, status=_status(error), code=code.name)
        wait_s = retry_after_s(error)
        await context.abort(code, message, () if wait_s is None else encode_retry(code, message, wait_s))


def encode_retry(code: grpc.StatusCode, message: str, wait_s: int) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata that asks a client to come back after `wait_s`, in the three forms that clients read.

    Sources: gRPC A6 (client retries, pushback), google.rpc.RetryInfo and google.rpc.Status, whose few fields are
    written here: 1 = code, 2 = message, 3 = details; 1 = retry_delay.
    """
    delay = Duration(seconds=wait_s).SerializeToString()
    info = Any_(type_url="type.googleapis.com/google.rpc.RetryInfo", value=_field(1, delay)).SerializeToString()
    status = bytes((1 << 3, code.value[0])) + _field(2, message.encode()) + _field(3, info)
    return (
        ("retry-after", str(wait_s)),
        ("grpc-retry-pushback-ms", str(1000 * wait_s)),
        ("grpc-status-details-bin", status),
    )


def _field(number: int, value: bytes) -> bytes:
    """A field of bytes in the wire format of protobuf."""
    size, head = len(value), bytearray((number << 3 | 2,))
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes((size,)) + value


async def _read(kind: type[Any] | Read, data: bytes) -> Any:
    """Raises RequestError for bytes that are no such message."""
    if not isinstance(kind, type):
        return await kind(data)
    message: Any = kind
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise RequestError(f"the call's bytes are no {kind.__name__}") from error


def _status(error: Exception) -> int:
    error = find_fault(error) or error
    return error.status if isinstance(error, RequestError) else 500


async def serve(
    handlers: Sequence[grpc.GenericRpcHandler[Any, Any]],
    host: str,
    port: int,
    *,
    body_bytes: int,
    connections: int,
    credentials: Any = None,
    shared: bool = False,
) -> tuple[grpc.aio.Server, int]:
    """A server on `host` and `port` (0: any free one), and its port; `shared` with other processes. Raises PortInUse.

    With `credentials` it serves TLS.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S),
            ("grpc.max_connection_idle_ms", 1000 * IDLE_S),
        ]
    )
    server.add_generic_rpc_handlers(tuple(handlers))
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    except RuntimeError as error:
        raise PortInUse(
            f"port {port} on {host} is in use or not permitted: gRPC cannot listen on it",
            hint="stop the process that listens on it, or choose another port (0 takes a free one)",
        ) from error
    await server.start()
    return server, bound
