"""The local engine keeps the laws, and its processes do not outlive the launcher."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from engine_conformance import *  # noqa: F403  the shared tests
from engine_conformance import spec

from trueline.engine.local import LocalEngine, start_agent


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    scratch = tempfile.mkdtemp(prefix="tl-")  # a socket's path is short
    life, life_end = os.pipe()
    agent = start_agent(Path(scratch, "agent"), preload=(), life=life, log=tmp_path / "agent.log")
    yield LocalEngine(str(Path(scratch, "agent")))
    os.close(life_end)
    agent.wait(10)
    os.close(life)
    os.rmdir(scratch)


def test_when_the_lifeline_ends_every_process_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    scratch = tempfile.mkdtemp(prefix="tl-")
    life, life_end = os.pipe()
    agent = start_agent(Path(scratch, "agent"), preload=(), life=life, log=tmp_path / "agent.log")
    engine = LocalEngine(str(Path(scratch, "agent")))

    async def scenario():
        await engine.add([spec("stubborn", tmp_path, slot=slot) for slot in range(2)])
        return [psutil.Process(seen.pid) for seen in await engine.list()]

    processes = asyncio.run(scenario())
    os.close(life_end)
    assert agent.wait(10) == 0
    os.close(life)
    os.rmdir(scratch)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_processes_end_even_when_the_agent_was_killed_and_then_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with tempfile.TemporaryDirectory(prefix="tl-") as scratch:
        life, life_end = os.pipe()
        agent = start_agent(Path(scratch, "agent"), preload=(), life=life, log=tmp_path / "agent.log")
        engine = LocalEngine(str(Path(scratch, "agent")))

        async def scenario():
            await engine.add([spec("wait", tmp_path)])
            return [psutil.Process(seen.pid) for seen in await engine.list()]

        processes = asyncio.run(scenario())
        agent.kill()
        agent.wait()
        assert all(process.is_running() for process in processes)
        os.close(life_end)
        os.close(life)
        assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_importing_the_engine_loads_no_torch():
    code = "import sys, trueline.engine.agent, trueline.engine.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
