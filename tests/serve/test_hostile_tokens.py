"""Without the right token no port answers, whatever the spelling of the path, the method, the protocol or the header.

Triton CVE-2026-24206, CVE-2026-24207, CVE-2026-47481 (another path or channel past the check); MLflow CVE-2023-6014,
CVE-2025-11200, CVE-2026-0545, CVE-2026-2635, CVE-2026-2652; Ray CVE-2023-48022, CVE-2023-6019, CVE-2025-34351.
"""

from __future__ import annotations

import hmac
import re
from pathlib import Path

import grpc
import pytest

from trueline.torchserve.grpc import INFERENCE, MANAGEMENT
from trueline.web import auth
from worlds import servers
from worlds.attacks import Target

pytestmark = pytest.mark.slow
CLOSED = {
    "data": [
        "/v2", "/v2/models/tiny", "/v2/models/tiny/infer", "/v2/models/tiny/ready", "/v2/models/stats", "/v1/models",
        "/v2/repository/index", "/v2/repository/models/tiny/load", "/v2/repository/models/tiny/unload",
        "/predictions/tiny",
        "/explanations/tiny", "/invocations", "/models/tiny/invoke", "/tiny/predict", "/tiny/1/predict", "/wfpredict/x",
        "/metrics", "/openapi.json", "/api-description", "/dashboard/state", "/version", "/", "/v1/models/tiny:predict",
    ],
    "management": ["/models", "/models/tiny", "/models/tiny/1", "/models/tiny/1/set-default", "/models/tiny/traffic",
                   "/workflows", "/workflows/x", "/token", "/openapi.json", "/v1/models/tiny"],
    "metrics": ["/metrics", "/metrics/", "//metrics"],
}  # fmt: skip
OPEN = ("/ping", "/health", "/dashboard", "/try", "/v2/health/live", "/v2/health/ready")


def spellings(path: str) -> list[str]:
    """Other ways to write `path`, of which some meet a router that forgot to normalise."""
    coded = "".join(f"%{ord(char):02x}" for char in path[1:])
    return [
        path, path + "/", path + "//", "/" + path, path + "?", path + "?x=/v2/health/live", path + "#/v2/health/live",
        path + ";/v2/health/live", path + "%00", path + "%20", path + "..;/", path.upper(), path + "/.", "/." + path,
        "/v2/health/.." + path, "/v2/health/../.." + path, "/ping/.." + path, "/dashboard/.." + path, "/try;" + path,
        "/v2/health/%2e%2e" + path, "/" + coded, path.replace("/", "%2f"), path.replace("/", "\\"),
        path + "\\..\\health",
        "http://127.0.0.1" + path, "http://127.0.0.1/v2/health/live" + path, "x://y" + path, path + "/health",
        "/v2/health" + path, path + "/v2/health/live", path[:1] + "./" + path[1:],
    ]  # fmt: skip


@pytest.mark.parametrize(("port", "path"), [(port, path) for port, paths in CLOSED.items() for path in paths])
def test_nothing_behind_the_token_is_answered_without_it_under_any_spelling(
    guarded: Target, port: str, path: str
) -> None:
    for spelled in spellings(path):
        if spelled == "http://127.0.0.1/v2/health/live/":  # of "/": the open page itself
            continue
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
            request = f"{method} {spelled} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
            answer = guarded.send(request.encode(), port)
            assert answer[9:12] in (b"401", b"400", b"404", b"405", b"403"), (method, spelled, answer[:300])


@pytest.mark.parametrize(
    "lines",
    [
        "authorization: Bearer", "authorization: Bearer ", "authorization: Basic {token}", "authorization: {token}",
        "authorization: Bearer {token}x", "authorization: Bearer {other}", "authorization: Bearer {token} {token}",
        "authorization: Bearer null", "authorization: Bearer undefined", "authorization: Bearer *",
        "x-api-key: {token}",
        "cookie: token={token}", "proxy-authorization: Bearer {token}", "x-original-url: /v2/health/live",
        "x-rewrite-url: /ping", "x-forwarded-for: 127.0.0.1", "x-real-ip: 127.0.0.1", "x-http-method-override: GET",
        "x-forwarded-user: admin", "upgrade-insecure-requests: 1", "authorization : Bearer {token}",
        "authorization: Bearer {token}\r\nauthorization: Bearer wrong-token-of-32-characters---",
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_what_is_no_token_of_its_own_kind_opens_nothing(guarded: Target, lines: str, version: str) -> None:
    text = lines.format(token=guarded.keys["inference"], other=guarded.keys["management"])
    request = f"GET /v2/models/tiny HTTP/{version}\r\nhost: 127.0.0.1\r\n{text}\r\nconnection: close\r\n\r\n"
    assert guarded.send(request.encode("latin-1"))[9:12] in (b"401", b"403", b"400")


def test_the_token_of_requests_loads_nothing_and_renews_nothing(guarded: Target) -> None:
    inference = {"authorization": f"Bearer {guarded.keys['inference']}"}
    for method, url in (
        ("POST", f"{guarded.server.url}/v2/repository/models/tiny/load"),
        ("POST", f"{guarded.server.url}/v2/repository/models/tiny/unload"),
        ("POST", f"{guarded.server.url}/v2/repository%2fmodels%2ftiny%2funload"),
        ("POST", f"{guarded.server.url}/v2/repository/models/tiny/unload?x=1#y"),
        ("GET", f"{guarded.server.management_url}/models"),
        ("DELETE", f"{guarded.server.management_url}/models/tiny"),
        ("GET", f"{guarded.server.management_url}/token?type=management"),
    ):
        assert servers.request(method, url, headers=inference).status_code == 403
    management = {"authorization": f"Bearer {guarded.keys['management']}"}
    asked = servers.get(f"{guarded.server.management_url}/token?type=management", headers=management)
    assert asked.status_code == 403
    assert servers.get(f"{guarded.server.url}/v2/models/tiny", headers=inference).status_code == 200


def test_grpc_answers_liveness_alone_without_a_token_and_shows_no_services(guarded: Target) -> None:
    methods = {
        guarded.server.grpc_port: [
            *(f"/inference.GRPCInferenceService/{name}" for name in (
                "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelConfig", "ModelStatistics",
                "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "ModelStreamInfer",
            )),
            *(f"/{INFERENCE}/{name}" for name in ("Predictions", "StreamPredictions", "StreamPredictions2")),
        ],
        guarded.server.grpc_management_port: [
            f"/{MANAGEMENT}/{name}" for name in (
                "DescribeModel", "ListModels", "RegisterModel", "ScaleWorker", "SetDefault", "UnregisterModel",
            )
        ],
    }  # fmt: skip
    hidden = [
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.channelz.v1.Channelz/GetServers",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/grpc.admin.v1.Admin/X", "/x/y", "//", "/",
        "/inference.grpcinferenceservice/modelinfer", "/inference.GRPCInferenceService//ModelInfer",
        "/inference.GRPCInferenceService/ServerLive/../ModelInfer",
        "/inference.GRPCInferenceService/SystemSharedMemoryStatus",
        "/inference.GRPCInferenceService/TraceSetting", "/inference.GRPCInferenceService/LogSettings",
    ]  # fmt: skip
    closed = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    wrong = (("authorization", f"Bearer {guarded.keys['API']}"),)
    for port, names in methods.items():
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name in names:
                for metadata in ((), wrong, (("authorization", ""),), (("authorization-bin", b"x"),)):
                    assert code(channel, name, metadata) in closed, name
            for name in hidden:
                assert code(channel, name, ()) is grpc.StatusCode.UNIMPLEMENTED, name


def code(channel: grpc.Channel, path: str, metadata: tuple[tuple[str, str | bytes], ...]) -> grpc.StatusCode:
    call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60)
    with pytest.raises(grpc.RpcError):
        list(call)
    found: grpc.StatusCode = call.code()
    return found


def test_tokens_are_compared_in_a_time_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the token is compared, by `hmac.compare_digest`: no comparison of text is left in the room."""
    asked: list[tuple[bytes, bytes]] = []
    keys = auth.load_keys(tmp_path / "keys.json")
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: asked.append((a, b)) or False)
    with pytest.raises(auth.Forbidden):
        keys.check("inference", b"Bearer wrong")
    ((given, right),) = asked
    assert given == b"wrong"
    assert len(right) >= 43  # 256 bits in base64
    for file in ("web/auth.py", "train/monitor/server.py", "train/master/server.py"):
        source = (Path(auth.__file__).parents[1] / file).read_text()
        assert "compare_digest" in source
        assert not re.search(r"(token|secret|key)\w* ?(==|!=) ", source), file


def test_a_wrong_token_is_answered_as_any_other_wrong_token(guarded: Target) -> None:
    right = guarded.keys["inference"]
    answers = set()
    for token in ("x", right[:-1] + "!", right[:20], right + right, guarded.keys["management"], "é"):
        headers = {"authorization": f"Bearer {token}".encode()}
        found = servers.get(f"{guarded.server.url}/v2/models/tiny", headers=headers)
        answers.add((found.status_code, found.text))
    assert len(answers) == 1
