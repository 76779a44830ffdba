"""A halt and the checkpoints of a job with parameter servers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.msgpack import decode, encode

from trueline.engine.contract import Kind, Seen, make_ref, parse_ref
from trueline.errors import TrainError
from trueline.ps.master import checkpoints as checkpoints_module
from trueline.ps.master.checkpoints import FULL_EXIT, TRIES, Checkpoints
from trueline.ps.master.server import TasksService
from trueline.ps.master.shell import WORKER
from trueline.ps.tasks import LeaseReply, LeaseRequest
from trueline.train.master.room import DiskRoom


def test_a_halt_while_a_checkpoint_is_written_ends_the_job_after_one_of_its_own():
    stopped, steps = [], iter((200, 203))
    master = SimpleNamespace(job_dir=Path("/job"), halting="", wanted=0, checkpoint_step=-1, disk_room=DiskRoom(print))

    async def stop(why, grace_s):
        stopped.append(why)

    class Written(Checkpoints):
        async def _save_parts(self):
            master.halting = "trueline halt"
            return next(steps), []

        async def _assemble(self, step, certificates):
            master.checkpoint_step = step

    checkpoints = Written(master, settle=stop, stop=stop, conclude=stop)
    asyncio.run(checkpoints._write())
    assert (master.checkpoint_step, stopped) == (200, [])
    asyncio.run(checkpoints._write())
    assert (master.checkpoint_step, stopped) == (203, ["trueline halt"])


def test_a_checkpoint_that_is_asked_for_while_one_is_written_is_not_the_older_one():
    steps, due = iter((200, 203)), []
    master = SimpleNamespace(job_dir=Path("/job"), halting="", wanted=0, checkpoint_step=-1, disk_room=DiskRoom(print))
    master.job, master.ledger = SimpleNamespace(checkpoint_every=1000), SimpleNamespace(finished=False, steps=203)

    class Written(Checkpoints):
        async def _save_parts(self):
            master.wanted = 203
            return next(steps), []

        async def _assemble(self, step, certificates):
            master.checkpoint_step = step

    checkpoints = Written(master, settle=None, stop=None, conclude=None)
    for _ in range(2):
        asyncio.run(checkpoints._write())
        due.append((master.checkpoint_step, master.wanted, checkpoints._due))
    assert due == [(200, 203, True), (203, 0, False)]


def test_a_full_disk_under_a_checkpoint_is_told_once_and_is_no_failure(tmp_path):
    told, failures = [], []
    folder = tmp_path / "ps" / "cuts" / "step-7"
    folder.mkdir(parents=True)

    class Engine:
        async def add(self, specs):
            checkpoints.note_exit(checkpoints._ref, FULL_EXIT, "exit code 73")

    class Saved(Checkpoints):
        async def _save_parts(self):
            return 7, []

    master = SimpleNamespace(
        job_dir=tmp_path, halting="", wanted=0, checkpoint_step=-1, engine=Engine(), now=lambda: 1.0,
        disk_room=DiskRoom(lambda name, **fields: told.append(name)), make_spec=lambda ref, **env: ref,
        folder=SimpleNamespace(log=lambda ref: tmp_path / "log"), fail=lambda *words: failures.append(words),
        emit=lambda name, **fields: told.append(name),
    )  # fmt: skip
    checkpoints = Saved(master, settle=None, stop=None, conclude=None)
    for _ in range(TRIES + 2):
        asyncio.run(checkpoints._write())
    assert (told, failures, checkpoints._failures) == (["disk.full"], [], 0)


@pytest.mark.parametrize("step", [0, 7])
def test_the_process_that_writes_a_checkpoint_is_known_by_the_name_that_the_engine_gives_it(tmp_path, step):
    """Of step 0 too, when a job is halted before its first step."""
    refs = []
    master = SimpleNamespace(
        job_dir=tmp_path, make_spec=lambda ref, **env: ref, folder=SimpleNamespace(log=lambda ref: tmp_path / "log"),
    )  # fmt: skip
    checkpoints = Checkpoints(master, settle=None, stop=None, conclude=None)
    (checkpoints.folder / f"step-{step}").mkdir(parents=True)

    class Engine:
        async def add(self, specs):
            refs.extend(specs)
            checkpoints.note_exit(make_ref(*parse_ref(specs[0])), 1, "exit code 1")

    master.engine = Engine()
    for _ in range(2):
        with pytest.raises(TrainError, match="exit code 1"):
            asyncio.run(asyncio.wait_for(checkpoints._assemble(step, []), 30))
    assert len(set(refs)) == 2


def test_a_job_that_has_just_begun_owes_no_checkpoint():
    master = SimpleNamespace(job_dir=Path("/job"), halting="", wanted=0, checkpoint_step=-1)
    master.job, master.ledger = SimpleNamespace(checkpoint_every=9), SimpleNamespace(finished=False, steps=0)
    checkpoints = Checkpoints(master, settle=None, stop=None, conclude=None)
    due = []
    for master.ledger.steps, master.wanted in ((0, 0), (8, 0), (0, 1), (1, 1), (9, 0)):
        due.append(checkpoints._due)
    assert due == [False, False, False, True, True]


class KnownEngine:
    """Starts nothing under a ref that it knows, as engines do. `ends`: what it says of a process when it is asked."""

    def __init__(self, *known: Seen, ends: Seen | None = None) -> None:
        self.known = {one.ref: one for one in known}
        self.killed: list[str] = []
        self.ends = ends

    async def add(self, refs):
        for ref in refs:
            self.known.setdefault(ref, Seen(ref=ref, kind=Kind.STARTED, pid=7))

    async def kill(self, ref, *, grace_s=0.0):
        self.killed.append(ref)

    async def list(self):
        if self.ends is not None:
            self.known = {ref: msgspec.structs.replace(self.ends, ref=ref) for ref in self.known}
        return list(self.known.values())


def successor(tmp_path: Path, engine: KnownEngine, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.setattr(checkpoints_module, "LOOK_S", 0.0)

    async def order(give):
        await give()

    master = SimpleNamespace(
        job_dir=tmp_path, make_spec=lambda ref, **env: ref, folder=SimpleNamespace(log=lambda ref: tmp_path / "log"),
        engine=engine, order=order,
    )  # fmt: skip
    checkpoints = Checkpoints(master, settle=None, stop=None, conclude=None)
    (checkpoints.folder / "step-7").mkdir(parents=True)
    return checkpoints


@pytest.mark.parametrize("kind", [Kind.STARTED, Kind.EXITED])
def test_a_restarted_master_ends_the_process_of_a_checkpoint_and_starts_another(tmp_path, monkeypatch, kind):
    old = Seen(ref="saver-0.7000", kind=kind, pid=5, code=0)
    engine = KnownEngine(old, ends=Seen(ref="", kind=Kind.EXITED, code=1, reason="exit code 1"))
    checkpoints = successor(tmp_path, engine, monkeypatch)

    async def go() -> None:
        await checkpoints.adopt(old)
        await checkpoints._assemble(7, [])

    with pytest.raises(TrainError, match="exit code 1"):
        asyncio.run(asyncio.wait_for(go(), 30))
    assert set(engine.known) == {"saver-0.7000", "saver-0.7001"}
    assert engine.killed == (["saver-0.7000"] if kind is Kind.STARTED else [])


def test_a_checkpoint_whose_process_the_engine_does_not_know_any_more_is_begun_again(tmp_path, monkeypatch):
    class Forgetful(KnownEngine):
        async def list(self):
            return []  # an agent that was killed with its processes

    checkpoints = successor(tmp_path, Forgetful(), monkeypatch)
    with pytest.raises(TrainError, match="knows nothing of it"):
        asyncio.run(asyncio.wait_for(checkpoints._assemble(7, []), 30))


def test_workers_wait_for_the_last_checkpoint_without_asking_all_the_time():
    async def go() -> None:
        master = SimpleNamespace(
            now=lambda: 0.0, changed=asyncio.Event(), heard={}, ready=asyncio.Event(), phase="running", halting="",
            ledger=SimpleNamespace(finished=True, steps=9), rosters={WORKER: SimpleNamespace(alive=["worker-0.0"])},
        )  # fmt: skip
        master.ready.set()
        asked = asyncio.create_task(TasksService(master)._lease(encode(LeaseRequest("worker-0.0", 60.0)), None))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asked.done()
        master.phase = "finished"
        master.changed.set()
        assert decode(await asyncio.wait_for(asked, 30), type=LeaseReply).finished

    asyncio.run(go())
