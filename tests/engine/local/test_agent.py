"""The local engine keeps the laws, and its processes do not outlive the launcher."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from conformance.engine import *  # noqa: F403  the shared tests
from conformance.engine import spec, until
from trueline.engine.contract import Kind, Seen
from trueline.engine.local import process
from trueline.engine.local.agent import Agent, describe_exit, describe_loss
from trueline.engine.local.client import LocalEngine, start_agent
from worlds import TESTS
from worlds.waiting import until as until_true
from worlds.waiting import until_ended


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    scratch = tempfile.mkdtemp(prefix="tl-")  # a socket's path is short
    life, life_end = os.pipe()
    agent = start_agent(Path(scratch, "agent"), preload=(), life=life, log=tmp_path / "agent.log")
    yield LocalEngine(str(Path(scratch, "agent")))
    os.close(life_end)
    agent.wait(100)
    os.close(life)
    assert not os.path.exists(scratch)  # the agent leaves nothing behind


def test_when_the_lifeline_ends_every_process_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    scratch = tempfile.mkdtemp(prefix="tl-")
    life, life_end = os.pipe()
    agent = start_agent(Path(scratch, "agent"), preload=(), life=life, log=tmp_path / "agent.log")
    engine = LocalEngine(str(Path(scratch, "agent")))

    async def scenario():
        await engine.add([spec("stubborn", tmp_path, slot=slot) for slot in range(2)])
        return [psutil.Process(seen.pid) for seen in await engine.list()]

    processes = asyncio.run(scenario())
    os.close(life_end)
    assert agent.wait(100) == 0
    os.close(life)
    assert not os.path.exists(scratch)  # the agent leaves nothing behind
    until_ended(one.pid for one in processes)


@pytest.mark.parametrize("stands_still", [False, True], ids=["running", "stopped"])
def test_processes_end_even_when_the_agent_was_killed_and_then_the_launcher(tmp_path, monkeypatch, stands_still):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(prefix="tl-") as scratch:
        life, life_end = os.pipe()
        agent = start_agent(Path(scratch, "agent"), preload=(), life=life, log=tmp_path / "agent.log")
        engine = LocalEngine(str(Path(scratch, "agent")))

        async def scenario():
            await engine.add([spec("polite", tmp_path)])
            return [psutil.Process(seen.pid) for seen in await engine.list()]

        processes = asyncio.run(scenario())
        log = tmp_path / "polite-0.0.log"
        while not log.exists() or "ready" not in log.read_text():  # it has asked the kernel to be woken by then
            assert agent.poll() is None
        agent.kill()
        agent.wait()
        assert all(process.is_running() for process in processes)
        if stands_still:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
                while process.status() != psutil.STATUS_STOPPED:
                    pass
        os.close(life_end)
        os.close(life)
        until_ended(one.pid for one in processes)


def after_the_agents_death(tmp_path, monkeypatch, act):
    """What the next agent's client sees of `role-0.0`, once `act(engine, process)` was awaited."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    with tempfile.TemporaryDirectory(prefix="tl-") as scratch:
        path, (life, life_end) = Path(scratch, "agent"), os.pipe()
        engine = LocalEngine(str(path))
        first = start_agent(path, preload=(), life=life, log=tmp_path / "agent.log")
        asyncio.run(engine.add([spec("wait", tmp_path)]))
        (seen,) = asyncio.run(engine.list())
        process = psutil.Process(seen.pid)
        first.kill()
        first.wait()
        path.unlink()
        found = asyncio.run(act(path, engine, process, life))
        os.close(life_end)
        os.close(life)
        until_ended([process.pid])
        return found


def test_an_agent_that_was_restarted_sees_and_kills_what_the_former_one_has_forked(tmp_path, monkeypatch):
    async def act(path, engine, process, life):
        agent = start_agent(path, preload=(), life=life, log=tmp_path / "agent.log")
        assert [(seen.ref, seen.pid, seen.alive) for seen in await engine.list()] == [("role-0.0", process.pid, True)]
        process.suspend()
        await engine.kill("role-0.0")
        ended = await until(engine, "role-0.0", Kind.LOST)
        await engine.add([spec("fail", tmp_path, slot=1)])
        assert (await until(engine, "role-1.0", Kind.EXITED)).code == 7
        agent.terminate()
        agent.wait()
        return ended

    assert "its agent had died" in after_the_agents_death(tmp_path, monkeypatch, act).reason


def test_what_ended_while_no_agent_was_there_is_reported_and_a_reused_pid_is_left_alone(tmp_path, monkeypatch):
    async def act(path, engine, process, life):
        process.kill()
        until_ended([process.pid])
        with Path(f"{path}.born").open("a") as births:  # pid 1 lives, and began at another time
            births.write('{"ref": "role-7.0", "pid": 1, "started": 1}\n{"ref": "to')
        agent = start_agent(path, preload=(), life=life, log=tmp_path / "agent.log")
        found = {seen.ref: seen.kind for seen in await engine.list()}
        await engine.kill("role-7.0")
        agent.terminate()
        agent.wait()
        return found

    found = after_the_agents_death(tmp_path, monkeypatch, act)
    assert found == {"role-0.0": Kind.LOST, "role-7.0": Kind.LOST}
    assert psutil.pid_exists(1)


def test_importing_the_engine_loads_no_torch():
    code = "import sys, trueline.engine.local.agent, trueline.engine.local.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "failed"),
    [(0, False), (3, True), (-signal.SIGSEGV, True), (-signal.SIGKILL, False), (-signal.SIGTERM, False)],
)
def test_who_ends_badly_by_itself_is_told_from_who_was_killed(code, failed):
    assert describe_exit("worker-0.0", 7, code).failed is failed
    assert not describe_loss("worker-0.0", 7).failed  # nobody knows


@pytest.fixture
def agent(monkeypatch):
    """An agent in this process; `agent.sent`: the signals that it has sent, `agent.waited`: whom it has waited for."""
    with tempfile.TemporaryDirectory(prefix="tl-") as scratch:
        monkeypatch.delenv(process.LIFELINE, raising=False)
        found = Agent(f"{scratch}/a")
        found.sent, found.waited = [], []
        monkeypatch.setattr(found, "_signal", lambda seen, number: found.sent.append((seen.ref, number)))
        monkeypatch.setattr("trueline.engine.local.agent.os.waitid", lambda kind, pid, how: found.waited.append(pid))
        monkeypatch.setattr(process, "signal_group", lambda pid, number: found.sent.append((pid, number)))
        yield found
        for connection in (found.listener, found.wake, found.waker):
            connection.close()
        found.selector.close()


def started(ref, pid):
    return Seen(ref=ref, kind=Kind.STARTED, pid=pid)


def test_a_second_order_to_end_gives_a_process_no_more_time(agent, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trueline.engine.local.agent.time.monotonic", lambda: now[0])
    agent.seen["w"] = started("w", 11)
    agent._kill("w", 5.0)
    now[0] = 104.0
    agent._kill("w", 5.0)
    agent._kill_overdue(104.9)
    assert agent.sent == [("w", signal.SIGTERM)] * 2
    agent._kill_overdue(105.0)
    assert agent.sent[2:] == [("w", signal.SIGKILL)]
    agent._kill_overdue(999.0)
    assert len(agent.sent) == 3


def test_an_exit_is_that_of_the_living_process_though_a_dead_one_had_its_pid(agent, monkeypatch):
    agent.seen = {"old": describe_exit("old", 11, 0), "new": started("new", 11)}
    ends = iter([SimpleNamespace(si_pid=11), None])
    monkeypatch.setattr("trueline.engine.local.agent.os.waitid", lambda *_: next(ends))
    monkeypatch.setattr("trueline.engine.local.agent.os.waitpid", lambda pid, how: (pid, 3 << 8))
    agent._reap()
    assert agent.sent == [(11, signal.SIGTERM)], "what it has started"
    assert (agent.seen["old"].code, agent.seen["new"].code, agent.seen["new"].alive) == (0, 3, False)


def test_an_agent_that_ends_kills_what_runs_and_waits_for_it(agent):
    agent.seen = {"dead": describe_exit("dead", 10, 0), "one": started("one", 11), "other": started("other", 12)}
    agent.end()
    assert agent.sent[:2] == [("one", signal.SIGKILL), ("other", signal.SIGKILL)]
    assert agent.sent[2:] == [(11, signal.SIGTERM), (12, signal.SIGTERM)], "what they have started"
    assert agent.waited == [11, 12]


def test_an_agent_imports_later_what_it_did_not_begin_with_and_what_fails_is_left_to_the_process(engine, tmp_path):
    async def scenario():
        await engine.preload(("no_such_module", "colorsys"))
        await engine.add([spec("show_imports", tmp_path)])
        await until(engine, "role-0.0", Kind.EXITED)

    asyncio.run(scenario())
    assert (tmp_path / "show_imports-0.0.log").read_text() == "True\n"
    assert "no_such_module" in (tmp_path / "agent.log").read_text()


def child_of(log: Path) -> int:
    until_true(lambda: log.exists() and log.read_text().endswith("\n"), "it has started a process")
    return int(log.read_text())


def test_what_a_process_has_started_ends_with_it(engine, tmp_path):
    async def scenario():
        await engine.add([spec("usual_parent", tmp_path)])
        child = await asyncio.to_thread(child_of, tmp_path / "usual_parent-0.0.log")
        await engine.kill("role-0.0")
        await until(engine, "role-0.0", Kind.EXITED)
        return child

    until_ended([asyncio.run(scenario())])


def test_what_the_processes_have_started_ends_with_the_lifeline_though_it_ignores_sigterm(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    scratch, lifeline = tempfile.mkdtemp(prefix="tl-"), process.Lifeline()
    agent = start_agent(Path(scratch, "agent"), preload=(), life=lifeline.reading, log=tmp_path / "agent.log")
    asyncio.run(LocalEngine(str(Path(scratch, "agent"))).add([spec("parent", tmp_path)]))
    child = child_of(tmp_path / "parent-0.0.log")
    lifeline.end()
    until_ended([child])
    assert agent.wait(100) == 0
    os.close(lifeline.reading)


def test_a_fork_of_the_launcher_keeps_no_process_alive():
    """A pool in a notebook outlives the kernel; the job must not."""
    lifeline, (waits, goes_on) = process.Lifeline(), os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(goes_on)
        os.read(waits, 1)
        os._exit(0)
    try:
        os.close(waits)
        lifeline.end()
        assert select.select([lifeline.reading], [], [], 10)[0], "the lifeline has ended"
        assert os.read(lifeline.reading, 1) == b""
    finally:
        os.close(goes_on)
        os.waitpid(fork, 0)
        os.close(lifeline.reading)
