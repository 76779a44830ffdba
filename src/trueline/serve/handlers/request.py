"""An HTTP request as what a handler is given: parameters by name, and headers. Pure.

    content type                          parameters
    multipart/form-data                   each part by its field's name
    application/x-www-form-urlencoded     each field; a body that is no form (`curl -d '[1, 2]'`) is the body
    anything else                         `body`

As in TorchServe the query is passed on by its older routes alone, as further parameters, and the headers `explain` and
`url_path` are added. The `authorization` header is the server's, and stays with it.
"""

from __future__ import annotations

import uuid
from typing import Literal
from urllib.parse import parse_qsl

from trueline.errors import RequestError, TooLarge
from trueline.serve.models.servable import Ask
from trueline.web.messages import Request, query_of

MAX_PARTS = 256
_KEPT_BACK = (b"authorization", b"proxy-authorization", b"cookie")
_Parts = list[tuple[str, str, bytes | bytearray]]


def read(request: Request, *, explain: bool, url_path: str = "", query: bool = False) -> Ask:
    """What the handler gets. Raises RequestError for a form that cannot be read."""
    said = request.headers.get(b"content-type", b"").decode("latin-1")
    kind = said.partition(";")[0].strip().lower()
    parts: _Parts = []
    if kind == "multipart/form-data":
        parts = _multipart(said, request.body)
    elif kind == "application/x-www-form-urlencoded":
        parts = _form(request.body)
    asked = query_of(request.target) if query else {}
    if not parts and (request.body or not asked):
        parts = [("body", said, request.body)]
    parts += [(name, "", value.encode()) for name, value in asked.items()]
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in request.headers.items()
        if name not in _KEPT_BACK
    }
    told: Literal["True", "False"] = "True" if explain else "False"
    headers |= {"explain": told} | ({"url_path": url_path} if url_path else {})
    return Ask(request_id=str(uuid.uuid4()), parts=parts, headers=headers)


def _form(body: bytes | bytearray) -> _Parts:
    """The fields of a form; none when it is no form."""
    try:
        fields = parse_qsl(bytes(body), keep_blank_values=True, strict_parsing=True, max_num_fields=MAX_PARTS)
        return [(name.decode("utf-8"), "", value) for name, value in fields]
    except (ValueError, UnicodeDecodeError):
        return []


def _multipart(said: str, body: bytes | bytearray) -> _Parts:
    from werkzeug.exceptions import RequestEntityTooLarge
    from werkzeug.http import parse_options_header
    from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

    boundary = parse_options_header(said)[1].get("boundary", "")
    if not 0 < len(boundary) <= 200:
        raise RequestError("a multipart body needs the boundary that its content type names")
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), max_parts=MAX_PARTS)
    parts: _Parts = []
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
