"""A real server process over loopback: start, answers, refusals to start, drain, death with its parent."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from trueline import serve
from trueline.bundle import pack
from trueline.errors import BundleError, NotProven, PortInUse, RegistryError, UsageError
from trueline.serve import RunningServer
from trueline.serve.models.sources import resolve
from worlds import bundles, servers

pytestmark = pytest.mark.slow

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}).encode()


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.double_plus(tmp_path_factory.mktemp("b") / "tiny.bundle").path


@pytest.fixture(scope="module")
def tiny_server(tiny_bundle: Path) -> Iterator[RunningServer]:
    with servers.running(tiny_bundle) as server:
        yield server


def test_the_whole_way_from_a_bundle_to_an_answer(tiny_server: RunningServer) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.post("/v2/models/tiny/infer", content=BODY).json()["outputs"][0]["data"] == [3.0, 5.0, 7.0]
        assert client.post("/predictions/tiny", json=[1, 2, 3]).json() == [3.0, 5.0, 7.0]
        assert client.get("/ping").json() == {"status": "Healthy"}
        assert "trueline_ready 1.0" in client.get("/metrics").text


def test_the_server_holds_no_torch_and_little_memory(tiny_server: RunningServer) -> None:
    assert "libtorch" not in Path(f"/proc/{tiny_server.pid}/maps").read_text()
    rollup = Path(f"/proc/{tiny_server.pid}/smaps_rollup").read_text()
    pss_kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    assert pss_kib < 120 * 1024


def test_importing_the_server_imports_neither_torch_nor_mlflow() -> None:
    code = "import sys, trueline.serve.__main__; print(sorted({'torch', 'mlflow', 'onnx', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_of_bundles_imports_nothing_that_only_archives_and_workflows_need() -> None:
    """Each of these takes milliseconds of the start."""
    code = (
        "import sys, trueline.serve.__main__, trueline.torchserve.extension; slow={'statistics', 'difflib', 'email'}; "
        "print([n for n in sys.modules if n in slow or n.startswith(('trueline.serve.handlers.', "
        "'trueline.torchserve.workflows.')) and n.endswith(('.version', '.worker', '.pool', '.config', '.spec'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tritons_own_client_works_unmodified(tiny_server: RunningServer) -> None:
    pytest.importorskip("geventhttpclient", reason="tritonclient[http] is not installed")
    http = pytest.importorskip("tritonclient.http")
    with http.InferenceServerClient(tiny_server.url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny")
        assert client.get_server_metadata()["name"] == "trueline"
        assert client.get_model_metadata("tiny")["inputs"][0]["shape"] == [-1, 3]
        given = http.InferInput("x", [2, 3], "FP32")
        given.set_data_from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3), binary_data=False)
        wanted = [http.InferRequestedOutput("y", binary_data=False)]
        for outputs in (wanted, None):
            answer = client.infer("tiny", [given], outputs=outputs, request_id="7")
            assert answer.get_response()["id"] == "7"
            assert answer.as_numpy("y").tolist() == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]
        with pytest.raises(http.InferenceServerException, match="zzz"):
            client.infer("zzz", [given], outputs=wanted)
        given.set_data_from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))  # its default: raw bytes
        for coding in (None, "gzip", "deflate"):
            answer = client.infer("tiny", [given], request_compression_algorithm=coding)
            assert answer.get_output("y")["parameters"]["binary_data_size"] == 24
            assert answer.as_numpy("y").tolist() == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]
        assert client.get_inference_statistics("tiny")["model_stats"][0]["inference_count"] >= 10
        assert client.get_model_config("tiny")["max_batch_size"] == 64
        assert client.get_model_repository_index()[0]["state"] == "READY"


def test_versions_change_under_load_and_no_request_is_lost(tiny_bundle: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for version in ("1", "2"):
        shutil.copytree(tiny_bundle, store / "tiny" / f"{version}.bundle")
    state = tmp_path / "served.json"
    answered: list[int] = []
    stop = threading.Event()

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            while not stop.is_set():
                answered.append(client.post("/predictions/tiny", json=[[1, 2, 3]] * 8).status_code)

    with serve.start(
        None, model_store=str(store), load="tiny", management_port=0, metrics_port=0, state=str(state)
    ) as one:
        assert one.management_url is not None
        threads = [threading.Thread(target=ask, args=(one.url,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=one.management_url, timeout=60.0) as manager:
            for turn in range(20):
                old, new = ("2", "1") if turn % 2 == 0 else ("1", "2")
                assert manager.put(f"/models/tiny/{new}/set-default").status_code == 200
                assert manager.delete(f"/models/tiny/{old}").status_code == 200
                loaded = manager.post("/models", params={"url": f"tiny/{old}.bundle", "initial_workers": 1})
                assert loaded.json() == {"status": f'Model "tiny" Version: {old} registered with 1 initial workers'}
        stop.set()
        for thread in threads:
            thread.join()
        assert one.metrics_url is not None
        assert servers.get(f"{one.metrics_url}/metrics").status_code == 200
        assert servers.get(f"{one.metrics_url}/ping").status_code == 404
    assert set(answered) == {200}
    with servers.running(store=store, state=state, management_port=0) as again:
        found = servers.get(f"{again.management_url}/models/tiny/all").json()
        assert {one["modelVersion"] for one in found} == {"1", "2"}
        assert servers.post(f"{again.url}/predictions/tiny", json=[1, 2, 3]).json() == [3.0, 5.0, 7.0]


def test_a_server_of_nothing_says_what_it_could_serve(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to serve"):
        serve.start(None)
    with pytest.raises(UsageError, match="is no folder"):
        serve.start(None, model_store=str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="has no 'zzz'"):
        serve.start(None, model_store=str(tmp_path), load="zzz")


def test_many_clients_at_once_each_get_their_own_answer(tiny_server: RunningServer) -> None:
    wrong: list[object] = []

    def ask(start: int) -> None:
        with httpx.Client(base_url=tiny_server.url, timeout=60.0) as client:
            for value in range(start, start + 20):
                found = client.post("/predictions/tiny", json=[[value] * 3] * 40).json()
                if found != [[2.0 * value + 1] * 3] * 40:
                    wrong.append(found)

    threads = [threading.Thread(target=ask, args=(100 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", "/predictions/tiny", "/nowhere"])
def test_a_body_over_the_bound_is_413_although_the_client_sends_it_all(tiny_server: RunningServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: 0\r\ncontent-length: {2**30}\r\n\r\n".encode())
        client.sendall(b" " * 2**20)
        assert client.recv(12) == b"HTTP/1.1 413"


def test_a_socket_that_is_half_closed_gets_the_answer_of_a_whole_request_and_none_of_a_part(
    tiny_server: RunningServer,
) -> None:
    whole = f"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: 0\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY
    for cut, begins in ((len(whole), b"HTTP/1.1 200"), (len(whole) - 3, b""), (10, b""), (0, b"")):
        with socket.create_connection(("127.0.0.1", tiny_server.port), timeout=60) as client:
            client.sendall(whole[:cut])
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := client.recv(2**16):
                answer += piece
            assert answer[:12] == begins
    assert servers.post(f"{tiny_server.url}/v2/models/tiny/infer", content=BODY).status_code == 200


def test_deep_nesting_is_a_clients_fault(tiny_server: RunningServer) -> None:
    for body in (b"[" * 2**20, b'{"inputs":' * 2**16, b'{"a":' * 2**18):
        for path in ("/v2/models/tiny/infer", "/predictions/tiny"):
            assert servers.post(tiny_server.url + path, content=body).status_code == 400


def test_a_large_answer_reaches_a_client_that_reads_slowly(tiny_server: RunningServer) -> None:
    rows = 150_000
    body = json.dumps([[1, 2, 3]] * rows).encode()
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as client:
        head = f"POST /predictions/tiny HTTP/1.1\r\nhost: 0\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == [[3.0, 5.0, 7.0]] * rows


def test_a_packed_bundle_is_served_under_the_name_and_version_that_are_given(tiny_bundle: Path, tmp_path: Path) -> None:
    packed = pack(tiny_bundle, tmp_path / "tiny.tlb")
    with serve.start(packed, name="other", version="1.2") as running:
        assert (running.model, running.version) == ("other", "1.2")
        found = servers.post(f"{running.url}/v2/models/other/versions/1.2/infer", content=BODY)
        assert found.json()["model_version"] == "1.2"
    assert running.stop() == 0


def test_a_port_in_use_is_said_with_host_port_and_what_to_do(tiny_bundle: Path, tiny_server: RunningServer) -> None:
    with pytest.raises(PortInUse, match=f"port {tiny_server.port} on 127.0.0.1 is in use") as caught:
        serve.start(tiny_bundle, port=tiny_server.port)
    assert "another port" in caught.value.hint


def test_an_address_that_others_reach_needs_a_key_file_and_asks_for_its_tokens(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape("0.0.0.0 can be reached from other machines")):
        serve.start(tiny_bundle, host="0.0.0.0")
    keys = tmp_path / "key_file.json"
    with serve.start(tiny_bundle, host="0.0.0.0", key_file=str(keys), management_port=0) as running:
        assert keys.stat().st_mode & 0o777 == 0o600
        token = {kind: one["key"] for kind, one in json.loads(keys.read_text()).items()}
        with httpx.Client(base_url=f"http://127.0.0.1:{running.port}", timeout=60) as client:
            assert client.get("/ping").status_code == 200
            assert client.get("/v2/health/ready").status_code == 200
            without = client.post("/v2/models/tiny/infer", content=BODY)
            assert (without.status_code, without.headers["www-authenticate"]) == (401, 'Bearer realm="trueline"')
            assert client.get("/metrics").status_code == 401
            for kind, status in (("inference", 200), ("management", 403), ("API", 403)):
                headers = {"authorization": f"Bearer {token[kind]}"}
                assert client.post("/v2/models/tiny/infer", content=BODY, headers=headers).status_code == status


def test_a_tampered_bundle_does_not_become_ready(tmp_path: Path) -> None:
    bundle = bundles.double_plus(tmp_path / "b")
    program = bundle.program_path()
    program.write_bytes(program.read_bytes()[:-1] + b"\0")
    with pytest.raises(BundleError, match="changed after it was sealed"):
        serve.start(bundle.path)


def test_a_bundle_that_answers_its_golden_examples_wrongly_does_not_become_ready(tmp_path: Path) -> None:
    with pytest.raises(NotProven, match="golden record '4'"):
        serve.start(bundles.double_plus(tmp_path / "b", wrong=True).path)


def test_a_path_without_a_bundle_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle"):
        serve.start(tmp_path / "nothing")


def test_sigterm_finishes_the_request_under_way_takes_no_new_one_and_exits_well(tiny_bundle: Path) -> None:
    running = serve.start(tiny_bundle)
    with (
        socket.create_connection(("127.0.0.1", running.port)) as idle,
        socket.create_connection(("127.0.0.1", running.port)) as busy,
        socket.create_connection(("127.0.0.1", running.port)) as probe,
    ):
        idle.sendall(b"GET /ping HTTP/1.1\r\nhost: 0\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: 0\r\ncontent-length: {len(BODY)}\r\nexpect: 100-continue"
        busy.sendall(head.encode() + b"\r\n\r\n")
        assert busy.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        probe.sendall(b"GET /v2/health/ready HTTP/1.1\r\nhost: 0\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\n")
        assert probe.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        os.kill(running.pid, signal.SIGTERM)
        assert idle.recv(1) == b""
        probe.sendall(b" ")
        assert probe.recv(65536).startswith(b"HTTP/1.1 503")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.port))
        busy.sendall(BODY)
        answer = b"".join(iter(lambda: busy.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    running._process.wait(100)  # a second signal would hurry it
    assert running.stop() == 0


def test_a_second_sigterm_leaves_at_once(tiny_bundle: Path) -> None:
    running = serve.start(tiny_bundle)
    with socket.create_connection(("127.0.0.1", running.port)) as busy:
        busy.sendall(
            b"POST /v2/models/tiny/infer HTTP/1.1\r\nhost: 0\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
        )
        assert busy.recv(65536).startswith(b"HTTP/1.1 100")
        with socket.create_connection(("127.0.0.1", running.port)) as idle:
            idle.sendall(b"GET /ping HTTP/1.1\r\nhost: 0\r\n\r\n")
            assert idle.recv(65536)
            os.kill(running.pid, signal.SIGTERM)
            assert idle.recv(1) == b""
        os.kill(running.pid, signal.SIGTERM)
        assert running.stop() == 0


def test_the_server_lives_but_is_not_ready_while_it_loads(tmp_path: Path) -> None:
    source = tmp_path / "bundle"
    os.mkfifo(source)  # opening it waits for a writer, and so does loading
    command = [sys.executable, "-m", "trueline.serve", "--port=0", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        port = next(found[1] for line in process.stderr if (found := re.search(r"server.listening .*port=(\d+)", line)))
        url = f"http://127.0.0.1:{port}"
        assert servers.get(f"{url}/v2/health/live").json() == {"live": True}
        assert servers.get(f"{url}/ping").status_code == 500
        assert servers.get(f"{url}/v2/health/ready").status_code == 503
        source.open("wb").close()
        assert json.loads(process.stdout.readline())["code"] == "bundle"
        process.stderr.read()
    assert process.returncode == 1


def test_a_server_that_is_told_to_stop_while_it_loads_does_not_finish_loading(tmp_path: Path) -> None:
    source = tmp_path / "bundle"
    os.mkfifo(source)
    command = [sys.executable, "-m", "trueline.serve", "--port=0", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert any("server.listening" in line for line in process.stderr)
        process.terminate()
        assert process.stdout.read() == ""
        process.stderr.read()
    assert process.returncode == 0


def test_the_server_dies_with_the_process_that_started_it(tiny_bundle: Path) -> None:
    code = "import sys, trueline.serve as s; r = s.start(sys.argv[1]); print(r.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_bundle)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert select.select([handle], [], [], 100)[0]
    os.close(handle)


def registry(folder: Path, said: str, code: int = 0) -> str:
    """An interpreter that answers as `python -m trueline.registry resolve` would."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    script.chmod(0o755)
    return str(script)


def test_a_registered_model_is_found_by_asking_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"path": "/b", "name": "iris", "version": "3", "digest": "d"})
    monkeypatch.setattr(sys, "executable", registry(tmp_path, said))
    refused = json.dumps({"error": "registry", "message": "no alias 'champion'", "hint": "set one"})
    found = resolve("models:/iris@champion", "sqlite:///x")
    assert (str(found.path), found.name, found.version, found.digest) == ("/b", "iris", "3", "d")
    monkeypatch.setattr(sys, "executable", registry(tmp_path, refused, 1))
    with pytest.raises(RegistryError, match="no alias 'champion'"):
        resolve("models:/iris@champion", None)
    monkeypatch.setattr(sys, "executable", registry(tmp_path, "Killed", 137))
    with pytest.raises(RegistryError, match="exit code 137"):
        resolve("models:/iris@champion", None)
    monkeypatch.setattr(sys, "executable", registry(tmp_path, "[]"))
    with pytest.raises(RegistryError, match="not understood"):
        resolve("models:/iris@champion", None)
