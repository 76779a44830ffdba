"""The launcher of a local job: it starts the agent and the master, keeps them running, and tells what happens.

    trueline train ── lifeline ──▶ agent (zygote) ──fork──▶ workers
                   └─ lifeline ──▶ master ◀──────gRPC────── workers

A master that dies is started again on the same port and adopts the workers. When the launcher ends, by whatever
means, the lifeline ends with it and so do all its processes.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from trueline import errors, events, files
from trueline.engine import lifeline
from trueline.engine.local import start_agent
from trueline.train import settings as job_settings
from trueline.train.settings import JobSettings
from trueline.wire import train_pb2 as pb
from trueline.wire import train_pb2_grpc as pb_grpc

PRELOAD = ("trueline.train.worker", "trueline.train.warm")
"""What every worker needs; the agent imports it once, and the libraries that the recipe imports."""
POLL_S = 0.1
MAX_RESTARTS = 10


class LocalJob:
    """Runs the job whose settings are in `job_dir`. Use as a context: leaving it leaves no process behind."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir
        self.settings: JobSettings = job_settings.load(job_dir)
        self.scratch = Path(tempfile.mkdtemp(prefix="trueline-"))
        self.socket = self.scratch / "agent"
        self.life, self._life_end = os.pipe()
        self.restarts = 0
        self._port = 0
        self._said: queue.Queue[pb.Event] = queue.Queue()
        self._seen = 0
        self._closing = False

    def __enter__(self) -> LocalJob:
        logs = self.job_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        files.write_atomic(self.job_dir / "secret", secrets.token_urlsafe(32).encode(), mode=0o600)
        (self.job_dir / "master.json").unlink(missing_ok=True)
        self._sweep()
        self.agent = self._start_agent()
        self.master = self._start_master()
        return self

    def _sweep(self) -> None:
        """Removes what a worker that was killed while it wrote a checkpoint has left; nobody of the job is alive."""
        files.sweep(self.job_dir / "checkpoints")

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._stop_master()
        os.close(self._life_end)  # the end of every process of the job
        for process in (self.master, self.agent):
            process.wait()
        os.close(self.life)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._sweep()
        (self.job_dir / "secret").unlink(missing_ok=True)

    def _stop_master(self) -> None:
        """Lets the master close its journal, if it still can."""
        if self.master.poll() is None and self._port:
            with contextlib.suppress(grpc.RpcError, subprocess.TimeoutExpired), self._stub() as master:
                master.Stop(pb.StopRequest(why="the launcher ends"), metadata=self._metadata, timeout=2.0)
                self.master.wait(2.0)

    def _start_agent(self) -> subprocess.Popen[bytes]:
        self.socket.unlink(missing_ok=True)
        preload = (*PRELOAD, *libraries_of(Path(self.settings.recipe)))
        return start_agent(self.socket, preload=preload, life=self.life, log=self.job_dir / "logs" / "agent.log")

    def _start_master(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "trueline.train.master",
            str(self.job_dir),
            "--agent",
            str(self.socket),
        ]
        with (self.job_dir / "logs" / "master.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--port", str(self._port)],
                env={**os.environ, lifeline.VARIABLE: str(self.life), "GRPC_VERBOSITY": "NONE"},
                pass_fds=(self.life,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _address(self) -> str:
        """Where the master listens, once it does."""
        file = self.job_dir / "master.json"
        while not file.exists():
            if self.master.poll() is not None:
                raise errors.TrainError(
                    f"the master ended with exit code {self.master.returncode} before it listened",
                    hint=f"see {self.job_dir / 'logs' / 'master.log'}",
                )
            time.sleep(0.01)  # the master's own start takes some 200 ms
        address: str = json.loads(file.read_text())["address"]
        self._port = int(address.rpartition(":")[2])
        return address

    @contextlib.contextmanager
    def _stub(self) -> Any:
        with grpc.insecure_channel(self._address(), options=[("grpc.enable_http_proxy", 0)]) as channel:
            yield pb_grpc.MasterStub(channel)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {(self.job_dir / 'secret').read_text()}"),)

    def run(self) -> dict[str, Any]:
        """Follows the job to its end and returns the summary. Raises what made it fail."""
        threading.Thread(target=self._follow, name="follow", daemon=True).start()
        looked_at = time.monotonic()
        while True:
            if time.monotonic() >= looked_at + POLL_S:
                looked_at = time.monotonic()
                self._keep_alive()
            try:
                event = self._said.get(timeout=POLL_S)
            except queue.Empty:
                continue
            fields = json.loads(event.fields)
            if event.name == "job.failed":
                raise _error(fields)
            events.emit(event.name, **{key: value for key, value in fields.items() if key != "summary"})
            if event.name == "job.finished":
                summary: dict[str, Any] = json.loads(fields["summary"])
                return summary

    def _follow(self) -> None:
        """Brings the master's events, of every life of the master, in order."""
        while not self._closing:
            seen = 0
            with contextlib.suppress(grpc.RpcError, errors.TrainError), self._stub() as master:
                for event in master.Follow(pb.Cursor(after=seen), metadata=self._metadata):
                    self._said.put(event)
            time.sleep(0.05)  # the master is away; it is being started again

    def _keep_alive(self) -> None:
        """Starts what died again. Workers of a dead agent go on; only their deaths are noticed late, by their lease."""
        if self.agent.poll() is not None:
            self._count_restart("agent", self.agent.returncode)
            self.agent = self._start_agent()
        if self.master.poll() is not None:
            self._count_restart("master", self.master.returncode)
            self.master = self._start_master()

    def _count_restart(self, role: str, code: int) -> None:
        self.restarts += 1
        if self.restarts > MAX_RESTARTS:
            raise errors.TrainError(
                f"the job's {role} and its like died {self.restarts} times; last exit code {code}",
                hint=f"see {self.job_dir / 'logs' / f'{role}.log'}; go on with --resume",
            )
        events.emit(f"{role}.lost", code=code, restarts=self.restarts)


def libraries_of(recipe: Path) -> list[str]:
    """Installed modules that the recipe's file imports at its top: worth importing once for all workers.

    Modules beside the recipe are the user's code, which runs in workers only.
    """
    try:
        body = ast.parse(recipe.read_bytes()).body
    except (OSError, SyntaxError):  # not a file: module:object, whose imports nobody can know without running it
        return []
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in dict.fromkeys(names) if _installed(name.partition(".")[0])]


def _installed(top: str) -> bool:
    spec = importlib.util.find_spec(top)
    return spec is not None and any(
        part in ("site-packages", "dist-packages") for part in Path(spec.origin or "").parts
    )


def _error(fields: dict[str, Any]) -> errors.TruelineError:
    """The error that a job failed with, of the class its code names."""
    kinds = {kind.code: kind for kind in _kinds(errors.TruelineError)}
    kind = kinds.get(fields["code"], errors.TrainError)
    return kind(f"the job failed: {fields['why']}", hint=fields.get("hint", ""))


def _kinds(kind: type[errors.TruelineError]) -> list[type[errors.TruelineError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _kinds(child))]
