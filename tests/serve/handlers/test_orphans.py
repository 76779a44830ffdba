"""What a kill leaves: the processes that a handler started, and temporary folders. Real servers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from trueline import serve
from trueline.bundle import pack
from trueline.serve import RunningServer
from worlds import archives, bundles, servers
from worlds.cases import few
from worlds.waiting import until, until_ended

pytestmark = pytest.mark.slow

PARENT = """
    import os, subprocess
    for apart in (False, True):
        one = subprocess.Popen(["sleep", "1000000"], start_new_session=apart)
        with open({pids!r}, "a") as file:
            file.write(f"{{one.pid}}\\n")

    def handle(data, context):
        return [os.getpid()] * len(data or [])
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, also of the servers."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A packed bundle, and an archive whose handler starts two processes, one in a session of its own."""
    folder = tmp_path / "store"
    folder.mkdir()
    archives.mar(folder / "noop.mar", PARENT.format(pids=str(tmp_path / "pids")))
    pack(bundles.double_plus(tmp_path / "tiny.bundle").path, folder / "tiny.tlb")
    return folder


def arguments_of(process: psutil.Process) -> list[str]:
    """None of one that has ended since it was listed."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def started(tmp_path: Path, count: int) -> list[int]:
    file = tmp_path / "pids"
    return until(lambda: len(found := [int(one) for one in file.read_text().split()]) == count and found, "processes")


def left(temporary: Path) -> list[str]:
    return sorted(one.name for one in temporary.glob("trueline-*"))


def kill(running: RunningServer | subprocess.Popen[bytes], *, guards: bool) -> None:
    """SIGKILL to all processes of the server, and to their guards."""
    tree = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    guards_ = [one for one in tree if "-I" in arguments_of(one)]
    assert guards_
    for one in tree if guards else [one for one in tree if one not in guards_]:
        with suppress(psutil.NoSuchProcess):  # it ended with its parent
            if one.name() != "sleep":
                one.kill()
    psutil.wait_procs(tree, timeout=0)


@pytest.mark.parametrize("processes", few([1, 2], 1, pytest.mark.jobs))
def test_what_handlers_started_ends_with_a_killed_server_and_its_folders_go(
    temporary: Path, store: Path, tmp_path: Path, processes: int
) -> None:
    with servers.running(store=store, load="all", allow_code=True, management_port=0, processes=processes) as running:
        pids = started(tmp_path, 2 * processes)
        assert left(temporary)
        kill(running, guards=False)
        until_ended(pids)
        until(lambda: not [one for one in left(temporary) if "archive" in one or "life" in one], "no folders")


@pytest.mark.jobs
def test_a_server_that_starts_cleans_up_after_killed_ones_whose_guards_were_killed_too(
    temporary: Path, store: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "tiny.bundle"
    with servers.running(store=store, load="all", allow_code=True, management_port=0, processes=2) as running:
        pids = started(tmp_path, 4)
        kill(running, guards=True)
        kinds = {name.split("-")[1] for name in left(temporary)}
        assert {"archive", "life", "state", "weights"} <= kinds
    with servers.running(bundle), servers.running(bundle):
        until_ended(pids)
        until(lambda: not left(temporary), lambda: f"no folders, found {left(temporary)}")


def test_a_server_that_starts_leaves_the_processes_and_folders_of_living_ones_alone(
    temporary: Path, store: Path, tmp_path: Path
) -> None:
    with servers.running(store=store, load="all", allow_code=True, management_port=0) as running:
        pids, before = started(tmp_path, 2), left(temporary)
        with servers.running(tmp_path / "tiny.bundle", port=0):
            pass
        assert left(temporary) == before
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert servers.post(f"{running.url}/predictions/noop", content=b"1").status_code == 200
    until_ended(pids)
    assert left(temporary) == []


@pytest.mark.parametrize("how", few([signal.SIGKILL, signal.SIGTERM], 1, pytest.mark.jobs))
def test_what_a_worker_started_ends_with_it_also_in_sessions_of_their_own(
    temporary: Path, store: Path, tmp_path: Path, how: signal.Signals
) -> None:
    with servers.running(store=store, load="noop", allow_code=True, management_port=0) as running:
        pids = started(tmp_path, 2)
        os.kill(int(servers.post(f"{running.url}/predictions/noop", content=b"1").text), how)
        until_ended(pids)
        assert all(psutil.pid_exists(pid) for pid in started(tmp_path, 4)[2:]), "those of the next worker stay"


def test_a_packed_bundle_that_a_killed_process_had_open_is_deleted(temporary: Path, store: Path) -> None:
    left_behind = temporary / "trueline-bundle-left"
    (left_behind / "bundle").mkdir(parents=True)
    with serve.start(store / "tiny.tlb"):
        until(lambda: not left_behind.exists(), "the folder of a dead process is deleted")


HANGS = """
    import subprocess
    with open({pids!r}, "a") as file:
        file.write(f"{{subprocess.Popen(['sleep', '1000000'], start_new_session=True).pid}}\\n")
    if {at_start!r}:
        open({pipe!r}).read()

    def handle(data, context):
        if data is not None:
            open({pipe!r}).read()
        return data
"""
"""Waits for ever, while it starts or at a request: a pipe that nobody writes to."""


@pytest.mark.parametrize(
    "stage",
    ["start", pytest.param("load", marks=pytest.mark.long), "rollout", pytest.param("unload", marks=pytest.mark.long)],
)
def test_a_server_that_is_killed_at_any_stage_leaves_nothing_to_the_next(
    temporary: Path, store: Path, tmp_path: Path, stage: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pids").touch()
    code = HANGS.format(pids=str(tmp_path / "pids"), pipe=str(tmp_path / "pipe"), at_start=stage != "unload")
    version = "2.0" if stage == "rollout" else "1.0"
    archives.mar(store / "hangs.mar", code, modelName="noop" if stage == "rollout" else "hangs", modelVersion=version)
    (store / "noop.mar").rename(tmp_path / "noop.mar")
    query = "models?url=hangs.mar&initial_workers=1&synchronous=true"
    command = [sys.executable, "-P", "-m", "trueline.serve", "--model-store", str(store), "--load", "all",
               "--allow-code", "--port", "0", "--management-port", "0"]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        if stage == "start":
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                pids = started(tmp_path, 1)
                kill(process, guards=True)
        else:
            load = "tiny,hangs" if stage == "unload" else "tiny"
            with servers.running(store=store, load=load, allow_code=True, management_port=0) as running:
                calls = [pool.submit(act, running, stage, query)]
                pids = started(tmp_path, 1)
                if stage == "unload":
                    calls.append(pool.submit(servers.delete, f"{running.management_url}/models/hangs"))
                kill(running, guards=True)
            assert all(isinstance(one.exception(), httpx.TransportError) for one in calls)
    (store / "hangs.mar").unlink()
    with servers.running(store=store, load="all") as running:
        until_ended(pids)
        names = [name for name in left(temporary) if name.split("-")[1] not in ("state", "weights")]
        until(lambda: not any(name in left(temporary) for name in names), lambda: f"no folders, found {names}")
        assert servers.get(f"{running.url}/v2/models/tiny/ready").status_code == 200
    assert left(temporary) == []


def act(running: RunningServer, stage: str, query: str) -> object:
    """A call that is not answered."""
    if stage == "unload":
        return servers.post(f"{running.url}/predictions/hangs", content=b"1")
    return servers.post(f"{running.management_url}/{query}")
