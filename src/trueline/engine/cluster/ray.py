"""Ray: a submission is a detached actor without restarts, which keeps its process (`ray_side.py`).

Ray takes seconds to import and to connect, and its driver has threads and signal handlers of its own. So this process
never imports it: a helper (`ray_client.py`) connects once, answers on a socket and ends a minute after the last call.
The processes of a job find such a socket at the actor that keeps them.
"""

import base64
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trueline import files
from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState
from trueline.engine.cluster.settings import RaySettings
from trueline.errors import EngineAway, UsageError

SOCKET = "TRUELINE_RAY"
"""Environment variable of a submission's process: the socket of the actor that keeps it."""
CALL_S, OUTSIDE_S = 8.0, 30.0
"""How long a call may take, which usually takes milliseconds; by ray:// it is a task, which needs a worker of Ray."""
RETRY_S = 5.0
"""How long a cluster that did not answer is taken to be away."""
_failures: dict[Path, tuple[EngineAway, float]] = {}
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class RayScheduler:
    def __init__(self, settings: RaySettings) -> None:
        if settings.strategy not in STRATEGIES:
            raise UsageError(f"[engine.ray]: strategy is {settings.strategy}, expected one of {', '.join(STRATEGIES)}")
        self._settings, self._resources = settings, parse_resources(settings.resources)

    def submit(self, submission: Submission) -> str:
        return str(self._call("submit", one=self._describe(submission)))

    def cancel(self, name: str, *, grace: bool = True) -> None:
        self._call("cancel", name=name, grace=grace)

    def list(self, job: str) -> Sequence[SubmissionReport]:
        return [
            SubmissionReport(**one | {"state": SubmissionState(one["state"])})
            for one in self._call("list", group=job)
        ]  # fmt: skip

    def read_log(self, name: str) -> bytes:
        known = self._call("read_log", name=name)
        with suppress(OSError):
            if known["log"]:
                return Path(known["log"]).read_bytes()
        return base64.b64decode(known["data"])

    def _describe(self, submission: Submission) -> dict[str, Any]:
        """What the actor gets."""
        own = submission
        return {
            "name": own.name, "command": list(own.command), "env": own.env, "slots": own.slots, "gang": own.gang,
            "memory_mb": own.memory_mb, "log": own.log, "resources": self._resources,
            "strategy": self._settings.strategy,
            "passed": {name: os.environ[name] for name in self._settings.env if name in os.environ},
        }  # fmt: skip

    def _call(self, call: str, **given: Any) -> Any:
        """The answer of the helper. Raises EngineAway, UsageError if Ray refuses it for good."""
        try:
            with self._connect() as connection, connection.makefile("rw") as line:
                connection.settimeout(self._patience_s)
                line.write(json.dumps({"call": call, "given": given}) + "\n")
                line.flush()
                reply = json.loads(line.readline() or '{"away": "its connection has ended"}')
        except TimeoutError as error:
            why = f"Ray did not answer within {self._patience_s:.0f} s"
            raise EngineAway(why, hint="try again; what runs continues") from error
        except OSError as error:
            raise EngineAway(f"Ray does not answer: {error.strerror or error}", hint="try again") from error
        if "refused" in reply:
            raise UsageError(f"Ray refuses it: {reply['refused']}", hint="correct [engine.ray] in trueline.toml")
        if "away" in reply:
            raise EngineAway(f"Ray does not answer: {reply['away']}", hint="try again; what runs continues")
        return reply["answer"]

    @property
    def _patience_s(self) -> float:
        return OUTSIDE_S if self._settings.address.startswith("ray://") and SOCKET not in os.environ else CALL_S

    def _connect(self) -> socket.socket:
        if given := os.environ.get(SOCKET):
            return dial(Path(given))
        path = name_socket(self._settings.address)
        with suppress(OSError):
            return dial(path)
        with files.hold_lock(path.with_suffix(".lock")):
            with suppress(OSError):  # another client was first
                return dial(path)
            failure, until = _failures.get(path, (None, 0.0))
            if failure is not None and time.monotonic() < until:  # one failure for all jobs that are listed
                raise failure
            path.unlink(missing_ok=True)
            try:
                start_helper(self._settings.address, path)
            except EngineAway as error:
                _failures[path] = error, time.monotonic() + RETRY_S
                raise
        return dial(path)


def parse_resources(given: Sequence[str]) -> dict[str, float]:
    """
    >>> parse_resources(["GPU=1", "fast_disk=0.5"])
    {'GPU': 1.0, 'fast_disk': 0.5}
    """
    found = {}
    for one in given:
        name, _, value = one.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            found = {}
        if not found.get(name.strip(), 0) > 0 or not name.strip() or name.strip() in ("CPU", "memory"):
            raise UsageError(
                f"[engine.ray]: resources has '{one}', expected NAME=NUMBER above 0, as GPU=1",
                hint="CPUs and memory are slots and memory_mb",
            )
    return found


def name_socket(address: str) -> Path:
    """Where the helper for a cluster listens, in a folder of this user alone."""
    folder = files.user_cache() / "ray"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = "\0".join((address, os.environ.get("RAY_ADDRESS", ""), sys.executable))
    return folder / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.sock"


def dial(path: Path) -> socket.socket:
    """Raises OSError where nothing listens."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CALL_S)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")  # sockaddr_un has 108 bytes
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def start_helper(address: str, path: Path) -> None:
    """Returns once the helper is connected and listens. Raises EngineAway."""
    # -c and not -m: Ray adds the folder of a driver's script to the paths of its workers.
    main = "from trueline.engine.cluster.ray_client import main; main()"
    log = path.with_suffix(".log")
    with log.open("wb") as file:
        shell = subprocess.Popen(
            ["sh", "-c", '"$@" &', "sh", sys.executable, "-c", main, address, str(path)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=file, start_new_session=True, cwd="/",
        )  # fmt: skip
    with shell:
        assert shell.stdout is not None
        shown = json.loads(shell.stdout.readline() or "{}")
    if not shown.get("ready"):
        why = shown.get("why") or f"the connection to Ray failed, or took too long: see {log}"
        raise EngineAway(why, hint=shown.get("hint") or "set address in [engine.ray] of trueline.toml, or try again")
