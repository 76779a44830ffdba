"""An address that a client names is not fetched: SSRF by the URL of a model, a workflow or its nodes, and by bodies.

TorchServe CVE-2023-43654; BentoML CVE-2025-54381; MLflow CVE-2025-52967 and the class of CVE-2024-0520 (files named by
what was fetched); TorchServe CVE-2024-35198 (an allow-list that is passed by spelling). Nothing is fetched for clients,
so neither redirects, names that resolve anew, nor spellings of addresses matter; each is tried.
"""

from __future__ import annotations

import grpc
import pytest

from trueline.torchserve.grpc import MANAGEMENT
from trueline.torchserve.workflows import registry
from trueline.wire import inference_pb2, torchserve_pb2
from worlds import archives, servers
from worlds.attacks import Listener, Target

pytestmark = pytest.mark.slow
ADDRESSES = [
    "http://127.0.0.1:{port}/x.mar", "HTTP://127.0.0.1:{port}/x.mar", "http://2130706433:{port}/x.mar",
    "http://0x7f000001:{port}/x.mar", "http://0177.0.0.1:{port}/x.mar", "http://127.1:{port}/x.mar",
    "http://0:{port}/x.mar", "http://0.0.0.0:{port}/x.mar", "http://[::1]:{port}/x.mar",
    "http://[::ffff:127.0.0.1]:{port}/x.mar", "http://[::ffff:7f00:1]:{port}/x.mar", "http://localhost:{port}/x.mar",
    "http://LOCALHOST.:{port}/x.mar", "http://user:pass@127.0.0.1:{port}/x.mar",
    "http://a.example@127.0.0.1:{port}/x.mar",
    "http://127.0.0.1:{port}#tiny.bundle", "http://127.0.0.1:{port}?tiny.bundle", "http:\\\\127.0.0.1:{port}\\x.mar",
    "http:127.0.0.1:{port}/x.mar", "//127.0.0.1:{port}/x.mar", "\thttp://127.0.0.1:{port}/x.mar",
    "http://127.0.0.1:{port}/redirect?to=http://169.254.169.254/", "http://①②⑦.⓪.⓪.①:{port}/x.mar",
    "http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/latest/", "http://metadata.google.internal/x",
    "https://127.0.0.1:{port}/x.mar", "ftp://127.0.0.1:{port}/x.mar", "gopher://127.0.0.1:{port}/_x",
    "s3://bucket/x.tlb",
    "gs://bucket/x.tlb", "hdfs://127.0.0.1:{port}/x", "github://a:b@main/x", "memory://x", "data:text/plain,x",
    "zip://x::http://127.0.0.1:{port}/x.zip", "simplecache::http://127.0.0.1:{port}/x.tlb", "file:///etc/passwd",
    "FILE:/etc/passwd", "dbfs:/x", "runs:/1/model", "models:/digits@champion", "models:/../../x/1", "jar:file:///x!/y",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_registration_by_address_is_refused_and_fetches_nothing(
    target: Target, listener: Listener, address: str
) -> None:
    url = address.format(port=listener.port)
    management = target.server.management_url
    for place in ("models", "workflows"):
        for found in (
            servers.post(f"{management}/{place}", params={"url": url}),
            servers.post(f"{management}/{place}", json={"url": url}),
        ):
            assert found.status_code == 404
            told = found.json()["message"]
            assert "does not match any allowed URL(s)" in told or "Relative path is not allowed" in told
    with grpc.insecure_channel(f"127.0.0.1:{target.server.grpc_management_port}") as channel:
        call = channel.unary_unary(
            f"/{MANAGEMENT}/RegisterModel", request_serializer=lambda one: one.SerializeToString()
        )
        with pytest.raises(grpc.RpcError) as error:
            call(torchserve_pb2.RegisterModelRequest(url=url), timeout=60)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    assert not listener.was_called()


def test_the_node_of_a_workflow_is_taken_from_the_store_whatever_host_its_url_names(
    target: Target, listener: Listener
) -> None:
    for number, address in enumerate(ADDRESSES):
        url = address.format(port=listener.port)
        if url.startswith(("http://", "https://", "file://")):
            assert "/" not in registry._name_in_store(url)
        if number % 8 == 0:  # each starts processes
            spec = f"models:\n  a: {{url: {url!r}}}\ndag:\n  pre: [a]"
            code = "def pre(data, context):\n    return data"
            made = archives.war(target.store / f"flow{number}.war", code, spec, name=f"flow{number}")
            found = servers.post(f"{target.server.management_url}/workflows", params={"url": made.name})
            made.unlink()
            assert found.status_code in (400, 404, 500)
    assert not listener.was_called()


def test_an_address_in_a_body_a_parameter_or_a_header_is_data(target: Target, listener: Listener) -> None:
    url = f"http://127.0.0.1:{listener.port}/x"
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
    for path, body in (
        (
            "/v2/models/tiny/infer",
            {"inputs": [tensor], "parameters": {"url": url, "callback": url, "webhook_url": url}},
        ),
        ("/v2/repository/models/tiny/load", {"parameters": {"config": f'{{"url": "{url}"}}'}}),
        ("/v2/repository/models/tiny/load", {"parameters": {"file:1/model.onnx": url, "url": url}}),
        ("/predictions/tiny", {"x": url}),
        ("/predictions/echo", {"url": url, "image_url": url}),
        ("/v1/models/tiny:predict", {"instances": [{"b64": url}, {"url": url}]}),
        ("/invocations?model_name=tiny", {"inputs": url}),
        (f"/invocations?model_name={url}", {"inputs": [1]}),
    ):
        headers = {
            "x-forwarded-host": url,
            "forwarded": f"host={url}",
            "referer": url,
            "x-callback-url": url,
            "link": url,
        }
        servers.post(f"{target.server.url}{path}", json=body, headers=headers)
        servers.post(f"{target.server.url}{path}", files={"data": ("x", url.encode()), "url": (None, url.encode())})
    with grpc.insecure_channel(f"127.0.0.1:{target.server.grpc_port}") as channel:
        path = "/inference.GRPCInferenceService/RepositoryModelLoad"
        call = channel.unary_unary(path, request_serializer=lambda one: one.SerializeToString())
        request = inference_pb2.RepositoryModelLoadRequest(model_name="tiny")
        request.parameters["config"].string_param = url
        with pytest.raises(grpc.RpcError):
            call(request, timeout=60)
    assert not listener.was_called()


def test_no_answer_sends_a_browser_to_another_host(target: Target) -> None:
    """BentoML CVE-2024-12760."""
    for path in (
        "//evil.example/", "//evil.example/%2f..", "/\\evil.example", "/%5cevil.example", "/%2fevil.example",
        "/models/",
        "/dashboard/", "/v2/", "//", "http://evil.example/dashboard", "/ui/file=https://evil.example", "/dashboard//x",
    ):  # fmt: skip
        for port in target.ports:
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                request = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-forwarded-host: evil.example\r\n"
                answer = target.send(f"{request}connection: close\r\n\r\n".encode(), port)
                head = answer.partition(b"\r\n\r\n")[0].lower()
                assert answer[9:10] != b"3"
                assert b"\r\nlocation:" not in head
                assert b"\r\nrefresh:" not in head
                assert b"evil.example" not in head
