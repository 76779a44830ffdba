"""The server's live page: it shows what is served, holds nothing itself, and works in a real browser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline import serve
from trueline.serve.metrics import dashboard
from trueline.web.auth import is_open
from trueline.web.messages import Request, Response
from trueline.web.pages import asks_for_home
from worlds import browser, bundles, servers
from worlds.cases import few
from worlds.servers import StoreApp

ROWS = json.dumps([[1, 2, 3], [4, 5, 6]]).encode()


@pytest.fixture
def pair_app(tmp_path: Path) -> Iterator[StoreApp]:
    """Two versions of `pair`, both loaded."""
    with StoreApp(bundles.store(tmp_path, "pair/1", "pair/2")) as made:
        for version in ("1", "2"):
            assert made.manage("POST", f"/models?url=pair/{version}.bundle&initial_workers=1")[0] == 200
        yield made


def test_the_state_says_what_is_served_who_is_asked_and_how_long_it_took(pair_app: StoreApp) -> None:
    pair_app.fleet.set_split("pair", {"1": 3, "2": 1})
    for version in ("1", "1", "2"):
        assert pair_app.ask("POST", f"/predictions/pair/{version}", ROWS)[0] == 200
    found = dashboard.state(pair_app.models, pair_app.routes.stats, now=1000.0)
    assert (found["now"], found["ready"], found["answers"]) == (1000.0, True, {"200": 3})
    (model,) = found["models"]
    first, second = model["versions"]
    assert (model["name"], model["default"], first["share"], second["share"]) == ("pair", "1", 0.75, 0.25)
    assert (first["requests"], first["rows"], second["requests"]) == (2, 4, 1)
    assert sum(first["latency_cells"]) == 2
    assert len(first["latency_cells"]) == len(found["bounds_s"]) + 1
    assert (first["golden_cases"], first["state"], first["waiting"]) == (1, "ready", 0)


def test_a_version_that_is_not_ready_is_shown_with_its_reason(pair_app: StoreApp) -> None:
    pair_app.models.add("pair", "3").fail("it fails its golden record")
    shown = dashboard.state(pair_app.models, pair_app.routes.stats, now=0.0)["models"][0]["versions"][2]
    assert (shown["state"], shown["reason"], shown["share"]) == ("failed", "it fails its golden record", 0.0)
    assert "digest" not in shown


def test_the_state_is_json_on_the_data_port_and_nothing_else_is_there(pair_app: StoreApp) -> None:
    status, found = pair_app.ask("GET", "/dashboard/state")
    assert (status, [model["name"] for model in found["models"]]) == (200, ["pair"])
    assert pair_app.ask("POST", "/dashboard/state")[0] == 405
    assert pair_app.ask("GET", "/dashboard/other")[0] == 404


def test_a_page_that_is_opened_late_gets_the_counters_of_the_last_five_minutes(pair_app: StoreApp) -> None:
    history = dashboard.History()
    for second in range(310):
        if second in (10, 305):
            assert pair_app.ask("POST", "/predictions/pair/1", ROWS)[0] == 200
        history.record(pair_app.models, float(second))
    samples = json.loads(history.answer().body)
    assert [samples[0]["now"], samples[-1]["now"]] == [10.0, 309.0]
    counts = [sample["models"][0]["versions"][0]["requests"] for sample in samples]
    assert counts == [1] * 295 + [2] * 5, "a sample keeps the counters of its second"
    assert sum(samples[0]["models"][0]["versions"][0]["latency_cells"]) == 1


def test_every_example_of_the_document_is_a_golden_record_that_the_model_answers(pair_app: StoreApp) -> None:
    _, document = pair_app.ask("GET", "/openapi.json")
    examples = {
        path: schema["example"]
        for path, methods in document["paths"].items()
        for content in methods.get("post", {}).get("requestBody", {}).get("content", {}).values()
        if "example" in (schema := content["schema"])
    }
    assert examples["/predictions/pair/2"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert examples["/v2/models/pair/infer"]["inputs"][0]["data"] == [float(n) for n in range(12)]
    for path, example in examples.items():
        assert pair_app.ask("POST", path, json.dumps(example).encode())[0] == 200, path


def test_a_browser_gets_a_start_page_and_a_client_gets_json(pair_app: StoreApp) -> None:
    for accept, expected in ((b"text/html,*/*", dashboard.HTML), (b"*/*", b"application/json")):
        found = pair_app.routes.answer(Request("GET", b"/", {b"accept": accept}, b""))
        assert isinstance(found, Response)
        assert (found.status, found.content_type) == (200, expected)
    for link in ("/try", "/dashboard", "/openapi.json", "/metrics", "/v2"):
        assert f'href="{link}"'.encode() in dashboard.home_page().body
    for link in ("/try", "/dashboard", "/openapi.json", "/v2"):
        found = pair_app.routes.answer(Request("GET", link.encode(), {}, b""))
        assert isinstance(found, Response)
        assert found.status == 200


@pytest.mark.parametrize("page", [dashboard.home_page(), dashboard.page(), dashboard.try_page()])
def test_the_page_fetches_nothing_from_elsewhere_and_is_kept_from_doing_so(page: Response) -> None:
    links = set(re.findall(rb"https?://[^\"' ]+", page.body)) - {b"http://www.w3.org/2000/svg"}
    assert links == set()
    assert b"innerHTML" not in page.body  # what a model is called is text, never markup
    assert b"default-src 'none'" in page.headers


def test_the_page_needs_no_token_and_what_it_shows_does() -> None:
    assert not is_open("/")
    assert asks_for_home(Request("GET", b"/", {b"accept": b"text/html"}, b""))
    assert not asks_for_home(Request("OPTIONS", b"/", {b"accept": b"text/html"}, b"")), "that is the API's description"
    assert is_open("/dashboard")
    assert is_open("/try")
    assert not is_open("/openapi.json")
    assert not is_open("/dashboard/state")
    assert not is_open("/dashboard/history")


def test_every_port_has_a_page_to_try_it_on(pair_app: StoreApp) -> None:
    for app in (pair_app.routes, pair_app.management):
        found = app.answer(Request("GET", b"/try", {}, b""))
        assert isinstance(found, Response)
        assert (found.status, found.content_type) == (200, dashboard.HTML)
        assert b"/openapi.json" in found.body


needs_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)
WIDTHS = [400, 1600]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serve.RunningServer]:
    """Two versions of a model whose name is markup, a quarter of the requests to the second."""
    store = tmp_path_factory.mktemp("store")
    bundles.double_plus(store / "pair" / "1.bundle")
    bundles.double_plus(store / "pair" / "2.bundle")
    bundles.double_plus(store / "alone.bundle")
    with serve.start(store / "alone.bundle", name="digits <b>", model_store=str(store), load="pair",
                     management_port=0) as running:  # fmt: skip
        servers.put(f"{running.management_url}/models/pair/split?1=3&2=1").raise_for_status()
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.jobs
@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", few(WIDTHS, 1, pytest.mark.jobs))
def test_a_browser_shows_the_versions_and_draws_what_they_do(
    served: serve.RunningServer, page: browser.Page, width: int, tmp_path: Path
) -> None:
    page.open(f"{served.url}/dashboard", width=width)
    page.until("document.querySelectorAll('h2').length === 2")
    for _ in range(3):
        for model in ("pair", "digits%20%3Cb%3E"):
            servers.post(f"{served.url}/predictions/{model}", content=ROWS).raise_for_status()
    page.until("[...document.querySelectorAll('path')].some((line) => line.getAttribute('d').includes('L'))")
    shown = page.text()
    assert "● ready" in shown
    assert "digits <b>" in shown
    assert re.search(r"\b75 %", shown)
    assert re.search(r"\b25 %", shown)
    assert "1 agreed" in shown
    assert page.ask("document.querySelectorAll('svg').length") == 8
    assert looks_right(page, width)


@pytest.mark.slow
@needs_browser
def test_a_table_that_was_scrolled_stays_so_when_the_page_looks_again(
    served: serve.RunningServer, page: browser.Page
) -> None:
    page.open(f"{served.url}/dashboard", width=400)
    page.until("document.querySelector('.scroll') !== null")
    page.ask("(document.querySelector('.scroll').scrollLeft = 150, seen = document.querySelector('table'), true)")
    page.until("document.querySelector('table') !== seen")
    assert page.ask("document.querySelector('.scroll').scrollLeft") == 150


@pytest.mark.slow
@needs_browser
def test_a_reader_who_likes_it_dark_gets_it_dark(served: serve.RunningServer, page: browser.Page) -> None:
    grounds = []
    for dark in (False, True):
        page.open(f"{served.url}/dashboard", width=800, dark=dark)
        page.until("document.querySelector('table') !== null")
        grounds.append(page.ask("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 249)", "rgb(20, 24, 29)"]


@pytest.mark.jobs
@pytest.mark.slow
@needs_browser
def test_a_server_that_stops_is_said_on_the_page(page: browser.Page, tmp_path: Path) -> None:
    with serve.start(bundles.double_plus(tmp_path / "digits.bundle").path) as running:
        page.open(f"{running.url}/dashboard", width=800)
        page.until("document.body && document.body.innerText.includes('● ready')")
    page.until("document.body.innerText.includes('the server does not answer')")
    page.complaints.clear()  # of connections that are refused


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_port_can_be_asked_is_asked_by_a_click(
    served: serve.RunningServer, page: browser.Page, width: int
) -> None:
    page.open(f"{served.url}/try", width=width)
    page.until("document.querySelectorAll('details').length > 10")
    assert page.text().startswith("Trueline")
    for path in ("POST /v2/models/pair/infer", "POST /v1/models/pair:predict", "POST /predictions/pair", "GET /v2"):
        page.ask(
            "(card = [...document.querySelectorAll('details')]"
            f".find((one) => one.querySelector('summary code').textContent === {path!r}),"
            " card.open = true, card.querySelector('button').click(), true)"
        )
        assert page.until("(card.querySelector('.good, .bad') || {}).textContent").startswith("200 OK")
    assert looks_right(page, width)


@pytest.mark.slow
@needs_browser
def test_an_image_from_a_file_fills_the_tensor_of_a_model_that_takes_images(
    served: serve.RunningServer, page: browser.Page
) -> None:
    page.open(f"{served.url}/try", width=800)
    page.until("document.querySelectorAll('details').length > 10")
    assert page.ask("[[4, 3, 8, 9], [2, 9, 8, 1], [4, 3], [1, 2, 8, 8]].map((shape) => Boolean(layout(shape)))") == [
        True, True, False, False]  # fmt: skip
    page.ask("""(
        body = make("textarea"), box = picker("x", body), drawing = make("canvas", {width: 8, height: 8}),
        write(body, {inputs: [{name: "x", shape: [4, 1, 8, 8], datatype: "FP32", data: []}]}),
        ink = drawing.getContext("2d"), ink.fillStyle = "white", ink.fillRect(0, 0, 4, 8),
        drawing.toBlob((blob) => {
          const given = new DataTransfer(), input = box.querySelector("input");
          given.items.add(new File([blob], "half.png"));
          input.files = given.files;
          input.dispatchEvent(new Event("change"));
        }), true)""")
    page.until("body.value.length > 150")
    (tensor,) = json.loads(page.ask("body.value"))["inputs"]
    assert (tensor["shape"], tensor["data"]) == ([1, 1, 8, 8], [1, 1, 1, 1, 0, 0, 0, 0] * 8)


@pytest.mark.slow
@needs_browser
def test_an_image_from_a_file_and_a_list_of_numbers_fill_cells_of_a_record(
    served: serve.RunningServer, page: browser.Page
) -> None:
    page.open(f"{served.url}/try", width=800)
    page.until("document.querySelectorAll('details').length > 10")
    page.ask("""(
        body = make("textarea"), write(body, [{picture: "iVBORw0KGgo=", beats: [1, 2.5]}]),
        [box, beats] = cells(body), beats.querySelector("input").value = "3, 4.5 fast",
        beats.querySelector("input").dispatchEvent(new Event("input")),
        given = new DataTransfer(), input = box.querySelector("input"),
        given.items.add(new File([Uint8Array.of(255, 216, 255, 224)], "a.jpg")),
        input.files = given.files, input.dispatchEvent(new Event("change")), true)""")
    page.until("body.value.includes('/9j/')")
    assert json.loads(page.ask("body.value")) == [{"picture": "/9j/4A==", "beats": [3, 4.5, "fast"]}]
    assert page.ask("box.querySelector('img').getAttribute('src')") == "data:image/jpeg;base64,/9j/4A=="


@pytest.mark.slow
@needs_browser
def test_the_page_of_the_management_port_asks_that_port(served: serve.RunningServer, page: browser.Page) -> None:
    page.open(f"{served.management_url}/try", width=800)
    page.until("document.querySelectorAll('details').length > 5")
    page.ask(
        "(card = [...document.querySelectorAll('details')]"
        ".find((one) => one.querySelector('summary code').textContent === 'GET /models'),"
        " card.open = true, card.querySelector('button').click(), true)"
    )
    assert page.until("(card.querySelector('.good, .bad') || {}).textContent").startswith("200 OK")
    assert '"modelName": "pair"' in page.ask("card.querySelector('pre').textContent")
    assert looks_right(page, 800)


def looks_right(page: browser.Page, width: int) -> bool:
    """Whether nothing sticks out at the side, no text is tiny, and no script failed."""
    assert page.ask("document.documentElement.scrollWidth") <= width
    scale = "one.getBoundingClientRect().width / one.viewBox.baseVal.width"
    scales = page.ask(f"[...document.querySelectorAll('svg')].map((one) => {scale})")
    assert all(0.95 < one < 1.05 for one in scales), "text in plots is drawn larger or smaller"
    assert not page.complaints
    return True


def test_the_examples_of_the_document_are_answered(pair_app: StoreApp) -> None:
    paths = pair_app.ask("GET", "/openapi.json")[1]["paths"]

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
    assert pair_app.ask("POST", "/v2/models/pair/infer", json.dumps({"inputs": [tensor]}).encode())[0] == 200
    instances = json.dumps(proposed("/v1/models/pair:predict")["example"]).encode()
    assert pair_app.ask("POST", "/v1/models/pair:predict", instances) == (200, {"predictions": [[3.0, 3.0, 3.0]]})
