"""The server's live page: it shows what is served, holds nothing itself, and works in a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serve_worlds as worlds
from test_serve_fleet import Office

from trueline.serve import dashboard, start
from trueline.serve.fleet import Found
from trueline.serve.guard import is_open
from trueline.serve.http import Request, Response

ROWS = json.dumps([[1, 2, 3], [4, 5, 6]]).encode()
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    worlds.double_plus(tmp_path / "pair" / "1.bundle")
    worlds.double_plus(tmp_path / "pair" / "2.bundle")
    made = Office(tmp_path)
    for entry in made.store.entries():
        made.run(made.fleet.load(Found(path=entry.path), entry.model, entry.version, source=entry.source))
    yield made
    made.close()


def test_the_state_says_what_is_served_who_is_asked_and_how_long_it_took(office: Office) -> None:
    office.fleet.set_split("pair", {"1": 3, "2": 1})
    for version in ("1", "1", "2"):
        assert office.ask("POST", f"/predictions/pair/{version}", ROWS)[0] == 200
    found = dashboard.state(office.models, office.routes.stats, now=1000.0)
    assert (found["now"], found["ready"], found["answers"]) == (1000.0, True, {"200": 3})
    (model,) = found["models"]
    first, second = model["versions"]
    assert (model["name"], model["default"], first["share"], second["share"]) == ("pair", "1", 0.75, 0.25)
    assert (first["requests"], first["rows"], second["requests"]) == (2, 4, 1)
    assert sum(first["latency_cells"]) == 2
    assert len(first["latency_cells"]) == len(found["bounds_s"]) + 1
    assert (first["golden_cases"], first["state"], first["waiting"]) == (1, "ready", 0)


def test_a_version_that_is_not_ready_is_shown_with_its_reason(office: Office) -> None:
    office.models.add("pair", "3").fail("it fails its golden example")
    shown = dashboard.state(office.models, office.routes.stats, now=0.0)["models"][0]["versions"][2]
    assert (shown["state"], shown["reason"], shown["share"]) == ("failed", "it fails its golden example", 0.0)
    assert "digest" not in shown


def test_the_state_is_json_on_the_data_port_and_nothing_else_is_there(office: Office) -> None:
    status, found = office.ask("GET", "/dashboard/state")
    assert (status, [model["name"] for model in found["models"]]) == (200, ["pair"])
    assert office.ask("POST", "/dashboard/state")[0] == 405
    assert office.ask("GET", "/dashboard/other")[0] == 404


@pytest.mark.parametrize("page", [dashboard.page(), dashboard.try_page()])
def test_the_page_fetches_nothing_from_elsewhere_and_is_kept_from_doing_so(page: Response) -> None:
    links = set(re.findall(rb"https?://[^\"' ]+", page.body)) - {b"http://www.w3.org/2000/svg"}
    assert links == set()
    assert b"innerHTML" not in page.body  # what a model is called is text, never markup
    assert b"default-src 'none'" in page.headers


def test_the_page_needs_no_token_and_what_it_shows_does() -> None:
    assert is_open("/dashboard")
    assert is_open("/try")
    assert not is_open("/openapi.json")
    assert not is_open("/dashboard/state")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page with")
def test_a_browser_shows_the_versions_and_draws_the_plots(tmp_path: Path) -> None:
    made = worlds.double_plus(tmp_path / "digits.bundle")
    with start(made.path, name="digits <b>") as server:
        urllib.request.urlopen(
            urllib.request.Request(f"{server.url}/predictions/digits%20%3Cb%3E", data=ROWS), timeout=30
        )
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser",
                   "--virtual-time-budget=8000", "--dump-dom", f"{server.url}/dashboard"]  # fmt: skip
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "● ready" in shown
    assert "<h2>digits &lt;b&gt;</h2>" in shown
    assert shown.count("<svg") == 4
    assert "1 agreed" in shown


def test_every_port_has_a_page_to_try_it_on(office: Office) -> None:
    for app in (office.routes, office.management):
        found = app.answer(Request("GET", b"/try", {}, b""))
        assert isinstance(found, Response)
        assert (found.status, found.content_type) == (200, dashboard.HTML)
        assert b"/openapi.json" in found.body


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page with")
def test_a_browser_lists_what_a_port_can_be_asked(tmp_path: Path) -> None:
    with start(worlds.double_plus(tmp_path / "digits.bundle").path, name="digits") as server:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/browser",
                   "--virtual-time-budget=8000", "--dump-dom", f"{server.url}/try"]  # fmt: skip
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert '<h1 id="title">Trueline' in shown
    assert "<code>POST /v2/models/digits/infer</code>" in shown
    assert shown.count("<textarea") > 3
    assert shown.count("Send</button>") == shown.count("<details")


def test_the_examples_of_the_document_are_answered(office: Office) -> None:
    paths = office.ask("GET", "/openapi.json")[1]["paths"]

    def proposed(path: str) -> dict[str, Any]:
        found: dict[str, Any] = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return found

    said = proposed("/v2/models/pair/infer")["properties"]["inputs"]["items"]["properties"]
    tensor = {
        "name": said["name"]["enum"][0],
        "datatype": said["datatype"]["enum"][0],
        "shape": said["shape"]["example"],
    }
    tensor["data"] = [1] * math.prod(tensor["shape"])
    assert office.ask("POST", "/v2/models/pair/infer", json.dumps({"inputs": [tensor]}).encode())[0] == 200
    instances = json.dumps(proposed("/v1/models/pair:predict")["example"]).encode()
    assert office.ask("POST", "/v1/models/pair:predict", instances) == (200, {"predictions": [[3.0, 3.0, 3.0]]})
