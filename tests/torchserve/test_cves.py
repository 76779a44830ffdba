"""What was done to other model servers, done to this one: one replay for each published hole that could be here.

Holes without a counterpart here are left out: shared-memory names (CVE-2025-23319, CVE-2025-23320, CVE-2025-23334,
CVE-2023-31036's plugins), since no request names memory (that there is no such path is asked below), and pickles
between services (CVE-2024-2912, CVE-2024-9070, CVE-2025-27520, CVE-2025-32375), of which the request path is replayed.
CVE-2025-23317 and CVE-2025-23327 are bodies that lie about their size, as those of CVE-2025-33201.
"""

from __future__ import annotations

import json
import pickle
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline import serve
from trueline.errors import UsageError
from trueline.serve import RunningServer
from trueline.serve.handlers import archive
from worlds import bundles, servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = bundles.store(tmp_path_factory.mktemp("world") / "store", "tiny")
    bundles.store(store.parent, "outside")
    with servers.running(store=store, load="tiny", management_port=0, grpc_port=0) as server:
        yield server


class Listener:
    """Something on this machine that should not be called."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/model.mar"

    def was_called(self) -> bool:
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_cve_2023_43654_a_url_in_a_registration_is_not_fetched(target: RunningServer) -> None:
    called = Listener()
    for url in (called.url, "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "s3://bucket/model.tlb"):
        found = servers.post(f"{target.management_url}/models", params={"url": url})
        assert found.status_code == 404
        assert "does not match any allowed URL(s)" in found.json()["message"]
    assert not called.was_called()
    called.socket.close()


@pytest.mark.parametrize("url", ["../outside.bundle", "tiny.bundle/../../outside.bundle", "..%2foutside.bundle"])
def test_cve_2024_35198_dots_in_a_url_leave_no_store(target: RunningServer, url: str) -> None:
    for face, path in ((target.management_url, f"/models?url={url}"), (target.management_url, f"/models/x?url={url}")):
        assert servers.post(f"{face}{path}").status_code in (404, 405)
    assert servers.get(f"{target.management_url}/models/outside").status_code == 404


def test_cve_2024_35199_and_shelltorch_nothing_listens_where_others_reach_it_unasked(tmp_path: Path) -> None:
    source = bundles.double_plus(tmp_path / "tiny.bundle").path
    with pytest.raises(UsageError, match="can be reached from other machines"):
        serve.start(source, host="0.0.0.0", grpc_port=0)


def test_nobody_listens_beside_the_loopback(target: RunningServer) -> None:
    listening = {
        line.split()[1].partition(":")[0]
        for line in Path(f"/proc/{target.pid}/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].partition(":")[2], 16) in (target.port, target.grpc_port)
    }
    assert listening == {"0100007F"}


def test_cve_2022_1471_a_configuration_makes_no_objects(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = f"!!python/object/apply:os.mknod ['{mark}']"
    made = tmp_path / "evil.mar"
    with zipfile.ZipFile(made, "w") as parts:
        manifest = {"modelName": "evil", "handler": "h.py", "configFile": "c.yaml"}
        parts.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": manifest}))
        parts.writestr("c.yaml", f"minWorkers: {evil}")
        parts.writestr("h.py", "def handle(data, context): return data")
    with pytest.raises(archive.ArchiveError):
        archive.unpack(made, tmp_path / "out")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../out-beside/x", "/etc/x", "a/../../x"])
def test_zip_slip_an_entry_beside_the_folder_is_refused_also_where_its_name_begins_alike(
    tmp_path: Path, name: str
) -> None:
    made = tmp_path / "slip.mar"
    with zipfile.ZipFile(made, "w") as parts:
        parts.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": {"modelName": "a"}}))
        parts.writestr(name, "x")
    with pytest.raises(archive.ArchiveError):
        archive.unpack(made, tmp_path / "out")
    assert not (tmp_path / "out-beside").exists()
    assert not (tmp_path / "x").exists()


def sent(server: RunningServer, *pieces: bytes) -> bytes:
    """What comes back on a connection of its own, to its end."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
        try:
            for piece in pieces:
                wire.sendall(piece)
        except OSError:
            pass  # it has answered and closed
        answer = b""
        try:
            while more := wire.recv(65536):
                answer += more
        except ConnectionError:
            pass
        return answer


def test_cve_2025_23310_and_23311_a_body_of_very_many_chunks_is_refused(target: RunningServer) -> None:
    head = b"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = sent(target, head, *[b"1\r\n \r\n" * 10_000] * 8)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"chunks" in answer
    assert servers.get(f"{target.url}/v2/health/live").status_code == 200


@pytest.mark.parametrize("name", ["..%2f..%2foutside", "%2fetc%2fpasswd", "tiny%00", "a" * 5000])
def test_cve_2023_31036_and_2025_23316_a_name_is_no_path_and_is_not_echoed_at_length(
    target: RunningServer, name: str
) -> None:
    for act in ("load", "unload"):
        found = servers.post(f"{target.url}/v2/repository/models/{name}/{act}", content=b"{}")
        assert found.status_code in (400, 404)
        assert len(found.text) < 1000


def test_cve_2023_31036_files_that_come_with_a_load_are_not_written(target: RunningServer) -> None:
    given = {"parameters": {"config": "{}", "file:../../x": "AAAA"}}
    found = servers.post(f"{target.url}/v2/repository/models/tiny/load", json=given)
    assert found.status_code == 400
    assert "is not supported" in found.json()["error"]


@pytest.mark.parametrize(
    "shape", [[2**32, 2**32], [2**63 - 1, 2], [-1, 3], [0, 2**31], [1] * 64]
)  # what a product of sizes overflows, or is negative
def test_cve_2026_24173_and_2025_33201_shapes_that_lie_are_the_clients_fault(
    target: RunningServer, shape: list[int]
) -> None:
    for data, size in (([1.0, 2.0], None), (None, 8)):
        tensor: dict[str, Any] = {"name": "x", "shape": shape, "datatype": "FP32"}
        tensor |= {"data": data} if size is None else {"parameters": {"binary_data_size": size}}
        body = json.dumps({"inputs": [tensor]}).encode()
        headers = {} if size is None else {"inference-header-content-length": str(len(body))}
        found = servers.post(f"{target.url}/v2/models/tiny/infer", content=body + b"\0" * (size or 0), headers=headers)
        assert found.status_code == 400


class Mark:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["application/vnd.bentoml+pickle", "application/octet-stream", "application/x-pickle"])
def test_cve_2024_2912_and_2025_32375_a_pickle_in_a_request_is_bytes_and_no_object(
    target: RunningServer, tmp_path: Path, kind: str
) -> None:
    evil = pickle.dumps(Mark(tmp_path / "mark"))
    for path in ("/v2/models/tiny/infer", "/predictions/tiny", "/v1/models/tiny:predict", "/invocations"):
        headers = {"content-type": kind, "payload-container": "PickleBytesContainer"}
        found = servers.post(f"{target.url}{path}", content=evil, headers=headers)
        assert found.status_code in (400, 415)
    assert not (tmp_path / "mark").exists()
    pickle.loads(evil)
    assert (tmp_path / "mark").exists(), "the pickle was no threat"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/systemsharedmemory/region/a/register"),
        ("POST", "/v2/cudasharedmemory/region/a/register"),
        ("POST", "/v2/trace/setting"),
        ("POST", "/v2/logging"),
    ],
)
def test_cve_2025_23319_no_path_names_memory_and_no_error_tells_one(
    target: RunningServer, method: str, path: str
) -> None:
    body = {"key": "/triton_python_backend_shm_region_1", "offset": 0, "byte_size": 8}
    found = servers.request(method, f"{target.url}{path}", json=body)
    assert found.status_code == 404
    assert found.json()["error"] == "Not Found" or "regions are not supported" in found.json()["error"]
    assert "shm" not in found.text
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"shared_memory_region": "a"}}
    refused = servers.post(f"{target.url}/v2/models/tiny/infer", json={"inputs": [tensor]})
    assert refused.status_code == 400
    assert "shm" not in refused.text


def test_cve_2025_54381_an_address_that_comes_as_data_is_not_fetched(target: RunningServer) -> None:
    called = Listener()
    for path in ("/predictions/tiny", "/invocations", "/v1/models/tiny:predict"):
        form = servers.post(f"{target.url}{path}", files={"data": ("x", called.url.encode())})
        assert form.status_code == 415
        for body in ({"instances": [called.url]}, {"x": called.url}, called.url):
            assert servers.post(f"{target.url}{path}", json=body).status_code == 400
    assert not called.was_called()
    called.socket.close()
