"""What every Engine promises: import the tests and provide the fixture `engine`.

The fixture yields an Engine; processes run the functions of `tests/worlds/roles.py`.
"""

import asyncio
import os
from pathlib import Path

from trueline.engine.contract import Kind, ProcessSpec
from worlds.waiting import until_async


def spec(entry: str, tmp_path: Path, *, slot: int = 0, incarnation: int = 0, **env: str) -> ProcessSpec:
    log = str(tmp_path / f"{entry}-{slot}.{incarnation}.log")
    return ProcessSpec(role="role", slot=slot, incarnation=incarnation, entry=f"worlds.roles:{entry}", log=log, env=env)


async def until(engine, ref: str, kind: Kind):
    async for seen in engine.watch():
        if seen.ref == ref and seen.kind is kind:
            return seen
    raise AssertionError("the engine went away")


async def until_pid(engine, ref: str):
    """The report of a start; an engine may take the order before the process has started."""
    async for seen in engine.watch():
        if seen.ref == ref and seen.pid:
            return seen
    raise AssertionError("the engine went away")


def test_an_exit_is_seen_with_its_code(engine, tmp_path):
    async def scenario():
        await engine.add([spec("fail", tmp_path)])
        return await until(engine, "role-0.0", Kind.EXITED)

    seen = asyncio.run(scenario())
    assert (seen.code, seen.signal, seen.reason) == (7, None, "exit code 7")


def test_a_kill_is_seen_with_its_signal(engine, tmp_path):
    async def scenario():
        await engine.add([spec("wait", tmp_path)])
        await engine.kill("role-0.0")
        return await until(engine, "role-0.0", Kind.EXITED)

    seen = asyncio.run(scenario())
    assert (seen.code, seen.signal, seen.reason) == (None, 9, "killed by SIGKILL")


def test_a_graceful_kill_lets_the_process_end_by_itself(engine, tmp_path):
    async def scenario():
        await engine.add([spec("polite", tmp_path)])
        await until_log(tmp_path / "polite-0.0.log", "ready")
        await engine.kill("role-0.0", grace_s=60.0)
        return await until(engine, "role-0.0", Kind.EXITED)

    assert asyncio.run(scenario()).code == 3


def test_a_process_that_ignores_the_graceful_kill_is_killed_when_its_time_is_up(engine, tmp_path):
    async def scenario():
        await engine.add([spec("stubborn", tmp_path)])
        await until_log(tmp_path / "stubborn-0.0.log", "ready")
        await engine.kill("role-0.0", grace_s=0.05)
        return await until(engine, "role-0.0", Kind.EXITED)

    assert asyncio.run(scenario()).signal == 9


def test_asking_twice_starts_one_process_and_an_engine_restarts_nothing(engine, tmp_path):
    async def scenario():
        await engine.add([spec("fail", tmp_path)])
        await until(engine, "role-0.0", Kind.EXITED)
        await engine.add([spec("fail", tmp_path)])
        await engine.add([spec("wait", tmp_path, slot=1)])
        return await engine.list()

    first, second = asyncio.run(scenario())
    assert (first.ref, first.kind) == ("role-0.0", Kind.EXITED)
    assert (second.ref, second.kind) == ("role-1.0", Kind.STARTED)
    assert (tmp_path / "fail-0.0.log").read_text().count("failing") == 1


def test_killing_what_is_dead_or_unknown_is_no_error(engine, tmp_path):
    async def scenario():
        await engine.add([spec("fail", tmp_path)])
        await until(engine, "role-0.0", Kind.EXITED)
        await engine.kill("role-0.0")
        await engine.kill("role-9.9")
        return await engine.list()

    assert [seen.kind for seen in asyncio.run(scenario())] == [Kind.EXITED]


def test_a_client_hears_of_a_process_once_it_has_a_pid(engine, tmp_path):
    """A pid of 0 means the process group of whoever signals it."""

    async def scenario():
        await engine.add([spec("wait", tmp_path)])
        return await anext(engine.watch())  # before the process has begun, where a host elsewhere starts it

    assert asyncio.run(scenario()).pid > 0


def test_a_client_that_comes_later_finds_what_runs_and_sees_its_end_once(engine, tmp_path):
    async def scenario():
        await engine.add([spec("wait", tmp_path)])
        running = await until_pid(engine, "role-0.0")
        watch = engine.watch()
        assert (await anext(watch)).pid == running.pid
        await engine.kill("role-0.0")
        ended = await anext(watch)
        await engine.add([spec("fail", tmp_path, slot=1)])
        started = await anext(watch)
        return ended, started

    ended, started = asyncio.run(scenario())
    assert (ended.kind, started.ref) == (Kind.EXITED, "role-1.0")


def test_a_process_gets_its_environment_and_its_log_stays_readable(engine, tmp_path):
    async def scenario():
        await engine.add([spec("say", tmp_path, TRUELINE_TEST_WORD="hello from the role")])
        await until(engine, "role-0.0", Kind.EXITED)

    asyncio.run(scenario())
    assert "hello from the role" in (tmp_path / "say-0.0.log").read_text()
    assert "TRUELINE_TEST_WORD" not in os.environ


def test_an_engine_knows_its_room_or_says_that_it_does_not(engine):
    room = asyncio.run(engine.capacity())
    assert room is None or room >= 1


async def until_log(path: Path, word: str) -> None:
    await until_async(lambda: path.exists() and word in path.read_text(), f"{path.name} has {word!r}")
