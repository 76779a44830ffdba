"""Requests as clients send them, and as the best case: what bench/serve.py sends.

clients     every request has a body of its own: 256 floats with all their digits, and an id; and headers of its
            own: traceparent, x-request-id and the length of its body. Each connection has a user agent of its own.
            The headers and their order are those of KServe's SDK (httpx).
best case   one constant body of floats with one decimal, no id, and the same head every time
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Body = Callable[[list[float], str], dict[str, Any]]
"""A request in one server's protocol from the values and an id."""
STREAMS, EACH = 32, 64
"""Connections, and distinct requests of each of them; they are sent again after that."""


def oip(values: list[float], request_id: str) -> dict[str, Any]:
    """In the Open Inference Protocol."""
    tensor = {"name": "x", "shape": [1, len(values)], "datatype": "FP32", "data": values}
    return {"id": request_id, "inputs": [tensor]}


def clients(path: str, body: Body = oip, *, split: bool = False, size: int = 256) -> list[list[Any]]:
    """For each of `STREAMS` connections the requests that it sends, one after the other.

    `split`: each as the pair of head and body, which most HTTP libraries write one after the other.
    """
    rng = np.random.default_rng(7)
    made: list[list[Any]] = []
    for stream in range(STREAMS):
        made.append([])
        for _ in range(EACH):
            values = rng.uniform(-1, 1, size).astype(np.float32).tolist()
            ids = [uuid.UUID(bytes=rng.bytes(16), version=4) for _ in range(3)]
            text = json.dumps(body(values, str(ids[0])), separators=(",", ":")).encode()
            lines = [
                f"POST {path} HTTP/1.1",
                "Host: 127.0.0.1:8080",
                "Accept: */*",
                "Accept-Encoding: gzip, deflate",
                "Connection: keep-alive",
                f"User-Agent: python-httpx/0.28.1 client-{stream}",
                f"traceparent: 00-{ids[1].hex}-{rng.bytes(8).hex()}-01",
                f"x-request-id: {ids[2]}",
                f"Content-Length: {len(text)}",
                "Content-Type: application/json",
            ]
            head = "\r\n".join(lines).encode() + b"\r\n\r\n"
            made[-1].append((head, text) if split else head + text)
    return made


def constant(path: str, body: Body = oip, *, size: int = 256) -> bytes:
    """The request of the best case."""
    values = [round(value, 1) for value in np.random.default_rng(2).uniform(0, 1, size).tolist()]
    text = json.dumps(body(values, "7"), separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


def ids_of(requests: Sequence[bytes]) -> list[str]:
    """The id in the body of each request."""
    return [json.loads(one.partition(b"\r\n\r\n")[2])["id"] for one in requests]
