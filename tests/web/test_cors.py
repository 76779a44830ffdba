"""Pages of the origin that is named read answers, pages of others do not, and nobody gets in who has no token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trueline import serve
from trueline.errors import UsageError
from trueline.torchserve import config as properties
from trueline.web.cors import CorsMiddleware, CorsRule
from trueline.web.messages import InlineFuture, Request, Response, render_plain
from worlds import bundles, servers

OURS = "https://example.org"


def cors(answer: object, origin: str = OURS) -> CorsMiddleware:
    rule = CorsRule.of(origin, "", "x-mine")
    assert rule is not None
    return CorsMiddleware(servers.Answers(answer), rule)


def asked(origin: str | None = OURS, method: str = "POST", **headers: str) -> Request:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Request(method, b"/ping", named | ({} if origin is None else {b"origin": origin.encode()}), b"")


def told(answer: object) -> bytes:
    assert isinstance(answer, Response)
    return render_plain(answer, b"")


def test_an_answer_says_who_may_read_it_to_who_may() -> None:
    shared = Response(200, b"{}", lead=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n")
    assert b"access-control-allow-origin: https://example.org\r\n" in told(cors(shared).answer(asked()))
    assert b"vary: origin" in told(cors(shared).answer(asked()))
    for other in (None, "https://example.org.evil.com", "null"):
        assert b"access-control" not in told(cors(shared).answer(asked(other)))
    assert b"access-control-allow-origin: *\r\n" in told(cors(shared, "*").answer(asked("https://else.where")))
    assert shared.headers == b"", "others are answered with the same"


def test_what_comes_later_is_marked_then_and_withdrawn_with_its_client() -> None:
    later = InlineFuture()
    found = cors(later).answer(asked())
    assert isinstance(found, InlineFuture)
    later.set_result(Response(200, b"{}"))
    assert b"access-control-allow-origin" in told(found.result())
    gone = InlineFuture()
    waiting = cors(gone).answer(asked())
    assert isinstance(waiting, InlineFuture)
    waiting.cancel()
    assert gone.cancelled()
    dropped = InlineFuture()
    passed = cors(dropped).answer(asked())
    assert isinstance(passed, InlineFuture)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        passed.result()


@pytest.mark.parametrize("origin", ["example.org", "https://a.org/path", "https://a.org, https://b.org", "a\r\nb: c"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(UsageError, match="cors_origin"):
        CorsRule.of(origin, "", "")
    with pytest.raises(UsageError, match="need a cors_origin"):
        CorsRule.of("", "GET", "")


@pytest.mark.slow
def test_a_browsers_preflight_needs_no_token_and_opens_no_door(tmp_path: Path) -> None:
    config = tmp_path / "config.properties"
    config.write_text(f"cors_allowed_origin={OURS}\ncors_allowed_methods=POST\ncors_allowed_headers=X-Mine\n")
    found = properties.read(config, {})
    assert not found.ignored
    source = bundles.double_plus(tmp_path / "tiny.bundle").path
    with serve.start(source, key_file=str(tmp_path / "keys.json"), **found.options) as running:
        url = f"{running.url}/predictions/tiny"
        before = servers.options(url, headers={"origin": OURS, "access-control-request-method": "POST"})
        assert before.status_code == 200
        assert before.headers["access-control-allow-methods"] == "POST"
        assert "X-Mine" in before.headers["access-control-allow-headers"]
        refused = servers.post(url, content=b"[1, 2, 3]", headers={"origin": OURS})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == OURS, "the page may read why"
        others = servers.options(url, headers={"origin": "https://else.where", "access-control-request-method": "POST"})
        assert others.status_code == 401
        assert "access-control-allow-origin" not in others.headers
