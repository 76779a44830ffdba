"""Promises of the live page: who sees it, what it shows after a restart, and that it never stands in a job's way."""

import asyncio
import json
import re
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from trueline import events
from trueline.train.monitor import server as pages
from trueline.train.monitor.server import Page, render_file, token_of
from worlds import job_events
from worlds.waiting import until_async

HTML = Path(pages.__file__).with_name("page.html")


@asynccontextmanager
async def opened(folder, port=0):
    page = Page(folder, token_of("secret"))
    url = await page.open(port)
    await page._tasks[0]
    async with httpx.AsyncClient(base_url=url.partition("?")[0], timeout=60.0, trust_env=False) as client:
        yield page, client
    await page.close()


def test_nobody_sees_anything_without_the_token_which_is_not_the_secret(tmp_path):
    async def scenario():
        async with opened(job_events.job_folder(tmp_path / "job", job_events.failure())) as (page, client):
            for path in ("", "state", "events", "metrics"):
                for query in ({}, {"token": ""}, {"token": "secret"}, {"token": page.token[:-1]}):
                    refused = await client.get(path, params=query)
                    assert (refused.status_code, "digits" in refused.text) == (401, False)
            assert (await client.get("state", params={"token": page.token})).json()["phase"] == "failed"
            scraped = await client.get("metrics", headers={"authorization": f"Bearer {page.token}"})
            assert 'phase="failed"' in scraped.text
            assert (await client.post("state", params={"token": page.token})).status_code == 405
            assert (page.job_dir / "page.token").read_text() == page.token
            assert (page.job_dir / "page.token").stat().st_mode & 0o77 == 0
            return page

    page = asyncio.run(scenario())
    assert "secret" not in page.url
    assert not (page.job_dir / "page.token").exists()


def test_the_page_fetches_nothing_from_elsewhere_and_the_browser_may_not_either(tmp_path):
    assert not re.search(r"https?://|@import|src=", HTML.read_text())

    async def scenario():
        async with opened(job_events.job_folder(tmp_path / "job", [])) as (page, client):
            return await client.get("", params={"token": page.token})

    policy = asyncio.run(scenario()).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy


def test_a_restarted_master_shows_what_happened_before_on_the_same_port(tmp_path):
    told = list(job_events.storm(total=300, deaths=4))
    folder = job_events.job_folder(tmp_path / "job", told[:150])
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"at": 1, "name": "step.app')  # torn when the master was killed

    async def first():
        async with opened(folder) as (page, _):
            (folder / "master.json").write_text(json.dumps({"page": page.url}))
            return page.url

    async def second():
        page = Page(folder, token_of("secret"))
        page.add_event(*told[150])  # before the past is read
        url = await page.open()
        await page._tasks[0]
        for event in told[151:]:
            page.add_event(*event)
        await page.close()
        return url, page.view.state(0.0)

    before = asyncio.run(first())
    url, state = asyncio.run(second())
    assert url == before
    whole = pages.JobView(pages.load_facts(folder))
    for event in told:
        whole.apply(*event)
    assert state == whole.state(0.0)


@pytest.mark.parametrize("slice_bytes", [7, 1 << 16])
def test_what_happens_while_the_past_is_read_is_shown_once(slice_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "SLICE_BYTES", slice_bytes)
    told = list(job_events.beginning())
    folder = job_events.job_folder(tmp_path / "job", told[:1])
    whole = (job_events.job_folder(tmp_path / "whole", told) / "events.jsonl").read_bytes()

    async def scenario():
        page = Page(folder, "token")
        for event in told[1:]:  # the master hears of it and appends it to the file that is being read
            page.add_event(*event)
        (folder / "events.jsonl").write_bytes(whole)
        await page.open()
        await page._tasks[0]
        await page.close()
        return page.view

    view = asyncio.run(scenario())
    assert view.changes == len(told)
    assert [text for _, _, text, *_ in view.lines].count("worker-0.0 starts") == 1


@pytest.mark.parametrize(("share", "rests"), [(1.0, [False]), (0.2, [True])], ids=["alone", "beside a training"])
def test_the_past_is_read_in_the_share_of_a_processor_that_it_is_given(share, rests, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "SLICE_BYTES", 512)
    folder = job_events.job_folder(tmp_path / "job", list(job_events.storm(total=300, deaths=4)))
    slept, sleep = [], asyncio.sleep

    async def sleeping(seconds):
        slept.append(seconds)
        await sleep(0)

    async def scenario():
        page = Page(folder, "token", share=share)
        monkeypatch.setattr(pages.asyncio, "sleep", sleeping)
        await page.open()
        await page._tasks[0]
        monkeypatch.setattr(pages.asyncio, "sleep", sleep)
        await page.close()

    asyncio.run(scenario())
    assert len(slept) > 100
    assert {seconds > 0 for seconds in slept} == set(rests)


def test_nobody_scrapes_counts_of_which_a_part_is_still_being_read(tmp_path):
    folder = job_events.job_folder(tmp_path / "job", list(job_events.beginning()))

    async def scenario():
        page = Page(folder, "token", share=1e-9)  # it rests for ever after the first slice
        url = await page.open()
        async with httpx.AsyncClient(base_url=url.partition("?")[0], timeout=60.0, trust_env=False) as client:
            early = await client.get("metrics", params={"token": page.token})
            page._tasks[0].cancel()
            page.share = 1.0
            await page._replay()
            later = await client.get("metrics", params={"token": page.token})
        await page.close()
        return early, later

    early, later = asyncio.run(scenario())
    assert (early.status_code, later.status_code) == (503, 200)
    assert "still being read" in early.text


def test_a_job_that_ends_before_its_page_opens_again_leaves_a_page_with_its_whole_story(tmp_path):
    told = list(job_events.failure())
    folder = job_events.job_folder(tmp_path / "job", told[:-1])

    async def scenario():
        page = Page(folder, "token", share=0.2)  # of a successor, which opens its page a second later
        page.add_event(*told[-1])
        await page.close()
        return page.view.changes

    assert asyncio.run(scenario()) == len(told)
    assert "failed" in (folder / "page.html").read_text()


def test_who_looks_is_told_at_once_when_the_job_ends_and_the_page_stays_as_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "INTERVAL_S", 300.0)  # so that only the end itself can be the reason for a second state
    folder = job_events.job_folder(tmp_path / "job", [])
    told = list(job_events.failure())

    async def scenario():
        async with opened(folder) as (page, client):
            async with client.stream("GET", "events", params={"token": page.token}) as stream:
                lines = (line async for line in stream.aiter_lines() if line.startswith("data: "))
                phases = [json.loads((await anext(lines))[6:])["phase"]]
                for event in told:
                    page.add_event(*event)
                phases.append(json.loads((await anext(lines))[6:])["phase"])
            return phases

    assert asyncio.run(asyncio.wait_for(scenario(), 200)) == ["starting", "failed"]
    kept = (folder / "page.html").read_text()
    (state,) = re.findall(r'<script type="application/json" id="state">(.*?)</script>', kept, re.DOTALL)
    assert json.loads(state)["why"].startswith("worker-1.0: ValueError")


def test_a_reason_with_markup_in_it_stays_text(tmp_path):
    view = pages.JobView({})
    view.apply("job.failed", {"why": "</script><script>alert(1)</script>"}, 1.0)
    assert b"<script>alert" not in render_file(view, 1.0)


def test_a_port_that_is_taken_is_said_and_the_page_takes_another(tmp_path):
    folder = job_events.job_folder(tmp_path / "job", [])
    said = []

    async def scenario(port):
        page = Page(folder, "token")
        with events.listening(lambda name, fields: said.append((name, fields))):
            url = await page.open(port, events.emit)
        await page._tasks[0]
        for event in job_events.failure():
            page.add_event(*event)
        await page.close()
        return url

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert re.match(r"http://127\.0\.0\.1:\d+/", url := asyncio.run(scenario(port)))
        assert f":{port}/" not in url
        assert said[0][0] == "page.failed"
        assert f"cannot have port {port}" in said[0][1]["why"]
        (folder / "master.json").write_text(json.dumps({"page": f"http://127.0.0.1:{port}/?token=x"}))
        assert asyncio.run(scenario(0)).startswith("http://127.0.0.1:")
    assert (folder / "page.html").exists()


def test_the_page_of_a_folder_follows_what_another_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "INTERVAL_S", 0.01)
    told = list(job_events.failure())
    folder = job_events.job_folder(tmp_path / "job", told[:50])
    later = job_events.job_folder(tmp_path / "all", told) / "events.jsonl"

    async def scenario():
        async with opened(folder) as (page, _):
            following = asyncio.ensure_future(page.follow())
            with (folder / "events.jsonl").open("ab") as log:
                rest = later.read_bytes()[(folder / "events.jsonl").stat().st_size :]
                log.write(rest[:-40])
                log.flush()
                await until_async(lambda: page.view.step >= 180, "the page has step 180")
                log.write(rest[-40:])
            await until_async(lambda: page.view.phase == "failed", "the page has the end")
            following.cancel()
            return page.view.changes

    assert asyncio.run(asyncio.wait_for(scenario(), 200)) == len(told)


@pytest.mark.parametrize(
    "told", [[], list(job_events.beginning()), list(job_events.storm(total=300, deaths=4, end=False))]
)
def test_every_state_of_a_job_can_be_shown(told, tmp_path):
    folder = job_events.job_folder(tmp_path / "job", told)

    async def scenario():
        async with opened(folder) as (page, client):
            return (await client.get("state", params={"token": page.token})).json()

    state = asyncio.run(scenario())
    assert state["job"]["name"] == "job"
    assert len(state["series"]["step"]) == len({fields["step"] for name, fields, _ in told if name == "step.applied"})
