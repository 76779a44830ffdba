"""Large responses are compressed for clients that accept it, in a thread, and read as they were."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from trueline.web.messages import InlineFuture, Request, Response
from trueline.web.response_encoding import MIN_BYTES, coding_for, encode
from worlds import bundles, servers
from worlds.connections import get, world

LARGE = Response(200, b"0.125," * 20_000)


def accepting(value: str, method: str = "GET") -> Request:
    return Request(method, b"/", {b"accept-encoding": value.encode()} if value else {}, b"")


@pytest.mark.parametrize(
    ("accepts", "coding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate, br", "gzip"),
        ("*", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0, deflate;q=0.5", "deflate"),
        ("br", None),
        ("identity", None),
        ("gzip;q=0", None),
        ("", None),
    ],
)
def test_the_coding_is_one_that_the_client_accepts(accepts: str, coding: str | None) -> None:
    assert coding_for(accepting(accepts), LARGE) == coding


def test_small_bodies_heads_and_what_is_encoded_already_are_sent_as_they_are() -> None:
    assert coding_for(accepting("gzip"), Response(200, b"0" * (MIN_BYTES - 1))) is None
    assert coding_for(accepting("gzip", "HEAD"), LARGE) is None
    assert coding_for(accepting("gzip"), encode(LARGE, "gzip")) is None
    assert coding_for(accepting("gzip"), Response(200, LARGE.body, b"image/png")) is None


def test_raw_tensors_are_compressed_only_for_a_client_that_accepts_nothing_else() -> None:
    raw = Response(200, LARGE.body, b"application/octet-stream")
    assert coding_for(accepting("gzip, deflate"), raw) is None
    assert coding_for(accepting("gzip"), raw) == "gzip"


@pytest.mark.parametrize(("coding", "decompress"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_what_was_compressed_reads_as_it_was(coding: str, decompress: Any) -> None:
    made = encode(LARGE, coding)
    assert decompress(made.body) == LARGE.body
    assert b"content-encoding: %b\r\nvary: accept-encoding\r\n" % coding.encode() in made.headers


def test_compression_leaves_the_loop_and_keeps_the_order_of_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world()
    jobs: list[tuple[InlineFuture, Any]] = []

    def in_thread(_: object, call: Any, *arguments: Any) -> InlineFuture:
        jobs.append((InlineFuture(), lambda: call(*arguments)))
        return jobs[-1][0]

    monkeypatch.setattr(made.clock, "run_in_executor", in_thread, raising=False)
    monkeypatch.setattr(made.app, "answer", lambda request: LARGE if request.path == "/large" else Response(200, b"s"))
    assert made.send(get("/large", "accept-encoding: gzip") + get("/small")) == b""
    ((future, work),) = jobs
    future.set_result(work())
    while made.clock.turn():
        pass
    head, _, rest = made.wire.written.partition(b"\r\n\r\n")
    assert b"content-encoding: gzip" in head
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    assert gzip.decompress(rest[:length]) == LARGE.body
    assert rest[length:].startswith(b"HTTP/1.1 200")
    assert rest.endswith(b"\r\n\r\ns")


@pytest.mark.slow
def test_a_client_of_a_server_gets_the_same_answer_compressed(tmp_path: Path) -> None:
    rows = [[float(number), 0.5, -1.25] for number in range(8000)]
    with servers.running(bundles.double_plus(tmp_path / "b").path) as server:
        url = f"{server.url}/v1/models/tiny:predict"
        plain = servers.post(url, json={"instances": rows}, headers={"accept-encoding": "identity"})
        packed = servers.post(url, json={"instances": rows}, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) // 2
    assert json.loads(packed.content) == json.loads(plain.content)
