"""Parameters of TorchServe's management calls: of the query, or of a JSON body.

Source: TorchServe 0.12's NettyUtils and RegisterModelRequest, which take the default for a number that is none.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from trueline.errors import RequestError
from trueline.serve.models.sources import NotInStore
from trueline.web.messages import Request

_INT = re.compile(r"[+-]?[0-9]{1,10}")
_LONG = re.compile(r"[+-]?[0-9]+")
_LOW, _HIGH = -(2**31), 2**31 - 1
"""Of Java's int."""


def parse_int(text: str | None, default: int) -> int:
    """An integer of 32 bits; for anything else TorchServe takes the default.

    >>> parse_int("+8", 1), parse_int("1_0", 1), parse_int("99999999999", 1), parse_int("", 1)
    (8, 1, 1, 1)
    """
    if text is None or not _INT.fullmatch(text):
        return default
    return int(text) if _LOW <= int(text) <= _HIGH else default


def workers_of(given: Mapping[str, str], name: str, default: int, *, strict: bool = False) -> int:
    """A number of workers. As `parse_int`, but one that is too large for 32 bits stays, and the server refuses it by
    name; with `strict` it is the default, as in TorchServe.

    >>> workers_of({"min_worker": "99999999999"}, "min_worker", 1), workers_of({"min_worker": "x"}, "min_worker", 1)
    (99999999999, 1)
    """
    text = given.get(name, "")
    if strict:
        return parse_int(text, default)
    return int(text[:100]) if _LONG.fullmatch(text) else default


def number_of(query: Mapping[str, str], name: str, default: float) -> float:
    """Raises RequestError."""
    try:
        return float(query.get(name, default))
    except ValueError as error:
        raise RequestError(f"{name} is a number, got '{query[name][:32]}'") from error


def url_of(given: Mapping[str, str]) -> str:
    """Raises RequestError, NotInStore."""
    if "url" not in given:
        raise RequestError("Parameter url is required.")
    if not given["url"]:
        raise NotInStore("empty url")
    return given["url"]


def parameters_of(request: Request) -> dict[str, str]:
    """Parameters from a JSON body, without those that are no scalar; another body is ignored, as in TorchServe."""
    if b"json" not in request.headers.get(b"content-type", b"").lower() or not request.body:
        return {}
    try:
        found = msgspec.json.decode(request.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON object of parameters: {error}") from error
    scalars = {name: value for name, value in found.items() if isinstance(value, str | int | float)}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in scalars.items()}
