"""A learner of a submitted job: fetches code and data, and runs its command each time the master starts the group.

`python -m trueline.train.learners.learner STORE/JOB LAUNCH ROLE`, started by a scheduler or, learner 1, by the head. It
ends with its launch, when its master is gone, and on SIGTERM; the processes of its script end with it, whatever ends
it. It has no torch.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trueline import files
from trueline.engine.hosts import folder as travel
from trueline.engine.hosts import route
from trueline.engine.hosts.messages import CERTIFICATE_NAME
from trueline.errors import StorageError, TruelineError, first_line
from trueline.files import TemporaryFolder
from trueline.train.cluster.store import JobStore, JoinKit
from trueline.train.learners import messages, places
from trueline.train.learners.buckets import KeptContainers
from trueline.train.learners.curves import MetricSource
from trueline.train.learners.environment import localize, make_environment
from trueline.train.learners.manifest.read import FfdlManifest
from trueline.train.learners.output import StoredLog
from trueline.train.learners.scripts.command import LearnerCommand, complete_environment
from trueline.train.learners.scripts.relay import MemberRelay
from trueline.train.learners.submission import read_stored_manifest

POLL_S, METRICS_S, PUSH_S = 0.25, 1.0, 15.0
LAST_PUSHES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Between attempts to push the last results to a bucket that does not answer."""
LEAVE_S = 10.0
"""What SIGTERM leaves the script, as a notice."""


class LearnerHost:
    """One learner on this host, for as long as its launch runs."""

    def __init__(self, store: JobStore, launch: int, role: str, scratch: Path) -> None:
        self._store, self._launch, self._role, self._scratch = store, launch, role, scratch
        self._number = int(role.split("-")[1])
        self._job = store.read_job()
        self._manifest: FfdlManifest = read_stored_manifest(self._job)
        self._shared = places.is_shared(store)
        self._first = self._number == 1 or not self._shared
        """Whether this one takes care of folders that learners share."""
        self._folders = places.place_folders(store, self._manifest, self._job.unique_name, scratch)
        name = f"learner-{self._number}"
        copies = [base / name / "training-log.txt" for base in (self._folders.results, self._folders.logs)]
        self._log = StoredLog(store, name, copies)
        self._command: LearnerCommand | None = None
        self._running: asyncio.Task[None] | None = None
        self._containers = KeptContainers(store, self._manifest, self._folders, self._job.unique_name)
        self._push_fault, self._finishing = "", False
        self._env: dict[str, str] = {}
        self._master = ""
        """Address of the head, beside which learner 1 runs."""
        self._source: MetricSource | None = None

    def prepare(self, address: str, note: Callable[..., None]) -> None:
        """Fetches code, data and earlier results. Raises TruelineError."""
        store, folders = self._store, self._folders

        async def fetch(digest: str) -> bytes:
            data = store.get(f"files/{digest}")
            if data is None:
                raise StorageError(f"{store.where} has lost files/{digest}, which the job needs")
            return data

        code = self._scratch / travel.CODE
        asyncio.run(travel.unpack(self._job.files, self._scratch, files.user_cache() / "joined", fetch))
        code.mkdir(exist_ok=True)
        shutil.rmtree(folders.model)
        code.rename(folders.model)
        for file in folders.model.rglob("*"):
            if file.is_file():
                file.chmod(0o700)  # scripts are run, and modes do not travel
        if self._first:
            places.keep_code(folders.model, folders.results)
            self._containers.fetch(note)
        for path, count in localize(folders.model, folders.state):
            note("learner.localized", learner=self._number, file=path, places=count)
        given = make_environment(self._manifest, self._job.unique_name, self._number, folders)
        self._env = complete_environment(given | self._choose_gpus(), self._scratch, address)

    def _choose_gpus(self) -> dict[str, str]:
        """On one machine the learners share its GPUs; elsewhere the scheduler gives each its own."""
        launch = self._store.last_launch()
        gpus = int(self._manifest.gpus)
        if launch is None or not launch.machine or not gpus:
            return {}
        first = (self._number - 1) * gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in range(first, first + gpus))}

    async def serve(self, kit: JoinKit) -> str:
        """Runs the command when the master says so; returns why that is over."""
        context = ssl.create_default_context(cadata=kit.token.ca)
        host, port = route.split_address(kit.address)
        hello = messages.LearnerHello(token=kit.token.token, learner=self._number, role=self._role)
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=CERTIFICATE_NAME)
        self._writer, self._master = writer, route.resolve(host)
        messages.send(writer, hello)
        address = str(writer.get_extra_info("sockname")[0])
        loop = asyncio.get_running_loop()
        leave = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, leave.set)
        pulses = asyncio.ensure_future(self._pulse())
        relay = MemberRelay(self._scratch / "socket", (host, port), context, hello)
        following = asyncio.ensure_future(self._follow(reader, address, relay))
        leaving = asyncio.ensure_future(leave.wait())
        try:
            async with relay.listening():
                await asyncio.wait((following, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    self._note("learner.leaving", learner=self._number, why="it got SIGTERM")
                    await self._stop(LEAVE_S)
                    return "it got SIGTERM"
                return following.result()
        finally:
            await self._stop(0.0)
            for task in (following, leaving):
                task.cancel()
            await self._finish()
            pulses.cancel()
            writer.close()

    async def _follow(self, reader: asyncio.StreamReader, address: str, relay: MemberRelay) -> str:
        """Does what the master says until it dismisses this learner."""
        loop = asyncio.get_running_loop()

        def note(name: str, **fields: str | float) -> None:
            loop.call_soon_threadsafe(lambda: self._note(name, **fields))

        preparing = asyncio.ensure_future(asyncio.to_thread(self.prepare, address, note))
        try:
            await preparing
        except TruelineError as error:
            self._note("learner.refused", learner=self._number, why=error.message, hint=error.hint)
            self._log.write(f"trueline: {error.message}\n{error.hint}\n".encode())
        else:
            messages.send(self._writer, messages.LearnerReady(host=socket.gethostname(), address=address))
        while True:
            try:
                message = await messages.receive(reader, messages.decode_from_master)
            except (EOFError, OSError, ValueError, TimeoutError):
                return "its master is gone"
            match message:
                case messages.StartCommand(generation=generation):
                    relay.generation = generation
                    self._running = asyncio.ensure_future(self._run(generation))
                case messages.StopCommand(grace_s=grace_s):
                    asyncio.ensure_future(self._stop(grace_s))  # noqa: RUF006 - _run ends with it
                case messages.Dismiss(why=why):
                    return why

    async def _pulse(self) -> None:
        due = dict.fromkeys(("metrics", "push", "flush"), 0.0)
        while True:
            messages.send(self._writer, messages.LearnerPulse())
            until = time.monotonic() + messages.PULSE_S
            while time.monotonic() < until:
                await asyncio.sleep(self._log.every_s if self._log.every_s < 1 else 1)
                now = time.monotonic()
                if now >= due["flush"]:
                    due["flush"] = now + self._log.every_s
                    await asyncio.to_thread(self._log.flush)
                if now >= due["metrics"] and self._source is not None:
                    due["metrics"] = now + METRICS_S
                    self._source.poll()
                if now >= due["push"] and not self._finishing:
                    due["push"] = now + PUSH_S
                    await self._push()

    async def _push(self) -> bool:
        """False: the bucket did not take all, which is in the log once."""
        why = await asyncio.to_thread(self._containers.push)
        if why and why != self._push_fault:
            self._note("results.delayed", why=why)
        self._push_fault = why
        return not why

    async def _finish(self) -> None:
        self._finishing = True
        if self._source is not None:
            self._source.poll()
        for wait_s in (*LAST_PUSHES_S, 0.0):
            if await self._push():
                break
            await asyncio.sleep(wait_s)
        else:
            stay = str(self._folders.results) if self._shared else ""
            self._note("results.lost", why=self._push_fault, where=stay or "nowhere")
        await asyncio.to_thread(self._log.flush, whole=True)
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def _note(self, name: str, **fields: str | float) -> None:
        messages.send(self._writer, messages.LearnerEvent(name, dict(fields)))

    async def _run(self, generation: int) -> None:
        if self._first:
            if not self._shared:
                places.clear_state(self._folders.state)
                if self._number > 1:  # what learner 1 writes into its own /job is not here
                    (self._folders.state / places.RENDEZVOUS).write_text(f"{self._master}\n")
            latest = self._folders.state / "latest-log"
            with contextlib.suppress(OSError):
                latest.unlink(missing_ok=True)
                latest.symlink_to(self._folders.logs / f"learner-{self._number}" / "training-log.txt")
        source = MetricSource(
            self._manifest.metrics, self._env, lambda metric: messages.send(self._writer, metric), alone=self._first
        )
        self._source = source

        def write(data: bytes) -> None:
            self._log.write(data)
            source.hear(data)

        self._command = LearnerCommand(self._env, self._folders.model, write)
        code = await self._command.run()
        await asyncio.to_thread(self._log.flush, whole=True)
        source.poll()
        messages.send(self._writer, messages.CommandEnded(generation, code))

    async def _stop(self, grace_s: float) -> None:
        if self._command is not None:
            await self._command.stop(grace_s)
        if self._running is not None:
            await asyncio.wait([self._running])


def wait_for_kit(store: JobStore, number: int) -> JoinKit | None:
    """None: the launch has ended before its head listened."""
    while True:
        launch = store.last_launch()
        if launch is None or launch.number != number or store.read_end(number) is not None:
            return None
        if (kit := store.read_kit(number)) is not None:
            return kit
        time.sleep(POLL_S)  # a store sends no notice


def main() -> None:
    where, number, role = sys.argv[1:]
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s")
    temporary = TemporaryFolder.after_sweep("learner")
    scratch = temporary.path
    os.chdir(scratch)
    try:
        store = JobStore(where)
        kit = wait_for_kit(store, int(number))
        why = "the launch has ended"
        if kit is not None:
            why = asyncio.run(LearnerHost(store, int(number), role, scratch).serve(kit))
        print(why, file=sys.stderr)  # noqa: T201 - the log of this process
    except TruelineError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    except OSError as error:
        sys.exit(f"error: {first_line(error)}")
    finally:
        temporary.remove()


if __name__ == "__main__":
    main()
