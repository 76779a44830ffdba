"""What TorchServe's own tests of its REST APIs require, as facts: request, status, and what the answer holds.

Source: the Postman collections in test/postman of TorchServe 0.12, whose 82 management calls, 11 workflow calls and
calls over https are here in our words and on our archives. `make bench-torchserve` runs the collections themselves.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from trueline import serve
from trueline.serve.api import RunningServer
from worlds import archives
from worlds.certificates import Authority

ANSWER = """
    def handle(data, context):
        if data is None:
            return None
        kind = "why" if context.get_request_header(0, "explain") == "True" else "what"
        return [{kind: 1} for _ in data]
"""
SPEC = """
    models:
      min-workers: 1
      max-workers: 1
      retry-attempts: 1
      model:
        url: %s.mar
    dag:
      before: [model]
"""
BEFORE = "def before(data, context):\n    return data and [b''.join(row.values()) for row in data]\n"

MANAGEMENT = """
    # registrations, also of what is there already, and with nothing to register
    POST /models?url=small.mar&model_name=small                              200
    POST /models?url=digits.mar&model_name=digits                            200
    POST /models?url=dense.mar&model_name=dense                              200
    POST /models?url={site}dense.mar&model_name=dense                        500
    DELETE /models/dense                                                     200
    POST /models                                                             400
    DELETE /models/digits                                                    200

    # a handler that does not exist: registered without workers, and no worker can be added
    POST /models?url=digits.mar&model_name=digits&handler=absent             200
    DELETE /models/digits                                                    200
    POST /models?url=digits.mar&model_name=digits&handler=absent             200
    PUT /models/digits?min_worker=1&synchronous=true                         500
    DELETE /models/digits                                                    200

    # descriptions
    GET /models/small/all                                                    200
    GET /models/small/1.0                                                    200
    GET /models/small                                                        200
    DELETE /models/small                                                     200
    POST /models?url=small.mar&model_name=small&runtime=python4              400
    GET /models?limit=&next_page_token=                                      200

    # workers and the default version
    POST /models?url=small.mar&model_name=small                              200
    PUT /models/small?min_worker=1                                           202
    PUT /models/small?min_worker=1&synchronous=true                          200
    PUT /models/small/1.0?min_worker=1&synchronous=true                      200
    PUT /models/small/0.0?min_worker=1&synchronous=true                      404
    PUT /models/small?min_worker=1&number_gpu=1                              202
    PUT /models/small/1.0/set-default                                        200
    PUT /models/small/0.0/set-default                                        404
    PUT /models/absent/1.0/set-default                                       404
    DELETE /models/small                                                     200

    # parameters of a registration: a handler by its path, no time to start, sizes that are no numbers
    POST /models?url=small.mar&model_name=small&handler=a/b/image_classifier.py:handle  200
    DELETE /models/small                                                     200
    POST /models?url=small.mar&model_name=small&batch_size=3&initial_workers=3&startup_timeout=0  500
    POST /models?url=small.mar&model_name=small&startup_timeout=0            200
    DELETE /models/small                                                     200
    POST /models?url=batch.mar&model_name=deep&batch_size=2                  200
    DELETE /models/deep                                                      200
    POST /models?url=batch.mar&model_name=deep&batch_size=dd&initial_workers=1  200
    DELETE /models/deep                                                      200
    POST /models?url=batch.mar&model_name=deep&batch_size=2&initial_workers=1&max_batch_delay=junk  200
    DELETE /models/deep                                                      200
    POST /models?url=small.mar&model_name=small&initial_workers=-1           200
    DELETE /models/small                                                     200
    POST /models?url=wide.mar&model_name=wide-18&synchronous=true            200
    DELETE /models/wide-18                                                   200
    POST /models?url=wide.mar&model_name=wide-18&synchronous=-1              200
    DELETE /models/wide-18                                                   200
    POST /models?url=wide.mar&model_name=wide-18&synchronous=false           200

    # pages
    GET /models?limit=1                                                      200
    GET /models?limit=-1                                                     200
    GET /models?limit=1&next_page_token=1                                    200
    GET /models?limit=1&next_page_token=-1                                   200

    # scaling, with numbers that are none or out of range
    PUT /models/wide-18?number_gpu=10                                        202
    PUT /models/wide-18?number_gpu=-1                                        202
    PUT /models/wide-18?min_worker=1&max_worker=1&synchronous=true           200
    PUT /models/wide-18?min_worker=1&max_worker=1&synchronous=false          202
    PUT /models/wide-18?timeout=-1                                           202
    PUT /models/wide-18?timeout=0                                            202
    POST /models?url=&model_name=wide-18                                     404
    POST /models?url={site}absent.mar&model_name=absent                      400
    GET /models/absent                                                       404
    GET /models/small/0.0                                                    404
    GET /models?next_page_token=12                                           200
    PUT /models/wide-18?min_worker=1&synchronous=Nan                         202
    PUT /models/wide-18?min_worker=nan&synchronous=nan                       202
    PUT /models/wide-18                                                      202
    PUT /models/wide181?min_worker=1                                         404
    PUT /models/wide-18?min_worker=2&max_worker=1                            400
    PUT /models/wide-18?min_worker=1                                         202
    PUT /models/wide-18?min_worker=0                                         202
    PUT /models/wide-18?min_worker=-1                                        500
    PUT /models/wide-18?max_worker=-1                                        400
    PUT /models/absent/1.0/set-default                                       404
    DELETE /models/wide-18                                                   200
    DELETE /models/small/0.0                                                 404

    # slashes at the end, and parameters that say nothing
    POST /models?url=small.mar&model_name=small                              200
    DELETE /models/small/?synchronous=true                                   200
    POST /models?url=small.mar&model_name=small                              200
    DELETE /models/small/?synchronous=nan                                    200
    POST /models?url=small.mar&model_name=small                              200
    DELETE /models/small/?timeout=true                                       200
    POST /models?url=small.mar&model_name=small                              200
    DELETE /models/small/?timeout=true&synchronous=-1                        200
    DELETE /models/absent                                                    404
"""
BESIDE = """
    # one default beside others, whatever stands at the end of the path
    POST /models?url=small.mar&model_name=pair                               200
    POST /models?url=second.mar&model_name=pair                              200
    DELETE /models/pair                                                      403
    DELETE /models/pair/                                                     403
    DELETE /models/pair/1.0                                                  403
    DELETE /models/pair/1.0///?timeout=1                                     403
    PUT /models/pair/2.0/set-default/                                        200
    DELETE /models/pair/1.0/                                                 200
    DELETE /models/pair                                                      200

    # slashes at the end of every other path
    GET /models/                                                             200
    POST /models/?url=small.mar&model_name=small                             200
    GET /models/small/                                                       200
    GET /models/small/1.0/                                                   200
    GET /models/small/all/                                                   200
    PUT /models/small/?min_worker=1&synchronous=TRUE                         200
    PUT /models/small/1.0/?min_worker=0&synchronous=true                     200
    OPTIONS /models/small/                                                   200
    GET /v1/models/small/                                                    200
    GET /workflows/                                                          200
    GET /workflows/absent/                                                   404
    DELETE /workflows/absent/                                                404

    # paths and methods that are none
    GET /                                                                    405
    PATCH /models/                                                           405
    POST /models/small                                                       405
    POST /v1/models/small                                                    405
    GET /models/small/1.0/extra                                              404
    PUT /models/small/1.0/other                                              404
    PUT /models/small/1.0/set-default/extra                                  404
    DELETE /models/small/1.0/extra                                           404
    GET /absent                                                              404
    GET /workflows/absent/extra                                              404
    PUT /workflows                                                           405

    # numbers and texts that are none
    GET /models?limit=1_0&next_page_token=99999999999                        200
    PUT /models/small?min_worker=99999999999&max_worker=1&synchronous=true   200
    PUT /models/small?min_worker=&max_worker=&synchronous=                   202
    PUT /models/small?min_worker=5&max_worker=-1                             400
    PUT /models/absent?max_worker=-1                                         400
    PUT /models/absent?min_worker=-1                                         404
    PUT /models/small?model_version=9                                        404
    PUT /models/small?min_worker=1&min_worker=x&synchronous=true             200
    POST /models?url=small.mar&runtime=                                      400
    POST /models?url=../small.mar                                            404
    POST /models?url={site}../small.mar                                      404
    POST /models?url=absent.mar                                              404
    POST /models?url=ftp://127.0.0.1/small.mar                               404
    POST /models?url=https://127.0.0.1:1/small.mar                           404
    POST /models?url=small.mar&url=absent.mar&model_name=twice               200
    POST /models?url=small.mar&model_name=twice                              409
    DELETE /models/twice                                                     200
    DELETE /models/small                                                     200
"""
WORKFLOWS = """
    POST /workflows?url={site}flow.war                                       200
    GET /workflows                                                           200
    GET /workflows/flow                                                      200
    POST /workflows?url={site}flow.war                                       500
    DELETE /workflows/flow                                                   200
    POST /workflows?url={site}absent.war                                     400
    GET /workflows/absent                                                    404
    DELETE /workflows/absent                                                 404
    POST /workflows?url=malformed_url,?                                      404
    POST /workflows?url={site}lacking.war                                    500
    POST /workflows?url={site}heavy.war                                      500
"""
METRICS = """
    GET /metrics                                                             200
    GET /metrics/                                                            200
    OPTIONS /                                                                200
    GET /api-description                                                     200
    GET /                                                                    405
    GET /absent                                                              404
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, str, Path]]:
    """A strict server, the address of what it may download, and its store."""
    folder = tmp_path_factory.mktemp("collections")
    store, site = folder / "store", folder / "site"
    store.mkdir()
    site.mkdir()
    for name in ("small", "digits", "dense", "wide", "batch", "second"):
        version = "2.0" if name == "second" else "1.0"
        archives.mar(store / f"{name}.mar", ANSWER, modelName=name, modelVersion=version)
    archives.mar(site / "afar.mar", ANSWER, modelName="afar")
    archives.mar(site / "torn.mar", "import a_package_that_is_absent\n", modelName="torn")
    archives.mar(store / "lacks.mar", "import a_package_that_is_absent\n")
    archives.mar(store / "weighs.mar", "def handle(data, context):\n    raise MemoryError\n")
    archives.mar(store / "fails.mar", "def handle(data, context):\n    return data and data[0]['absent']\n")
    for name, model in (("flow", "small"), ("late", "fails"), ("lacking", "lacks"), ("heavy", "weighs")):
        archives.war(site / f"{name}.war", BEFORE, SPEC % model, name=name)
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{made.server_address[1]}/"
    with serve.start(
        model_store=store, management_port=0, metrics_port=0, allow_code=True, torchserve_strict=True,
        allowed_urls=f"{address}.*", state=folder / "state.json",
    ) as running:  # fmt: skip
        yield running, address, store
    made.shutdown()
    thread.join()
    made.server_close()


def replay(base: str | None, table: str, **names: str) -> list[str]:
    """The calls of `table` that were answered otherwise, or with an error that is not in TorchServe's form."""
    wrong = []
    with httpx.Client(base_url=str(base), timeout=120) as client:
        for line in filter(None, map(str.strip, table.splitlines())):
            if line.startswith("#"):
                continue
            method, target, expected = line.split()
            answer = client.request(method, target.format(**names))
            formed = answer.is_success or (answer.json()["code"], bool(answer.json()["type"])) == (int(expected), True)
            if answer.status_code != int(expected) or not formed:
                wrong.append(f"{line}: {answer.status_code} {answer.text[:200]}")
    return wrong


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("table", [MANAGEMENT, BESIDE, WORKFLOWS], ids=["management", "beside", "workflows"])
def test_every_management_call_has_torchserves_status_and_form(
    world: tuple[RunningServer, str, Path], table: str
) -> None:
    running, site, store = world
    before = sorted(store.iterdir())
    assert replay(running.management_url, table, site=site) == []
    assert sorted(store.iterdir()) == before, "downloads are deleted with what was registered"
    assert httpx.get(f"{running.management_url}/models").json()["models"] == []


def test_the_tables_hold_all_calls_of_the_collections() -> None:
    calls = [re.findall(r"^    [A-Z]+ /", table, re.MULTILINE) for table in (MANAGEMENT, WORKFLOWS)]
    assert list(map(len, calls)) == [82, 11]


@pytest.mark.slow
def test_what_is_at_an_address_is_registered_asked_explained_counted_and_removed(
    world: tuple[RunningServer, str, Path],
) -> None:
    running, site, store = world
    with httpx.Client(timeout=120) as client:
        url = {"url": f"{site}afar.mar", "initial_workers": "1", "synchronous": "true"}
        told = client.post(f"{running.management_url}/models", params=url).json()
        assert told == {"status": 'Model "afar" Version: 1.0 registered with 1 initial workers'}
        (facts,) = client.get(f"{running.management_url}/models/afar").json()
        assert (facts["modelUrl"], (store / "afar.mar").is_file()) == (f"{site}afar.mar", True)
        for path in ("/predictions/afar", "/predictions/afar/", "/predictions/afar/1.0/more/", "/models/afar/invoke/",
                     "/afar/predict/", "/afar/1.0/predict/", "/invocations/?model_name=afar"):  # fmt: skip
            assert client.post(f"{running.url}{path}", content=b"x").json() == {"what": 1}, path
        for path in ("/explanations/afar", "/explanations/afar/", "/explanations/afar/1.0/more"):
            assert client.post(f"{running.url}{path}", content=b"x").json() == {"why": 1}, path
        for path in ("/predictions/afar/1.0", "/explanations/afar/", "/predictions/afar"):
            assert "openapi" in client.options(f"{running.url}{path}").json(), path
        assert client.get(f"{running.url}/ping/").json() == {"status": "Healthy"}
        pattern = r'Requests2XX\{Level="Host",Hostname=".*",\} \d+\.\d+'
        assert re.search(pattern, client.get(f"{running.metrics_url}/metrics").text)
        assert replay(running.metrics_url, METRICS) == []
        again = client.post(f"{running.management_url}/models", params=url)
        assert (again.status_code, again.json()["message"]) == (500, "Model file already exists afar.mar")
        assert client.delete(f"{running.management_url}/models/afar").status_code == 200
        assert not (store / "afar.mar").exists()
        torn = client.post(f"{running.management_url}/models?url={site}torn.mar&initial_workers=1")
        assert (torn.status_code, (store / "torn.mar").exists()) == (500, False)


@pytest.mark.slow
def test_a_workflow_at_an_address_answers_and_one_that_fails_is_a_500(world: tuple[RunningServer, str, Path]) -> None:
    running, site, _ = world
    with httpx.Client(timeout=120) as client:
        for name, status in (("flow", 200), ("late", 500)):
            assert client.post(f"{running.management_url}/workflows?url={site}{name}.war").status_code == 200
            answer = client.post(f"{running.url}/wfpredict/{name}/", content=b"x")
            assert answer.status_code == status, answer.text
            assert client.delete(f"{running.management_url}/workflows/{name}").status_code == 200


@pytest.mark.slow
def test_a_downloaded_model_is_back_after_a_restart_without_its_address(tmp_path: Path) -> None:
    site, store = tmp_path / "site", tmp_path / "store"
    site.mkdir()
    store.mkdir()
    archives.mar(site / "afar.mar", ANSWER, modelName="afar")
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=made.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
    address = f"http://127.0.0.1:{made.server_address[1]}/"
    options: dict[str, Any] = {"allowed_urls": f"{address}.*", "state": tmp_path / "state.json", "management_port": 0}
    with serve.start(model_store=store, allow_code=True, **options) as running:
        url = f"{running.management_url}/models?url={address}afar.mar?token=hidden&initial_workers=1"
        assert httpx.post(url.replace("?token", "%3Ftoken"), timeout=60).status_code == 200
    made.shutdown()
    made.server_close()
    with serve.start(model_store=store, allow_code=True, **options) as running:
        assert httpx.post(f"{running.url}/predictions/afar", content=b"x", timeout=60).json() == {"what": 1}
        assert "hidden" not in httpx.get(f"{running.management_url}/models/afar").text
        assert httpx.delete(f"{running.management_url}/models/afar", timeout=60).status_code == 200
    assert list(store.iterdir()) == []


@pytest.mark.slow
def test_over_https_every_port_describes_itself_and_a_model_is_served(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    archives.mar(tmp_path / "small.mar", ANSWER, modelName="small")
    with (
        serve.start(
            model_store=tmp_path, management_port=0, metrics_port=0, allow_code=True, torchserve_strict=True,
            certificate=issued.certificate, private_key=issued.key,
        ) as running,
        httpx.Client(verify=ssl.create_default_context(cafile=str(authority.certificate)), timeout=120) as client,
    ):  # fmt: skip
        for face in (running.url, running.management_url, running.metrics_url):
            assert str(face).startswith("https:")
            assert "openapi" in client.options(f"{face}/").json()
        models = f"{running.management_url}/models"
        assert client.post(f"{models}?url=small.mar&initial_workers=1&synchronous=true").status_code == 200
        assert client.get(f"{models}/small").status_code == 200
        for waits, status in (("true", 200), ("false", 202)):
            query = f"min_worker=1&max_worker=1&synchronous={waits}"
            assert client.put(f"{models}/small?{query}").status_code == status
        assert client.post(f"{running.url}/predictions/small", content=b"x").json() == {"what": 1}
        assert client.delete(f"{models}/small").status_code == 200


@pytest.mark.slow
def test_strict_without_allowed_addresses_asks_for_none_and_says_that_they_cannot_be_read(tmp_path: Path) -> None:
    archives.mar(tmp_path / "small.mar", ANSWER, modelName="small")
    asked: list[str] = []

    class Asked(Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Asked, directory=str(tmp_path)))
    threading.Thread(target=made.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
    site = f"http://127.0.0.1:{made.server_address[1]}/"
    for strict, there, absent in ((True, 500, 400), (False, 404, 404)):
        with serve.start(model_store=tmp_path, management_port=0, allow_code=True, torchserve_strict=strict) as running:
            for name, status in (("small.mar", there), ("absent.mar", absent)):
                answer = httpx.post(f"{running.management_url}/models?url={site}{name}")
                assert (answer.status_code, json.loads(answer.text)["code"]) == (status, status)
                assert "--allowed-urls" in answer.text or status == 500
    made.shutdown()
    made.server_close()
    assert asked == []
