"""The access log: a line for each request, on a full or slow disk too, and never a request that waits for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import UsageError
from trueline.web import access_log
from trueline.web.access_log import AccessLog, AccessLogMiddleware
from trueline.web.messages import Request, Response
from worlds.servers import Answers

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AccessLog]]:
    """Logs that are written when a test says so."""
    monkeypatch.setattr(access_log, "FLUSH_S", 1000.0)
    logs: list[AccessLog] = []

    def make(path: Path | str, **options: int) -> AccessLog:
        logs.append(AccessLog(str(path), **options))
        return logs[-1]

    yield make
    for log in logs:
        log.close()


def request(**headers: str) -> Request:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Request("POST", b"/v2/models/a%20b/infer?token=secret", given, b"12345")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_a_line_that_says_what_became_of_it(tmp_path: Path, opened: Any) -> None:
    log = opened(tmp_path / "access.jsonl")
    AccessLogMiddleware(Answers(Response(200, b"abc")), "data", log).answer(request(x_request_id="r-1"))
    AccessLogMiddleware(Answers(None), "management", log).refuse("/models", 413, "too large")
    log.flush()
    answered, refused = lines(tmp_path / "access.jsonl")
    assert answered["at"] > 1.7e9
    assert answered["ms"] >= 0
    del answered["at"], answered["ms"]
    assert answered == {
        "face": "data", "method": "POST", "path": "/v2/models/a b/infer", "status": 200, "bytes_in": 5, "bytes_out": 3,
        "id": "r-1",
    }  # fmt: skip
    assert (refused["face"], refused["status"], refused["path"], refused["id"]) == ("management", 413, "/models", None)
    assert "secret" not in (tmp_path / "access.jsonl").read_text()


def test_an_answer_that_comes_later_is_entered_then_and_one_whose_client_went_is_499(
    tmp_path: Path, opened: Any
) -> None:
    log = opened(tmp_path / "access.jsonl")

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        later, never = loop.create_future(), loop.create_future()
        for answer in (later, never):
            AccessLogMiddleware(Answers(answer), "data", log).answer(request())
        log.flush()
        assert not (tmp_path / "access.jsonl").read_text()
        later.set_result(Response(503, b""))
        never.cancel()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    log.flush()
    assert [line["status"] for line in lines(tmp_path / "access.jsonl")] == [503, 499]


def test_what_finds_no_room_is_counted(tmp_path: Path, opened: Any) -> None:
    log = opened(tmp_path / "access.jsonl", max_waiting=2)
    app = AccessLogMiddleware(Answers(Response(200, b"")), "data", log)
    for _ in range(5):
        app.answer(request())
    log.flush()
    app.answer(request())
    log.flush()
    assert [line.get("dropped", line.get("status")) for line in lines(tmp_path / "access.jsonl")] == [200, 200, 3, 200]


def test_a_full_disk_costs_lines_that_are_counted_when_there_is_room_again(tmp_path: Path, opened: Any) -> None:
    link = tmp_path / "access.jsonl"
    link.symlink_to("/dev/full")
    log = opened(link)
    app = AccessLogMiddleware(Answers(Response(200, b"")), "data", log)
    app.answer(request())
    log.flush()
    link.unlink()
    app.answer(request())
    log.flush()
    assert [line.get("dropped", line.get("status")) for line in lines(link)] == [200, 1]


def test_a_file_that_was_moved_away_is_opened_anew_under_its_name(tmp_path: Path, opened: Any) -> None:
    path = tmp_path / "access.jsonl"
    log = opened(path)
    app = AccessLogMiddleware(Answers(Response(200, b"")), "data", log)
    app.answer(request())
    log.flush()
    path.rename(tmp_path / "access.1")
    app.answer(request())
    log.flush()
    assert len(lines(path)) == len(lines(tmp_path / "access.1")) == 1


def test_the_end_writes_what_is_left(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "access.jsonl"))
    AccessLogMiddleware(Answers(Response(200, b"")), "data", log).answer(request())
    log.close()
    assert len(lines(tmp_path / "access.jsonl")) == 1


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the access log .* cannot be written: No such file or directory"):
        AccessLog(str(tmp_path / "none" / "access.jsonl"))


def test_no_byte_of_a_line_controls_a_terminal_or_begins_a_line_of_its_own(tmp_path: Path, opened: Any) -> None:
    """The class of CVE-2024-0095. U+0085, U+009B and the marks that reverse text are printable bytes of UTF-8."""
    log = opened(tmp_path / "access.jsonl")
    path = "/a%0a{%22forged%22:1}%1b[2J%c2%9b31m%e2%80%ae%c2%85%e2%80%a8x"
    asked = Request("GET", path.encode(), {b"x-request-id": b"\x9b31m\x85"}, b"")
    AccessLogMiddleware(Answers(Response(200, b"")), "data", log).answer(asked)
    log.flush()
    raw = (tmp_path / "access.jsonl").read_bytes()
    assert raw.endswith(b"\n")
    assert raw[:-1].decode("ascii").isprintable()
    (line,) = lines(tmp_path / "access.jsonl")
    assert line["path"] == '/a\n{"forged":1}\x1b[2J\x9b31m\u202e\x85\u2028x'
    assert line["id"] == "\x9b31m\x85"
