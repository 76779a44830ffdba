"""The page of all submitted jobs: who waits for what, what it cost, who may see it, and what hostile names do to it."""

import asyncio
import re

import httpx
import msgspec
import pytest

from trueline.engine.cluster.settings import SlurmSettings
from trueline.train.cluster import page
from trueline.train.cluster.operate import StoredJob
from trueline.train.cluster.overview import MAX_ENDED, summarize
from trueline.train.cluster.store import JobLaunch, JobStore, LaunchEnd, LaunchStatus, SubmittedJob
from worlds import browser

NOW = 1000.0
MARKUP = "<img src=x onerror=alert(1)>"


def job(name: str, state: str, **more) -> StoredJob:
    known = {"why": "", "engine": "slurm", "launch": 1, "started": 1.0, "launched": 1.0, "store": "/s", "asked": "1:2"}
    return StoredJob(name=name, state=state, **known | more)


def names(found) -> list[str]:
    return [one["name"] for one in found]


def test_waiting_jobs_stand_in_the_order_in_which_they_start():
    jobs = [job("c", "queued", launched=5.0), job("a", "queued", priority=2, launched=9.0), job("b", "queued")]
    assert names(summarize({"/s": jobs}, {}, NOW)["waiting"]) == ["a", "b", "c"]


def test_each_job_stands_once_whatever_its_state():
    states = ("queued", "starting", "running", "finished", "failed", "stopped", "dead", "silent")
    state = summarize({"/s": [job(one, one) for one in states]}, {}, NOW)
    assert names(state["waiting"]) == ["queued"]
    assert sorted(names(state["running"])) == ["running", "silent", "starting"]
    assert sorted(names(state["ended"])) == ["dead", "failed", "finished", "stopped"]


def test_the_newest_end_is_first_and_more_than_fit_are_counted():
    jobs = [job(f"j-{number}", "finished", ended=float(number)) for number in range(MAX_ENDED + 5)]
    state = summarize({"/s": jobs}, {}, NOW)
    assert (len(state["ended"]), state["num_ended"]) == (MAX_ENDED, MAX_ENDED + 5)
    assert state["ended"][0]["name"] == f"j-{MAX_ENDED + 4}"


def test_core_hours_are_summed_over_stores_and_engines():
    stores = {"/s": [job("a", "running", core_h=1.5, workers=2)], "/t": [job("b", "dead", core_h=2.0, engine="ray:x")]}
    state = summarize(stores, {"/u": "no answer"}, NOW)
    assert (state["core_h"], state["workers"], state["faults"]) == (3.5, 2, {"/u": "no answer"})
    assert state["by_engine"] == [("ray", 1, 2.0), ("slurm", 1, 1.5)]


@pytest.fixture
def store(tmp_path):
    where = JobStore(tmp_path / "store" / "digits-1")
    made = SubmittedJob(
        name="digits-1", id="ab", recipe="r", files=(), workers="2:4", settings={}, priority=3, submitted=1.0
    )
    where.write_record("submitted.json", made)
    where.begin_launch(JobLaunch(number=1, on="slurm", engine=SlurmSettings(), submitted=2.0))
    where.write_status(1, LaunchStatus(leader="head", host="n1", step=7, total=8, core_s=7200.0, at=3.0))
    where.end_launch(1, LaunchEnd(outcome="failed", why=MARKUP, step=7, total=8, ended=4.0))
    return str(tmp_path / "store")


def test_a_page_reads_the_stores_and_shows_nothing_to_those_without_its_token(store):
    async def scenario():
        async with (
            page.serve_page(lambda: [store, f"{store}/digits-1/submitted.json"]) as url,
            httpx.AsyncClient(base_url=url.partition("?")[0], timeout=60.0, trust_env=False) as client,
        ):
            token = url.partition("token=")[2]
            for path in ("", "state"):
                for query in ({}, {"token": ""}, {"token": token[:-1]}):
                    refused = await client.get(path, params=query)
                    assert (refused.status_code, "digits" in refused.text) == (401, False)
            assert (await client.post("state", params={"token": token})).status_code == 405
            assert (await client.get("jobs", params={"token": token})).status_code == 404
            shown = await client.get("", params={"token": token})
            return shown, (await client.get("state", headers={"authorization": f"Bearer {token}"})).json()

    shown, state = asyncio.run(scenario())
    assert shown.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"https?://|@import|src=", shown.text)
    (ended,) = state["ended"]
    assert (ended["state"], ended["why"], ended["priority"], ended["asked"]) == ("failed", MARKUP, 3, "2:4")
    assert (ended["core_h"], ended["ended"], ended["launched"], state["core_h"]) == (2.0, 4.0, 2.0, 2.0)


def test_a_store_that_cannot_be_read_is_named_beside_the_others(store, monkeypatch):
    read = page.operate.list_jobs

    def fail(where):
        if where == "s3://away":
            raise OSError("no route to host")
        return read(where)

    monkeypatch.setattr(page.operate, "list_jobs", fail)
    reader = page.JobsReader(lambda: ["s3://away", store])
    reader.read()
    state = msgspec.json.decode(reader.state)
    assert state["faults"] == {"s3://away": "no route to host"}
    assert names(state["ended"]) == ["digits-1"]


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)
def test_a_browser_shows_every_job_with_its_reason_at_any_width_and_names_stay_text(tmp_path):
    jobs = [
        job("digits-1", "queued", why="waits behind digits-9-3f09c2.1 (priority 5)", launched=NOW - 65),
        job("w" * 80, "running", step=3, total=4, core_h=1.0, loss=0.5), job("text-2", "failed", why=MARKUP),
    ]  # fmt: skip
    file = tmp_path / "jobs.html"
    file.write_bytes(page.render_file(msgspec.json.encode(summarize({"/s": jobs}, {"/t": MARKUP}, NOW))))
    with browser.browser(tmp_path / "browser") as opened:
        for width, dark in ((400, True), (1400, False)):
            opened.open(file.as_uri(), width=width, dark=dark)
            assert opened.until("document.querySelectorAll('article').length") == 3
            text = opened.text()
            assert "waits behind digits-9 (priority 5)" in text
            assert "1 min" in text
            assert text.count(MARKUP) == 2
            assert opened.ask("document.documentElement.scrollWidth") == width
        assert opened.ask("document.images.length") == 0
        assert opened.complaints == []
