"""Who has no token is 401, who has the wrong one 403, and nothing else of the server is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trueline.errors import UsageError
from trueline.serve import tokens
from trueline.serve.guard import Guarded
from trueline.serve.http import Request, Response
from trueline.serve.tokens import Forbidden, Unauthorized


class Open:
    """An app that answers everything, and counts what reached it."""

    def __init__(self) -> None:
        self.reached = 0

    def answer(self, request: Request) -> Response:
        self.reached += 1
        return Response(200, b"{}")

    def refuse(self, path: str, status: int, message: str) -> Response:
        return Response(status, message.encode())


def asked(app: Guarded, path: str, token: str | None) -> int:
    headers = {} if token is None else {b"authorization": f"Bearer {token}".encode()}
    found = app.answer(Request("GET", path.encode(), headers, b""))
    assert isinstance(found, Response)
    if found.status == 401:
        assert b"www-authenticate: Bearer" in found.headers
    return found.status


def test_each_token_opens_its_own_doors(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = tokens.read(path)
    token = {kind: one["key"] for kind, one in json.loads(path.read_text()).items()}
    inner = Open()
    data = Guarded(inner, keys, "inference")
    assert asked(data, "/ping", None) == asked(data, "/v2/health/ready", None) == 200
    assert inner.reached == 2
    for path_, kind in (("/predictions/m", "inference"), ("/v2/repository/models/m/load", "management")):
        assert asked(data, path_, None) == 401
        for other in ("inference", "management", "API"):
            assert asked(data, path_, token[other]) == (200 if other == kind else 403)
    assert asked(data, "/predictions/m", token["inference"][:-1]) == 403
    assert asked(data, "/predictions/m", "") == 401
    assert inner.reached == 4
    manager = Guarded(inner, keys, "management")
    assert asked(manager, "/token", token["management"]) == 403
    assert asked(manager, "/token", token["API"]) == 200


def test_a_renewed_token_ends_the_old_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = tokens.read(path)
    old = json.loads(path.read_text())["inference"]["key"]
    keys.renew("inference")
    new = json.loads(path.read_text())["inference"]["key"]
    keys.check("inference", f"bearer {new}".encode())
    with pytest.raises(Forbidden):
        keys.check("inference", f"Bearer {old}".encode())
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_ends_when_it_says(tmp_path: Path) -> None:
    path = tmp_path / "key_file.json"
    entry = {"key": "k" * 20, "expiration time": "2026-11-20T12:00:00"}
    path.write_text(json.dumps({"inference": entry, "management": entry, "API": entry}))
    path.chmod(0o600)
    now = [1_795_000_000.0]
    keys = tokens.read(path, now=lambda: now[0])
    noon = 1_795_176_000.0  # 2026-11-20 12:00 UTC
    keys.check("inference", b"Bearer " + b"k" * 20)
    now[0] = noon
    with pytest.raises(Forbidden):
        keys.check("inference", b"Bearer " + b"k" * 20)
    with pytest.raises(Unauthorized):
        keys.check("inference", b"Basic abc")


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("{", 0o600, "is no key file"),
        ('{"inference": {"key": "12345678"}}', 0o600, "no 'inference' key of at least 16"),
        ('{"inference": {"key": "0123456789abcdef"}}', 0o600, "no 'management' key"),
        ('{"inference": {"key": "0123456789abcdef"}}', 0o644, "others may read"),
        ('{"inference": {"key": "0123456789abcdef", "expiration time": "soon"}}', 0o600, "is no key file"),
    ],
)
def test_a_weak_or_open_key_file_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError, match=words):
        tokens.read(path)
