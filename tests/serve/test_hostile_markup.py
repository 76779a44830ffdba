"""Names, reasons, labels and errors that are markup or script are text in every page that a browser shows.

MLflow CVE-2023-6568, CVE-2024-27133, CVE-2026-33865.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trueline.doctor import report
from trueline.doctor.report import Cause, Diagnosis, Rewrite, Row
from trueline.serve.metrics import dashboard
from trueline.train.monitor.job_view import JobView
from trueline.train.monitor.server import render_file
from trueline.web.messages import Request, Response
from worlds import browser, bundles, servers
from worlds.servers import StoreApp

MARKUP = (
    '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\'"&</script><!-- ]]> {{7*7}} ${7*7} \u2028'
)
NAMES = ("__proto__", "constructor", "toString", "hasOwnProperty", "prototype")
FACTS = {
    "name": MARKUP, "recipe": f"/x/{MARKUP}", "epochs": 2, "global_batch": 8, "workers": 2, "min_workers": 1, "seed": 0,
    "bitwise": False, "precision": MARKUP, "micro_batch": None, "autoscale": False, "monitor": MARKUP,
}  # fmt: skip
COUNTS = ("since", "waiting", "requests", "failed", "request_s", "queue_s", "infer_s", "rows", "runs")


def hostile_job() -> JobView:
    view = JobView(FACTS)
    for slot, name in enumerate((MARKUP, *NAMES)):
        view.apply("worker.started", {"worker": f"worker-{slot}.0", "slot": slot}, 1.0)
        view.apply("worker.lost", {"worker": name, "why": name}, 2.0)
        view.apply("record.set_aside", {"record": slot, "where": name, "why": name}, 3.0)
        view.apply(name, {name: name}, 3.0)
        metrics = msgspec.json.encode({name: 1.0}).decode()
        view.apply("evaluation.done", {"step": slot, "loss": 1.0, "metrics": metrics, "best": True}, 4.0)
    view.apply("job.failed", {"why": MARKUP, "hint": MARKUP}, 9.0)
    return view


def hostile_state() -> dict[str, Any]:
    def version(name: str) -> dict[str, Any]:
        texts = dict.fromkeys(("reason", "digest", "platform", "batching_reason"), MARKUP)
        facts = {"share": 1.0, "latency_cells": [1, 2], "golden_cases": 1, "batching": False, "workers": 1}
        return {"version": name, "state": name} | texts | facts | dict.fromkeys(COUNTS, 1)

    models = [
        {"name": name, "default": name, "versions": [version(name), version(MARKUP)], "shadow": {MARKUP: MARKUP}}
        for name in (MARKUP, *NAMES)
    ]
    return {"now": 1.0, "ready": True, "bounds_s": [0.1], "answers": {MARKUP: 1, "__proto__": 2}, "models": models}


def test_the_file_of_a_job_contains_its_state_as_text_alone() -> None:
    page = render_file(hostile_job(), 10.0)
    state = page.partition(b'<script type="application/json" id="state">')[2].partition(b"</script>")[0]
    assert b"<" not in state
    assert msgspec.json.decode(state)["why"] == MARKUP
    assert page.count(b"<script") == 2


def test_the_page_of_the_doctor_escapes_whatever_it_quotes() -> None:
    cause = Cause(kind="item", file=f"/x/{MARKUP}.py", line=1, source=MARKUP, words=MARKUP)
    diff = f"+{MARKUP}"
    rewrite = Rewrite(class_name=MARKUP, file="x", steps=(MARKUP,), diff=diff, probes=1, max_abs_error=0.0, onnx=MARKUP)
    rows = (
        Row(path=MARKUP, class_name=MARKUP, status="blocked", cause=cause, why_not=MARKUP),
        Row(path="a", class_name="A", status="rewritten", rewrite=rewrite),
    )
    page = report.page(Diagnosis(recipe=MARKUP, rows=rows, before=None))
    assert "<img" not in page
    assert "<script" not in page
    assert page.count("&lt;img src=x onerror=&quot;") >= 8


def test_an_error_is_json_or_text_and_never_a_page(tmp_path: Path) -> None:
    with StoreApp(bundles.store(tmp_path, "tiny")) as app:
        for path in (f"/{MARKUP}", f"/v2/models/{MARKUP}", f"/predictions/{MARKUP}", "/models/<b>/invoke"):
            request = Request("GET", path.encode(), {b"accept": b"text/html"}, b"")
            for one in (app.routes, app.management):
                response = one.answer(request)
                assert isinstance(response, Response)
                assert response.status in (400, 404, 405)
                assert response.content_type == b"application/json"


in_a_browser = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def shows(shown: browser.Page, url: str, word: str) -> None:
    shown.open(url, width=1200)
    shown.until(f"document.body && document.body.innerText.includes({word!r})")
    assert shown.ask("window.owned === undefined && ({}).polluted === undefined")
    assert shown.ask("document.querySelectorAll('img').length") == 0
    assert shown.complaints == []


@pytest.mark.slow
@in_a_browser
def test_a_job_whose_every_word_is_markup_is_shown_as_text(shown: browser.Page, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(render_file(hostile_job(), 10.0))
    shows(shown, (tmp_path / "page.html").as_uri(), "onerror")


@pytest.mark.slow
@in_a_browser
def test_a_server_whose_every_word_is_markup_is_shown_as_text(shown: browser.Page, tmp_path: Path) -> None:
    html = dashboard.page().body.replace(b'fetch("dashboard/state"', b"fetch(window.state")
    html = html.replace(b'fetch("dashboard/history"', b"fetch(window.past")
    state = msgspec.json.encode(hostile_state()).replace(b"<", b"\\u003c")
    blob = b"window.%b = URL.createObjectURL(new Blob([JSON.stringify(%b)]));"
    told = blob % (b"state", state) + blob % (b"past", b"[" + state + b"]")
    (tmp_path / "dashboard.html").write_bytes(html.replace(b'"use strict";', b'"use strict";\n' + told, 1))
    shows(shown, (tmp_path / "dashboard.html").as_uri(), "onerror")


@pytest.mark.slow
@in_a_browser
def test_the_pages_of_a_server_work_under_their_own_policy(shown: browser.Page, tmp_path: Path) -> None:
    with servers.running(bundles.double_plus(tmp_path / "constructor.bundle").path, name="constructor") as server:
        shows(shown, f"{server.url}/dashboard", "constructor")
        shows(shown, f"{server.url}/try", "constructor")
        shown.ask("(() => { const node = document.createElement('script'); node.textContent = 'window.owned = 1';"
                 " document.body.append(node); return 1; })()")  # fmt: skip
        assert shown.ask("window.owned === undefined")
        assert any("Content Security Policy" in complaint for complaint in shown.complaints)
