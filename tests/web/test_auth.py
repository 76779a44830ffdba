"""Who has no token is 401, who has the wrong one 403, and nothing else of the server is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trueline import files
from trueline.errors import StorageError, UsageError
from trueline.web import auth
from trueline.web.auth import AuthMiddleware, Forbidden, Keys, TokenKind, Unauthorized
from trueline.web.messages import Request, Response


class Open:
    """An app that answers everything, and counts what reached it."""

    def __init__(self) -> None:
        self.reached = 0

    def answer(self, request: Request) -> Response:
        self.reached += 1
        return Response(200, b"{}")

    def refuse(self, path: str, status: int, message: str) -> Response:
        return Response(status, message.encode())


def guard(app: Open, keys: Keys, kind: TokenKind) -> AuthMiddleware:
    return AuthMiddleware(app, keys, kind, lambda path, error: Response(error.status, b""))


def asked(app: AuthMiddleware, path: str, token: str | None) -> int:
    headers = {} if token is None else {b"authorization": f"Bearer {token}".encode()}
    found = app.answer(Request("GET", path.encode(), headers, b""))
    assert isinstance(found, Response)
    if found.status == 401:
        assert b"www-authenticate: Bearer" in found.headers
    return found.status


def test_each_token_opens_its_own_doors(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = auth.load_keys(path)
    token = {kind: one["key"] for kind, one in json.loads(path.read_text()).items()}
    inner = Open()
    data = guard(inner, keys, "inference")
    assert asked(data, "/ping", None) == asked(data, "/v2/health/ready", None) == 200
    assert inner.reached == 2
    for path_, kind in (("/predictions/m", "inference"), ("/v2/repository/models/m/load", "management")):
        assert asked(data, path_, None) == 401
        for other in ("inference", "management", "API"):
            assert asked(data, path_, token[other]) == (200 if other == kind else 403)
    assert asked(data, "/predictions/m", token["inference"][:-1]) == 403
    assert asked(data, "/predictions/m", "") == 401
    assert inner.reached == 4
    manager = guard(inner, keys, "management")
    assert asked(manager, "/token", token["management"]) == 403
    assert asked(manager, "/token", token["API"]) == 200


def test_a_renewed_token_ends_the_old_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = auth.load_keys(path)
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
    keys = auth.load_keys(path, now=lambda: now[0])
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
        auth.load_keys(path)


def key_file(path: Path, **entries: dict[str, str]) -> Path:
    """A key file of the owner's alone, with a token of its own for each kind."""
    usual = {kind: {"key": f"{kind}-0123456789abcdef"} for kind in ("inference", "management", "API")}
    path.write_text(json.dumps(usual | entries))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640, 0o660, 0o644])
def test_a_key_file_that_its_group_or_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "keys.json")
    path.chmod(mode)
    with pytest.raises(UsageError, match="others may read the key file"):
        auth.load_keys(path)
    path.chmod(0o400)
    auth.load_keys(path).check("inference", b"Bearer inference-0123456789abcdef")


@pytest.mark.parametrize("kind", ["inference", "management", "API"])
def test_a_token_of_sixteen_characters_is_the_shortest_for_each_kind(tmp_path: Path, kind: str) -> None:
    auth.load_keys(key_file(tmp_path / "fine.json", **{kind: {"key": "k" * 16}}))
    with pytest.raises(UsageError, match=f"no '{kind}' key of at least 16 characters"):
        auth.load_keys(key_file(tmp_path / "weak.json", **{kind: {"key": "k" * 15}}))


@pytest.mark.parametrize(
    "token", ["inference-0123456789abcde", "inference-0123456789abcdef0", "inference-0123456789abcdeF", "i", "*",
              "management-0123456789abcdef", "INFERENCE-0123456789ABCDEF"]
)  # fmt: skip
def test_nothing_near_a_token_and_no_other_kinds_token_is_taken_for_it(tmp_path: Path, token: str) -> None:
    keys = auth.load_keys(key_file(tmp_path / "keys.json"))
    keys.check("inference", b"Bearer inference-0123456789abcdef")
    with pytest.raises(Forbidden):
        keys.check("inference", f"Bearer {token}".encode())


@pytest.mark.parametrize("given", [None, b"", b"Bearer", b"Bearer ", b"Basic inference-0123456789abcdef",
                                   b"inference-0123456789abcdef"])  # fmt: skip
def test_what_is_no_bearer_token_is_none(tmp_path: Path, given: bytes | None) -> None:
    keys = auth.load_keys(key_file(tmp_path / "keys.json"))
    with pytest.raises(Unauthorized):
        keys.check("inference", given)


@pytest.mark.parametrize(("seconds", "valid"), [(-1, True), (0, False), (1, False)])
def test_a_token_is_valid_until_the_second_at_which_it_ends(tmp_path: Path, seconds: int, valid: bool) -> None:
    ending = {"key": "k" * 20, "expiration time": "2026-11-20T12:00:00+00:00"}
    now = 1_795_176_000.0 + seconds
    keys = auth.load_keys(key_file(tmp_path / "keys.json", inference=ending), now=lambda: now)
    if valid:
        keys.check("inference", b"Bearer " + b"k" * 20)
    else:
        with pytest.raises(Forbidden):
            keys.check("inference", b"Bearer " + b"k" * 20)
    keys.check("management", b"Bearer management-0123456789abcdef")


def test_a_token_that_ended_is_renewed_without_its_end_and_the_others_stay(tmp_path: Path) -> None:
    ending = {"key": "k" * 20, "expiration time": "2026-11-20T12:00:00+00:00"}
    path = key_file(tmp_path / "keys.json", inference=ending)
    keys = auth.load_keys(path, now=lambda: 2e9)
    keys.renew("inference")
    told = json.loads(path.read_text())
    keys.check("inference", f"Bearer {told['inference']['key']}".encode())
    assert list(told["inference"]) == ["key"]
    assert len(told["inference"]["key"]) >= 43, "256 bits"
    assert {told[kind]["key"] for kind in ("management", "API")} == {
        "management-0123456789abcdef",
        "API-0123456789abcdef",
    }


def test_a_token_that_cannot_be_written_down_is_not_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = auth.load_keys(key_file(tmp_path / "keys.json"))

    def full(*_: object, **__: object) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(StorageError):
        keys.renew("inference")
    keys.check("inference", b"Bearer inference-0123456789abcdef")


def test_what_another_process_renewed_is_taken_and_a_torn_file_leaves_the_old_tokens(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys.json")
    keys, other = auth.load_keys(path), auth.load_keys(path)
    other.renew("inference")
    keys.refresh()
    keys.check("inference", f"Bearer {json.loads(path.read_text())['inference']['key']}".encode())
    with pytest.raises(Forbidden):
        keys.check("inference", b"Bearer inference-0123456789abcdef")
    path.write_text("{")
    with pytest.raises(UsageError):
        keys.refresh()
    keys.check("management", b"Bearer management-0123456789abcdef")


@pytest.mark.parametrize("path", ["/v2", "/v2/models/m", "/v2/healthy", "/v2/repository/index", "/metrics", "/pings",
                                  "/models", "/dashboard/x", "/"])  # fmt: skip
def test_only_health_and_the_pages_are_open(tmp_path: Path, path: str) -> None:
    inner = Open()
    data = guard(inner, auth.load_keys(key_file(tmp_path / "keys.json")), "inference")
    assert asked(data, path, None) == 401
    assert inner.reached == 0
    for open_path in ("/ping", "/health", "/dashboard", "/try", "/v2/health/live", "/v2/health/ready"):
        assert asked(data, open_path, None) == 200
