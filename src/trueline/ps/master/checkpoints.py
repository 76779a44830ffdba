"""Checkpoints of a parameter-server job: in a cut every server forks and writes its part, then a process with torch
makes an ordinary checkpoint of the parts. Training continues meanwhile."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from trueline import files
from trueline.errors import DiskFull, TrainError, TruelineError
from trueline.ps.master import cuts
from trueline.ps.master.report import certify
from trueline.ps.master.shell import SAVER, JobShell

TRIES = 3
RESULT, FACTS = "checkpoint.json", "facts.json"
"""What the saver leaves in the folder of the parts, and what it finds there."""


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
        self._incarnation = 0
        self._writing: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[tuple[bool, str]] | None = None
        self._ref = ""
        self._failures = 0

    @property
    def step(self) -> int:
        """Of the newest one; -1: there is none."""
        return self._master.checkpoint_step

    @property
    def parts(self) -> tuple[str, ...]:
        """The files from which a server that has lost its folder begins; empty: there is no checkpoint."""
        folder = self.folder / f"step-{self.step}"
        return tuple(str(path) for path in sorted(folder.glob("*.part"))) if self.step >= 0 else ()

    def next_number(self) -> int:
        self._master.cuts += 1
        return self._master.cuts

    @property
    def _due(self) -> bool:
        ledger, job = self._master.ledger, self._master.job
        assert ledger is not None
        if ledger.finished or self._master.halting:
            return self.step < ledger.steps or bool(self._master.halting)
        every = job.checkpoint_every or ledger.grid.steps
        if self._master.wanted and ledger.steps > self.step:
            return True
        return ledger.steps // every > max(self.step, 0) // every

    async def run_due(self) -> None:
        """Begins a checkpoint if one is due and none is being written; ends the job after the last one."""
        master = self._master
        assert master.ledger is not None
        if self._writing is not None and not self._writing.done():
            return
        if self._due:
            self._writing = master.spawn(self._write())
        elif master.ledger.finished and master.phase == "running":
            await self._conclude()

    async def _write(self) -> None:
        master = self._master
        try:
            step = await self._save_parts()
            if step > self.step:
                await self._assemble(step)
            master.wanted = False
            if master.halting:
                await self._stop(master.halting, 0.0)
        except (cuts.CutBroken, OSError) as error:  # a server went away, in the cut or while it wrote
            master.emit("cut.broken", why=str(error))
            await self._settle()
        except DiskFull as error:
            master.emit("disk.full", what="checkpoint", path=str(self.folder), free="", why=error.message,
                        effect="training continues, and the checkpoint is written once there is room")  # fmt: skip
            await asyncio.sleep(1.0)
        except TruelineError as error:
            self._failures += 1
            master.emit("checkpoint.failed", step=master.ledger.steps if master.ledger else 0, why=error.message)
            if self._failures >= TRIES:
                master.fail(error.code, f"the checkpoint cannot be written: {error.message}", error.hint)

    async def _save_parts(self) -> int:
        """The steps that the parts contain."""
        master = self._master
        assert master.routing is not None
        assert master.ledger is not None
        links = {ref: master.link(ref) for ref in master.routing.servers}
        async with cuts.cut(links, self.next_number(), master.ledger.outstanding()):
            stats = [await link.stats() for link in links.values()]
            steps = {one.steps for one in stats}
            if len(steps) != 1 or len({json.dumps(sorted(one.applied.items())) for one in stats}) != 1:
                raise TrainError(
                    f"the servers have applied {sorted(steps)} steps in one cut", hint="please report this with the job"
                )
            step = steps.pop()
            folder = self.folder / f"step-{step}"
            if step > self.step:
                paths = await cuts.save(links, folder)
        if step > self.step:
            await asyncio.gather(*(links[ref].wait_saved(path) for ref, path in paths.items()))
        return step

    async def _assemble(self, step: int) -> None:
        master, folder = self._master, self.folder / f"step-{step}"
        facts = {"certificates": certify(master, step), "evaluations": []}
        files.write_atomic(folder / FACTS, json.dumps(facts).encode())
        self._exit = asyncio.get_running_loop().create_future()
        self._ref = f"{SAVER}-0.{step}{self._incarnation:03d}"
        self._incarnation += 1
        spec = master.make_spec(self._ref, TRUELINE_PS_PARTS=str(folder), TRUELINE_PS_STEP=str(step))
        await master.engine.add([spec])
        clean, why = await self._exit
        if not clean:
            log = master.folder.log(self._ref)
            tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
            raise TrainError(f"the process that writes it ended: {why} {' '.join(tail)}", hint=f"see {log}")
        found = json.loads((folder / RESULT).read_bytes())
        master.log("CKPT", step=step, path=found["path"], digest=found["digest"])
        master.checkpoint_path, master.checkpoint_step, self._failures = found["path"], step, 0
        master.emit("checkpoint.saved", step=step, path=found["path"], digest=found["digest"])
        for old in self.folder.glob("step-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def note_exit(self, ref: str, clean: bool, why: str) -> None:
        """The process that makes the checkpoint has ended."""
        if ref == self._ref and self._exit is not None and not self._exit.done():
            self._exit.set_result((clean, why))

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing


def result_of(folder: Path) -> Path:
    return folder / RESULT
