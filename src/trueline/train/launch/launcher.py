"""The launcher of a local job: starts the agent and the master, keeps them running, and passes on the job's events.

    trueline train ── lifeline ──▶ agent (zygote) ──fork──▶ workers
                   └─ lifeline ──▶ zygote ──fork──▶ master ◀──gRPC── workers

A dead master gets a successor on the same port (`master/failover.py`). When the launcher ends, by any means, the
lifeline ends all its processes. JOB/launcher.json records how it ended; SIGKILL leaves that empty and JOB/lock free.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

from trueline import errors, events, files
from trueline.engine.hosts.ssh import SshJoins
from trueline.engine.local.client import start_agent
from trueline.engine.local.process import LIFELINE, Lifeline, watch_lifeline
from trueline.registry import event_file
from trueline.storage.location import parse_location
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir, LaunchRecord
from trueline.train.launch import hosts, shutdown
from trueline.train.launch.preload import EarlyAgent, find_preload
from trueline.train.launch.publishing import PublisherProcess
from trueline.train.launch.trying import TrialWatch
from trueline.train.link.grpc_client import ONE_THREAD, RECONNECTING
from trueline.train.master.claims import SUPERSEDED
from trueline.train.master.failover import MasterProcess, reserve_port
from trueline.train.master.hosts import HostsFolder
from trueline.train.reasons import LEFT_OUT_EXIT
from trueline.train.settings import JobSettings
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

POLL_S = 0.25
"""How often the agent is checked; the end of the master's stream of events is handled at once."""
EXIT_S = 0.1  # how long to wait for the master's exit code after its stream of events has ended
MAX_RESTARTS = 10


class Superseded(errors.JobStopped):
    """The master of another host leads the job."""


class LocalJob:
    """Runs the job whose settings are in `job_dir`. A context manager: it leaves no process behind.

    `early`: an agent that has begun to import already.
    """

    def __init__(self, job_dir: Path, early: EarlyAgent | None = None) -> None:
        self.job_dir = job_dir
        self.folder = JobDir(job_dir)
        self.settings: JobSettings = job_settings.load(job_dir)
        self.agent: subprocess.Popen[bytes] | None = None
        self.master: MasterProcess | None = None
        self.restarts, self._trial = 0, TrialWatch(self.folder, self.emit)
        self.on_event: Callable[[str], None] = lambda name: None
        """Gets the name of each event of the job."""
        self._listened = False  # a master of this launch
        self._events: queue.Queue[pb.Events] = queue.Queue()
        self._master_channel: grpc.Channel | None = None  # all masters of a launch have one port
        self._closing = False
        self._page = self._halting = ""
        self._superseded = False
        self._ssh: SshJoins | None = None
        self._early = early
        self._publisher: PublisherProcess | None = None
        self.inherited_bytes = 0
        """Of JOB/events.jsonl: what a launch on another host has written."""

    def __enter__(self) -> LocalJob:
        with contextlib.ExitStack() as exits:  # undoes what has begun, in reverse order
            exits.callback(os.close, self.folder.hold())
            exits.enter_context(event_file.writing(self.job_dir))
            if self._early is not None:
                self._early.restore_signals()
            exits.enter_context(shutdown.signals_as_errors(self.job_dir, self.halt))
            _expect_ended(before := self.folder.read_launch(), self.job_dir)
            _kill_leftovers(before)
            self._temporary = self._early.folder if self._early else files.TemporaryFolder.after_sweep("launch")
            exits.callback(self._temporary.remove)
            launch = LaunchRecord(pid=os.getpid(), started=time.time(), scratch=str(self._temporary.path))
            self.folder.write_launch(launch)
            exits.push(lambda kind, error, trace: self._record_end(launch, error))
            self.emit("job.started", job=str(self.job_dir), workers=self.settings.workers, epochs=self.settings.epochs)
            self._prepare(exits)
            self._start_master()
            if self.settings.publish_every:
                self._publisher = PublisherProcess(self.settings, self.folder, self.emit)
                exits.callback(self._publisher.end)
            if self._ssh is not None:
                self._address()  # it listens
                self._ssh.join(lambda: hosts.make_token(self.folder))
            self._exits = exits.pop_all()
        return self

    def _prepare(self, exits: contextlib.ExitStack) -> None:
        """Makes what a master needs: the job's secret, ports, and the agent."""
        hosts.expect_leader(self.folder, self.settings)
        self.folder.begin_launch()
        self.socket = self._temporary.path / "agent"
        self.lifeline = self._master_life = self._early.lifeline if self._early else Lifeline()
        self._sweep()
        exits.callback(self._clean)
        self._reserved = exits.enter_context(reserve_port())
        exits.callback(self._end_lifelines)
        self.master = self._make_master()
        self.master.warm()  # it imports while hosts are connected
        self.settings, listening = hosts.reserve_listen(self.settings)
        if listening is not None:
            exits.enter_context(listening)
        line = hosts.prepare(self.folder, self.settings, self._preload())
        if line:
            self.emit("hosts.listening", line=line)
        if self.settings.hosts:
            self._ssh = hosts.connect_ssh(self.folder, self.settings, self.emit)
            exits.callback(self._ssh.close)
        exits.callback(self._end_processes)
        self.agent = self._start_agent()

    def emit(self, name: str, /, **fields: events.Field) -> None:
        """Emits an event of the launcher, in this process and in the job's folder."""
        events.emit(name, **fields)
        self.folder.record(name, **fields)

    def halt(self, why: str) -> bool:
        """Begins to end the job after a checkpoint, in a thread: a signal handler calls this. False: no job runs."""
        if not self._listened or self._closing:
            return False
        self._halting = why
        threading.Thread(target=self._request_halt, args=(why,), name="halt", daemon=True).start()
        return True

    def _request_halt(self, why: str) -> None:
        while not self._closing:
            with contextlib.suppress(grpc.RpcError, errors.TrainError, OSError), self._channel() as channel:
                stop = pb.StopRequest(why=why, save=True)
                pb_grpc.MasterStub(channel).Stop(stop, metadata=self._metadata, timeout=5.0)
                return
            time.sleep(POLL_S)  # the launcher restarts the master

    def _sweep(self) -> None:
        """Removes what killed processes were writing; an object store is swept on resume, in seconds."""
        files.sweep(self.job_dir, folders=False)  # a folder may be a capture's, which continues
        where = parse_location(self.settings.checkpoints or self.folder.checkpoints)
        if isinstance(where, Path):
            files.sweep(where)

    def __exit__(self, *error: Any) -> None:
        with shutdown.no_second_signal():
            self._exits.__exit__(*error)

    def _end_processes(self) -> None:
        self._closing = True
        try:
            if self.master is not None and self.master.poll() is None and self._listened:
                # The master closes its journal, if it still can.
                with contextlib.suppress(grpc.RpcError), self._channel() as channel:
                    stop = pb.StopRequest(why="the launcher ends")
                    pb_grpc.MasterStub(channel).Stop(stop, metadata=self._metadata, timeout=2.0)
                    self.master.wait(2.0)
            if self._master_channel is not None:
                self._master_channel.close()  # ends the wait for another master
        finally:
            self._end_lifelines()

    def _end_lifelines(self) -> None:
        self.lifeline.end()  # ends every process of the job
        if self.master is not None:
            self.master.end()
        if self.agent is not None:
            self.agent.wait()

    def _clean(self) -> None:
        os.close(self.lifeline.reading)
        self._clean_folder()

    def _clean_folder(self) -> None:
        self._sweep()
        self.folder.remove_secret()
        hosts.clean(self.folder, keep_launch=self._superseded)

    def _record_end(self, launch: LaunchRecord, error: BaseException | None) -> None:
        outcome, why = shutdown.describe_end(error)
        with contextlib.suppress(errors.StorageError):  # the job may end because the disk is full
            self.folder.write_launch(msgspec.structs.replace(launch, ended=time.time(), outcome=outcome, why=why))
        self.folder.record("launcher.ended", outcome=outcome, why=why)

    def _start_agent(self) -> subprocess.Popen[bytes]:
        (early, self._early), log = (self._early, None), self.folder.log("agent")
        if early is not None:
            return early.hand_over(log)
        self.socket.unlink(missing_ok=True)
        return start_agent(self.socket, preload=self._preload(), life=self.lifeline.reading, log=log)

    def _preload(self) -> tuple[str, ...]:
        users = self.settings.script[0] if self.settings.script else self.settings.recipe
        return find_preload(self.settings.strategy, Path(users))

    def _start_master(self) -> None:
        self.master = self.master or self._make_master()
        self.master.start("--port", str(self._reserved.getsockname()[1]))

    def _make_master(self) -> MasterProcess:
        module, log = job_settings.MASTERS[self.settings.strategy], self.folder.log("master")
        return MasterProcess(module, self._arguments(), life=self._master_life.reading, log=log)

    def _arguments(self) -> list[str]:
        """Of every master of this launch."""
        return [str(self.job_dir), "--agent", str(self.socket), "--page-port", str(self.settings.page_port)]

    def _address(self) -> str:
        """Waits until the master listens, and returns its address."""
        while (master := self.folder.read_master()) is None or not master.address:
            if self.master is not None and (code := self.master.poll()) is not None:
                why = f"the master ended with exit code {code} before it listened"
                raise errors.TrainError(why, hint=f"see {self.folder.log('master')}")
            time.sleep(0.01)  # the master's own start takes some 200 ms
        self._listened = True
        return master.address

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self._address(), options=[*RECONNECTING, ONE_THREAD])

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.folder.read_secret()}"),)

    def run(self) -> dict[str, Any]:
        """Follows the job to its end and returns the summary. Raises the error that made it fail, or JobStopped."""
        threading.Thread(target=self._follow, name="follow", daemon=True).start()
        checked_at = time.monotonic()
        summary: dict[str, Any] | None = None
        while summary is None:
            bundle = None
            with contextlib.suppress(queue.Empty):
                bundle = self._events.get(timeout=max(0.0, checked_at + POLL_S - time.monotonic()))
            for event in bundle.events if bundle is not None else ():
                summary = self._handle_event(event) or summary
            ended = bundle is not None and not bundle.events
            if summary is None and (ended or time.monotonic() >= checked_at + POLL_S):
                checked_at = time.monotonic()
                self._keep_alive(EXIT_S if ended else 0.0)
        if self.settings.script:
            joined = HostsFolder(self.folder).read_launch() is not None
            shutdown.wait_for_scripts(self.job_dir, self.socket, self._keep_alive if joined else None)
        if self._publisher is not None:
            self._publisher.finish()
        return summary

    def _handle_event(self, event: pb.Event) -> dict[str, Any] | None:
        """Passes an event on; returns the summary if it is the job's end."""
        self.on_event(event.name)
        self._trial.hear(event.name)
        if event.name == "step.applied":
            self.restarts = 0  # a long job may lose its master any number of times, as long as it gets on between
        if event.name == "step.applied" and not events.has_listener():
            return None  # too many to decode without need
        fields = json.loads(event.fields)
        if event.name == "job.failed":
            failure = errors.find_error_class(fields["code"], errors.TrainError)
            raise failure(f"the job failed: {fields['why']}", hint=fields.get("hint", ""))
        events.emit(event.name, **{key: value for key, value in fields.items() if key != "summary"})
        if event.name == "view.published" and not self._page:
            master = self.folder.read_master()
            self._page = "" if master is None else master.page
            if self._page:  # not for JOB/events.jsonl: it holds a token, and that file is public
                events.emit("page.opened", url=self._page)
        if event.name == "job.superseded":
            self._superseded = True
            raise Superseded(
                f"{fields['host']} leads the job now, which this host was cut off from",
                hint=f"lend it this host's cores: trueline join {fields['address']} --token-file "
                f"with a copy of its {fields['token']}",
            )
        if event.name == "job.stopping" and self._halting == "Ctrl-C":
            raise KeyboardInterrupt
        if event.name == "job.stopping":
            raise shutdown.make_stopped_error(fields["why"], self.job_dir)
        summary: dict[str, Any] | None = json.loads(fields["summary"]) if event.name == "job.finished" else None
        return summary

    def _follow(self) -> None:
        """Collects the events of every master in order."""
        while not self._closing:
            with contextlib.suppress(grpc.RpcError, errors.TrainError, ValueError):  # ValueError: a closed channel
                self._master_channel = self._master_channel or self._channel()
                master = pb_grpc.MasterStub(self._master_channel)
                if self._closing:  # while the channel was made
                    self._master_channel.close()
                for bundle in master.Follow(pb.Cursor(after=0), metadata=self._metadata, wait_for_ready=True):
                    self._events.put(bundle)
            self._events.put(pb.Events())
            time.sleep(0.05)  # the launcher restarts the master

    def _keep_alive(self, patience_s: float = 0.0) -> None:
        """Restarts what died. Workers of a dead agent continue; their deaths are noticed late, by their lease."""
        self._trial.look()
        agent = self.agent.poll() if self.agent is not None else None
        master = self.master.wait(patience_s) if self.master is not None else None
        if agent is not None:
            self._count_restart("agent", agent)
            self.agent = self._start_agent()
        if master == SUPERSEDED:  # and its last events are lost
            self._superseded = True
            raise Superseded("another host leads the job now, which this host was cut off from")
        if master == 0 and self._events.empty():  # it ended on request, and its last events are lost
            raise shutdown.make_stopped_error("its master ended on request", self.job_dir)
        if master:
            self._count_restart("master", master)
            self._start_master()

    def _count_restart(self, role: str, code: int) -> None:
        self.restarts += 1
        if self.restarts > MAX_RESTARTS:
            raise errors.TrainError(
                f"the job's {role} and its like died {self.restarts} times without a step between; "
                f"last exit code {code}",
                hint=f"see {self.folder.log(role)}; continue with --resume",
            )
        self.emit(f"{role}.lost", code=code, restarts=self.restarts)


def detach(job_dir: Path) -> int:
    """Launches the job in `job_dir` in a process that outlives this one; returns its pid. Raises TrainError."""
    folder, log = JobDir(job_dir), JobDir(job_dir).log("launcher")
    log.parent.mkdir(parents=True, exist_ok=True)
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    command = [sys.executable, "-m", "trueline.train.launch.launcher", str(job_dir)]
    env = {name: value for name, value in os.environ.items() if name != LIFELINE}
    pid = os.posix_spawn(sys.executable, command, env, file_actions=streams, setsid=True)
    while (launch := folder.read_launch()) is None or launch.pid != pid:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise errors.TrainError(f"the launcher of {job_dir} ended before it began", hint=f"see {log}")
        time.sleep(0.02)  # its imports take some 300 ms
    return pid


def main() -> None:
    """`python -m trueline.train.launch.launcher JOB`: what `detach` starts. Its exit codes are those of the verbs."""
    job_dir = Path(sys.argv[1])
    watch_lifeline()  # of a process that started this launcher and is to be outlived by nothing of it
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        with LocalJob(job_dir) as running:
            summary = running.run()
    except errors.TruelineError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    sys.exit(LEFT_OUT_EXIT if summary.get("set_aside") else 0)


def _expect_ended(before: LaunchRecord | None, job_dir: Path) -> None:
    """Raises UsageError if the launch of the record lives, though the job's lock is free: the folder is a copy."""
    if before is None or before.ended or before.pid == os.getpid() or not Path(before.scratch or "/none").exists():
        return
    with contextlib.suppress(OSError):  # it has ended
        process = Path(f"/proc/{before.pid}")
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        if state not in "ZX" and process.stat().st_ctime <= before.started + 1.0:
            raise errors.UsageError(
                f"{job_dir} is a copy of a job that runs here, in process {before.pid}: both would train it",
                hint=f"halt that one first; for a job of its own remove {job_dir / 'launcher.json'} and give it "
                "other --checkpoints",
            )


def _kill_leftovers(before: LaunchRecord | None) -> None:
    """Kills what a killed launcher has left: processes that were stopped before they watched the lifeline."""
    if before is None or before.ended or not before.scratch:
        return
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            if entry.name.isdecimal() and before.scratch.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
    shutil.rmtree(before.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
