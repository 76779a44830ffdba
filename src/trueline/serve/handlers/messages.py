"""HTTP requests as what a handler gets, parameters by name and headers; its answers as HTTP responses. Pure.

    content type                          parameters
    multipart/form-data                   each part by its field's name
    application/x-www-form-urlencoded     each field; a body that is no form (`curl -d '[1, 2]'`) is the body
    anything else                         `body`

As in TorchServe, only its older routes pass the query on, as further parameters, and the headers `explain` and
`url_path` are added. The server keeps the `authorization` header.
"""

import os
import uuid
from urllib.parse import parse_qsl

from trueline.errors import RequestError, TooLarge
from trueline.serve.models.servable import HandlerAnswer, HandlerRequest
from trueline.web.body import Body
from trueline.web.messages import JSON, Request, Response, query_of

MAX_PARTS = 256
_SERVER_ONLY = (b"authorization", b"proxy-authorization", b"cookie")
_NO_CACHE = (
    b"pragma: no-cache\r\n"
    b"cache-control: no-cache; no-store, must-revalidate, private\r\n"
    b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
_MULTIPART, _URLENCODED = "multipart/form-data", "application/x-www-form-urlencoded"
Parts = list[tuple[str, str, Body]]


def form_of(request: Request) -> str:
    """The content type of a body that is a form; empty for another one."""
    content_type = request.headers.get(b"content-type", b"").decode("latin-1")
    return content_type if content_type.partition(";")[0].strip().lower() in (_MULTIPART, _URLENCODED) else ""


def decode_parts(body: Body, content_type: str) -> Parts:
    """The parts of a form; empty for a body that is none. Raises RequestError for one that cannot be read."""
    if content_type.partition(";")[0].strip().lower() == _MULTIPART:
        return _multipart(content_type, body)
    return _form(body)


def decode_request(
    request: Request, form: Parts | None = None, *, explain: bool, url_path: str = "", query: bool = False
) -> HandlerRequest:
    """`form` are the parts of a body that is a form, if they are known. Raises RequestError."""
    content_type = request.headers.get(b"content-type", b"").decode("latin-1")
    kind = form_of(request) if form is None else ""
    parts = decode_parts(request.body, kind) if kind else form or []
    parameters = query_of(request.target) if query else {}
    if not parts and (request.body or not parameters):
        parts = [("body", content_type, request.body)]
    parts += [(name, "", value.encode()) for name, value in parameters.items()]
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in request.headers.items()
        if name not in _SERVER_ONLY
    }
    headers |= {"explain": str(explain)} | ({"url_path": url_path} if url_path else {})
    return HandlerRequest(request_id=str(uuid.uuid4()), parts=parts, headers=headers)


def _form(body: Body) -> Parts:
    """The fields of a form; empty if it is no form."""
    try:
        fields = parse_qsl(bytes(body), keep_blank_values=True, strict_parsing=True, max_num_fields=MAX_PARTS)
        return [(name.decode("utf-8"), "", value) for name, value in fields]
    except (ValueError, UnicodeDecodeError):
        return []


def _multipart(content_type: str, body: Body) -> Parts:
    from werkzeug.exceptions import RequestEntityTooLarge
    from werkzeug.http import parse_options_header
    from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

    boundary = parse_options_header(content_type)[1].get("boundary", "")
    if not 0 < len(boundary) <= 200:
        raise RequestError("a multipart body needs the boundary that its content type names")
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), max_parts=MAX_PARTS)
    parts: Parts = []
    try:
        decoder.receive_data(bytes(body))
        decoder.receive_data(None)
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, Field | File):
                if not isinstance(event.name, str):
                    raise RequestError(f"part {len(parts) + 1} of the form has no name")
                parts.append((event.name, event.headers.get("content-type", ""), bytearray()))
            elif isinstance(event, Data):
                value = parts[-1][2]
                assert isinstance(value, bytearray)
                value += event.data
    except RequestEntityTooLarge as error:
        raise TooLarge(f"the form has more than {MAX_PARTS} parts") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no multipart form: {error}") from error
    return parts


def reply(status: int, body: bytes, extra: bytes = b"") -> Response:
    """A response with TorchServe's headers; as there, errors close the connection."""
    token = os.urandom(16).hex()
    request_id = f"x-request-id: {token[:8]}-{token[8:12]}-{token[12:16]}-{token[16:20]}-{token[20:]}\r\n"
    return Response(status, body, JSON, request_id.encode() + _NO_CACHE + extra, close=status >= 400)


def encode_answer(answer: HandlerAnswer) -> Response:
    """As in TorchServe, with a content type only if the handler set one."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name != "content-type")
    if answer.pieces is not None:
        lines += "ts_stream_next: true\r\n"
    made = reply(answer.status, bytes(answer.body), lines.encode("latin-1", "replace"))
    made.content_type = answer.headers.get("content-type", "").encode("latin-1", "replace")
    made.pieces = answer.pieces
    return made
