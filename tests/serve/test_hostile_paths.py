"""Names, versions, URLs and entries that lead out of the store: they name nothing, on every port and in every spelling.

TorchServe CVE-2024-35198; Triton CVE-2023-31036, CVE-2026-24147, CVE-2026-24208, CVE-2026-24209, CVE-2026-47487,
CVE-2026-47606, CVE-2026-47627, CVE-2026-47630; MLflow CVE-2023-1177, CVE-2023-2780, CVE-2023-3765, CVE-2023-6831,
CVE-2023-6909, CVE-2024-1560, CVE-2024-1593, CVE-2024-1594, CVE-2024-2928, CVE-2024-3573, CVE-2024-3848, CVE-2024-8859,
CVE-2025-11201, CVE-2026-2033, CVE-2026-2614; Ray CVE-2023-6020, CVE-2023-6021, CVE-2026-32981.
"""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest

from trueline.torchserve.grpc import MANAGEMENT
from trueline.wire import inference_pb2, torchserve_pb2
from worlds import servers
from worlds.attacks import Target

pytestmark = pytest.mark.slow
OUT = [
    "../outside.bundle", "tiny.bundle/../../outside.bundle", "pair/../../outside.bundle", "./../outside.bundle",
    "..\\outside.bundle", "..%2foutside.bundle", "..%252foutside.bundle", "%2e%2e/outside.bundle", "..;/outside.bundle",
    "....//outside.bundle", "..%c0%afoutside.bundle", "．．/outside.bundle", "‥/outside.bundle",
    "../outside.bundle\0.mar",
    "tiny.bundle\0", "tiny.bundle\n", "tiny.bundle#../../outside.bundle", "tiny.bundle?/../../outside.bundle",
    "tiny.bundle;/../../outside.bundle", "tiny.bundle#", "link.bundle", "/etc/passwd", "//etc/passwd", "~/x",
    "$HOME", "~root",
    "/proc/self/environ", "/dev/stdin", ".", "..", "pair/..", "pair/.", "pair//1.bundle", "tiny.bundle/",
    "tiny.bundle/programs/model.onnx", "C:\\x", "\\\\host\\share", "-rf", "*", "tiny.bundl?", "{tiny,outside}.bundle",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_written_or_served(target: Target):  # type: ignore[no-untyped-def]
    before = target.files(), models(target)
    yield
    assert (target.files(), models(target)) == before


def models(target: Target) -> list[str]:
    return [one["modelName"] for one in servers.get(f"{target.server.management_url}/models").json()["models"]]


@pytest.mark.parametrize("name", OUT)
def test_a_url_that_leads_out_of_the_store_registers_nothing(target: Target, name: str) -> None:
    management = target.server.management_url
    for place in ("models", "workflows"):
        for found in (
            servers.post(f"{management}/{place}", params={"url": name, "model_name": "mine"}),
            servers.post(f"{management}/{place}", json={"url": name, "model_name": "mine"}),
            servers.post(f"{management}/{place}?url={quote(quote(name, safe=''), safe='')}&model_name=mine"),
        ):
            assert found.status_code in (400, 404), found.text
            assert str(target.store.parent) not in found.text


@pytest.mark.parametrize("name", [*OUT, "outside", "../outside", "pair/1"])
def test_a_name_in_a_path_is_no_path_on_the_disk(target: Target, name: str) -> None:
    for once in (quote(name, safe=""), quote(name), quote(quote(name, safe=""), safe="")):
        for method, path in (
            ("POST", f"/v2/repository/models/{once}/load"), ("POST", f"/v2/repository/models/{once}/unload"),
            ("GET", f"/v2/models/{once}"), ("POST", f"/v2/models/{once}/infer"),
            ("GET", f"/v2/models/tiny/versions/{once}"),
            ("POST", f"/predictions/{once}"), ("POST", f"/predictions/tiny/{once}"), ("GET", f"/{once}"),
            ("GET", f"/dashboard/{once}"), ("POST", f"/wfpredict/{once}"), ("GET", f"/v1/models/{once}"),
        ):  # fmt: skip
            line = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
            answer = target.send(line.encode("utf-8", "replace"))
            assert answer[9:12] in (b"400", b"404", b"405"), (path, answer[:200])
            assert b"root:" not in answer
            assert str(target.store.parent).encode() not in answer


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", ".hidden", "..", "a\nb", "a\0b", "a" * 129, "__proto__", "-rf", "ü"]
)
def test_a_model_or_version_is_not_registered_under_a_name_that_is_a_path_or_a_line(target: Target, name: str) -> None:
    for field in ("model_name", "model_version"):
        given = {"url": "tiny.bundle", "model_name": "mine"} | {field: name}
        found = servers.post(f"{target.server.management_url}/models", params=given)
        assert found.status_code == 400
        assert "is no name here" in found.json()["message"]


@pytest.mark.parametrize(
    "name", ["../outside", "../outside.bundle", "/etc/passwd", "tiny\0", "link.bundle", "a" * 100_000]
)
def test_grpc_names_lead_nowhere_either(target: Target, name: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{target.server.grpc_port}") as channel:
        for call, request in (
            ("RepositoryModelLoad", inference_pb2.RepositoryModelLoadRequest(model_name=name)),
            ("RepositoryModelUnload", inference_pb2.RepositoryModelUnloadRequest(model_name=name)),
            ("ModelMetadata", inference_pb2.ModelMetadataRequest(name=name)),
            ("ModelInfer", inference_pb2.ModelInferRequest(model_name=name)),
            ("ModelMetadata", inference_pb2.ModelMetadataRequest(name="tiny", version=name)),
        ):
            refused(channel, f"/inference.GRPCInferenceService/{call}", request, target)
    with grpc.insecure_channel(f"127.0.0.1:{target.server.grpc_management_port}") as channel:
        request = torchserve_pb2.RegisterModelRequest(url=name, model_name="mine")
        refused(channel, f"/{MANAGEMENT}/RegisterModel", request, target)


def refused(channel: grpc.Channel, path: str, request: object, target: Target) -> None:
    call = channel.unary_unary(path, request_serializer=lambda one: one.SerializeToString())
    with pytest.raises(grpc.RpcError) as error:
        call(request, timeout=60)
    assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)  # type: ignore[attr-defined]
    told = error.value.details()  # type: ignore[attr-defined]
    assert len(told) < 1000
    assert str(target.store.parent) not in told
