"""Checkpoints of a parameter-server job: in a cut every server forks and writes its part, then a process with torch
makes an ordinary checkpoint of the parts. Training continues meanwhile."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from trueline import files
from trueline.engine.contract import Seen, make_ref, parse_ref
from trueline.errors import DiskFull, TrainError, TruelineError
from trueline.ps.link import ServerLink
from trueline.ps.master import cuts
from trueline.ps.master.report import certify
from trueline.ps.master.shell import SAVER, JobShell
from trueline.ps.messages import ServerReport

TRIES = 3
LONGEST_S, FULL_S = 10.0, 1.0
"""Between two tries while cuts break, and while the disk is full."""
LOOK_S, MOST_ABSENCES = 1.0, 3
"""Seconds between two questions to the engine whether the saver still runs; answers in a row that it knows no saver."""
RESULT, FACTS = "checkpoint.json", "facts.json"
"""What the saver leaves in the folder of the parts, and what it finds there."""
FULL_EXIT = 73
"""Exit code of a saver for which the disk has no room: EX_CANTCREAT of sysexits.h."""


class Checkpoints:
    """`settle`, `stop` and `conclude` are the master's."""

    def __init__(
        self,
        master: JobShell,
        *,
        settle: Callable[[], Awaitable[None]],
        stop: Callable[[str, float], Awaitable[None]],
        conclude: Callable[[], Awaitable[None]],
    ) -> None:
        self._master, self._settle, self._stop, self._conclude = master, settle, stop, conclude
        self.folder = master.job_dir / "ps" / "cuts"
        self._number = 0
        """Of the last saver, of a former master too: an engine starts nothing under a ref that it knows."""
        self._writing: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[tuple[int | None, str]] | None = None
        self._ref = ""
        self._failures = 0
        self._broken, self._retry_at = 0, 0.0

    @property
    def step(self) -> int:
        """Of the newest one; -1: there is none."""
        return self._master.checkpoint_step

    @property
    def parts(self) -> tuple[str, ...]:
        """The files from which a server that has lost its folder begins; empty: there is no checkpoint."""
        folder = self.folder / f"step-{self.step}"
        return tuple(str(path) for path in sorted(folder.glob("*.part"))) if self.step >= 0 else ()

    @contextlib.asynccontextmanager
    async def cut(self) -> AsyncIterator[tuple[dict[str, ServerLink], list[ServerReport]]]:
        """A cut of all servers, with their links and what they say. Raises CutBroken."""
        master = self._master
        async with master.cutting, contextlib.AsyncExitStack() as stack:
            ledger, routing = master.ledger, master.routing
            assert ledger is not None
            assert routing is not None
            links, keys = {ref: master.link(ref) for ref in routing.servers}, ledger.outstanding()
            master.cuts += 1
            ledger.set_fence(keys)
            try:
                beginning = cuts.cut(links, master.cuts, keys, max(cuts.REACH_S, ledger.reach_s))
                reports = await stack.enter_async_context(beginning)
            finally:
                ledger.set_fence(None)
                master.wake()
            yield links, reports

    @property
    def _due(self) -> bool:
        ledger, job = self._master.ledger, self._master.job
        assert ledger is not None
        if ledger.finished or self._master.halting:
            return self.step < ledger.steps or bool(self._master.halting)
        every = job.checkpoint_every or ledger.grid.steps
        if self.step < self._master.wanted <= ledger.steps and self._master.wanted:
            return True
        return ledger.steps // every > max(self.step, 0) // every

    async def run_due(self) -> None:
        """Begins a checkpoint if one is due and none is being written; ends the job after the last one."""
        master = self._master
        assert master.ledger is not None
        if self._writing is not None and not self._writing.done():
            return
        if self._due:
            if master.now() < self._retry_at:
                return
            self._writing = master.spawn(self._write())
        elif master.ledger.finished and master.phase == "running":
            with contextlib.suppress(OSError):  # a server is away: once more when the engine has started it
                await self._conclude()

    async def _write(self) -> None:
        master = self._master
        halting = master.halting  # a halt that comes meanwhile has a checkpoint of its own, of a later step
        try:
            step, certificates = await self._save_parts()
            if step > self.step:
                await self._assemble(step, certificates)
            self._broken = 0
            master.disk_room.gain("checkpoint")
            if step >= master.wanted:  # else the request came while this one, of an older state, was written
                master.wanted = 0
            if halting:
                await self._stop(halting, 0.0)
        except (cuts.CutBroken, OSError) as error:  # a server went away, in the cut or while it wrote
            master.emit("cut.broken", why=str(error))
            self._broken += 1
            self._retry_at = master.now() + min(LONGEST_S, 0.25 * 2.0 ** (self._broken - 1))
            await self._settle()
        except DiskFull as error:
            effect = "training continues, and the checkpoint is written once there is room"
            master.disk_room.lack("checkpoint", str(self.folder), error.message, effect)
            self._remove_others(self.folder / f"step-{self.step}")
            self._retry_at = master.now() + FULL_S
        except TruelineError as error:
            self._failures += 1
            master.emit("checkpoint.failed", step=master.ledger.steps if master.ledger else 0, why=error.message)
            if self._failures >= TRIES:
                master.fail(error.code, f"the checkpoint cannot be written: {error.message}", error.hint)

    async def _save_parts(self) -> tuple[int, list[dict[str, Any]]]:
        """The steps that the parts contain, and their certificates."""
        async with self.cut() as (links, reports):
            steps = sorted({one.steps for one in reports})
            step, folder = steps[0], self.folder / f"step-{steps[0]}"
            if len(steps) == 1 and step > self.step:
                shutil.rmtree(folder, ignore_errors=True)  # of a cut that broke, perhaps of other servers
                paths = await cuts.save(links, folder)
        if len(steps) > 1:
            raise TrainError(
                f"the servers have applied {steps} steps in one cut", hint="please report this with the job"
            )
        if step > self.step:
            await asyncio.gather(*(links[ref].wait_saved(path) for ref, path in paths.items()))
        return step, certify(self._master.grid, reports)

    async def _assemble(self, step: int, certificates: list[dict[str, Any]]) -> None:
        master, folder = self._master, self.folder / f"step-{step}"
        facts = {"certificates": certificates, "evaluations": []}
        files.write_atomic(folder / FACTS, json.dumps(facts).encode())
        self._exit = asyncio.get_running_loop().create_future()
        self._number = max(self._number + 1, 1000 * step)
        self._ref = make_ref(SAVER, 0, self._number)
        spec = master.make_spec(self._ref, TRUELINE_PS_PARTS=str(folder), TRUELINE_PS_STEP=str(step))
        await master.engine.add([spec])
        code, why = await self._wait_for_exit(self._exit)
        if code != 0:
            log = master.folder.log(self._ref)
            tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
            if code == FULL_EXIT:
                raise DiskFull(" ".join(tail) or f"no room is left to write the checkpoint of step {step}")
            raise TrainError(f"the process that writes it ended: {why} {' '.join(tail)}", hint=f"see {log}")
        found = json.loads((folder / RESULT).read_bytes())
        master.log(("CKPT", {"step": step, "path": found["path"], "digest": found["digest"]}))
        master.checkpoint_path, master.checkpoint_step, self._failures = found["path"], step, 0
        master.emit("checkpoint.saved", step=step, path=found["path"], digest=found["digest"])
        self._remove_others(folder)

    def _remove_others(self, folder: Path) -> None:
        for old in self.folder.glob("step-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    async def _wait_for_exit(self, ended: asyncio.Future[tuple[int | None, str]]) -> tuple[int | None, str]:
        """Asks the engine as well: an agent that ends with its processes reports no end of theirs."""
        absences = 0
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(ended), LOOK_S)
            except TimeoutError:
                with contextlib.suppress(OSError):
                    found = [one for one in await self._master.engine.list() if one.ref == self._ref]
                    if found and not found[0].alive:
                        return found[0].code, found[0].reason
                    absences = 0 if found else absences + 1
            if absences >= MOST_ABSENCES:
                return None, "the engine knows nothing of it"

    async def adopt(self, seen: Seen) -> None:
        """Ends a process that a former master started: the checkpoint is written again, of new parts."""
        self._number = max(self._number, parse_ref(seen.ref)[2])
        if seen.alive:
            await self._master.order(partial(self._master.engine.kill, seen.ref))

    def note_exit(self, ref: str, code: int | None, why: str) -> None:
        """The process that makes the checkpoint has ended."""
        if ref == self._ref and self._exit is not None and not self._exit.done():
            self._exit.set_result((code, why))

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing


def result_of(folder: Path) -> Path:
    return folder / RESULT
