"""What runs in Ray: the actor that keeps one submission, and the scheduler's calls where Ray is connected.

Ray's workers get this module by value, so that the Python of the cluster needs Ray alone. Ray restarts no actor without
`max_restarts`. The keeper lends its connection to its process by a socket, so that a head submits hosts without one of
its own. A process ends with its keeper (PR_SET_PDEATHSIG), since Ray gives its CPUs to others then. Sources: "Named
Actors", "Placement Groups" and "Actor Fault Tolerance" of docs.ray.io, Ray 2.60.
"""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trueline.engine.cluster.ray import SOCKET
from trueline.engine.cluster.ray_records import (
    NAMESPACE,
    START_S,
    Record,
    forget_old,
    group_of,
    has_room,
    is_feasible,
    list_lost,
    list_names,
    read,
    read_actor,
    report,
    write,
)

NOTICE_S = 30.0
"""Between SIGTERM and SIGKILL, for a checkpoint."""
ANSWER_S = 2.0
"""A keeper that does not answer within it has lost its node."""
RETRY_S = 1.0
TAKEN = ("already taken", "already exists")
"""What Ray says of a name that another client, or another thread of this one, has just given to an actor."""
TAIL = 1 << 16
"""Bytes of a log that outlive its process where clients do not see its file."""
_Result = TypeVar("_Result")
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""
"""Runs a command that ends with its parent; `preexec_fn` is not safe in a process with threads."""


def perform(call: str, given: Record) -> Record:
    """One call; the answer, or why there is none: `refused` for good, `away` for now."""
    calls: Mapping[str, Callable[..., Any]] = {
        "submit": submit, "cancel": cancel, "list": list_group, "read_log": read_log,
    }  # fmt: skip
    try:
        return {"answer": calls[call](**given)}
    except ValueError as error:
        return {"refused": _first_line(error)}
    except Exception as error:  # noqa: BLE001 - Ray has dozens, and no common one
        return {"away": _first_line(error)}


def serve(path: str, answer: Callable[[str, Record], Record], is_over: Callable[[], bool]) -> None:
    """Answers calls on a Unix socket, a line each, until `is_over` says so. Only this user can reach it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        listener.settimeout(1.0)
        while not is_over():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                threading.Thread(target=_answer_line, args=(connection, answer), daemon=True).start()


def _answer_line(connection: socket.socket, answer: Callable[[str, Record], Record]) -> None:
    connection.settimeout(None)
    with connection, connection.makefile("rw") as line, contextlib.suppress(OSError):
        asked = json.loads(line.readline())
        line.write(json.dumps(answer(asked["call"], asked["given"])) + "\n")
        line.flush()


def submit(one: Record) -> str:
    name = str(one["name"])
    if one["gang"]:
        _sweep()
    write(name, {"at": time.time(), "log": one["log"], "need": _find_need(one), "bundles": _count_bundles(one)})
    if read(f"{name}.actor") is None and read(f"{name}.start") is None:
        place, bundle = _find_place(one)
        try:
            actor = ray.remote(ActorKeeper).options(**_make_options(one), **place).remote(one)
        except ValueError as error:
            if not any(words in str(error) for words in TAKEN):
                raise
            try:  # another client was first
                actor = ray.get_actor(name, NAMESPACE)
            except ValueError:
                return name  # it writes what it has; or the actor has ended
        number = actor._actor_id.hex()
        write(f"{name}.actor", {"id": number, "bundle": bundle})
        until = time.monotonic() + START_S
        while read_actor(number).get("State", "") in ("", "DEPENDENCIES_UNREADY") and time.monotonic() < until:
            time.sleep(0.01)  # an actor that its client has not handed over to Ray ends with that client
    return name


def cancel(name: str, grace: bool) -> None:
    if read(name) is None:
        return
    if write(f"{name}.start", {"withdrawn": True}):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, NAMESPACE))
        write(f"{name}.end", {"reason": "cancelled while it waited", "at": time.time()})
        _release(group_of(name))
    elif read(f"{name}.end") is None:
        with contextlib.suppress(ValueError, ray.exceptions.ActorDiedError):  # it has ended
            _stop(name, ray.get_actor(name, NAMESPACE), grace)


def _stop(name: str, actor: Any, grace: bool) -> None:
    try:
        ray.get(actor.stop.remote(grace), timeout=ANSWER_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        if not grace:
            node = (read(f"{name}.start") or {}).get("node_id", "")
            write(f"lost.{node}", {"at": time.time()}, replace=True)
            write(f"{name}.end", {"reason": "given up: its node did not answer", "at": time.time()})
            ray.kill(actor)


def list_group(group: str) -> list[Record]:
    found = [report(name) for name in list_names(group)]
    if found and all(one["state"] == "ended" for one in found):
        _release(group)
    return found


def read_log(name: str) -> Record:
    """Where it is, and the end of it for a client that does not see that file."""
    known = read(name)
    if known is None:
        return {"log": "", "data": ""}
    end, data = read(f"{name}.end"), ""
    if end is not None:
        data = end.get("log", "")
    elif not os.path.exists(known["log"]):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            data = ray.get(ray.get_actor(name, NAMESPACE).read_log.remote(), timeout=ANSWER_S)
    return {"log": known["log"], "data": data}


class ActorKeeper:
    """The actor of a submission: starts its process, passes signals on, and writes how it ended."""

    def __init__(self, one: Record) -> None:
        self._one, self._name = one, one["name"]
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._kill_at, self._notified = float("inf"), False
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self, grace: bool) -> None:
        with self._lock:
            self._kill_at = min(self._kill_at, time.monotonic() + NOTICE_S if grace else 0.0)
            self._signal()

    def read_log(self) -> str:
        return _read_tail(self._one["log"])

    def _signal(self) -> None:
        """SIGTERM for the process, which has children of its own; SIGKILL for all of its group, once it is time."""
        child = self._child
        if child is None or child.poll() is not None or self._kill_at == float("inf"):
            return
        if time.monotonic() >= self._kill_at:
            os.killpg(child.pid, signal.SIGKILL)
        elif not self._notified:
            self._notified = True
            child.terminate()

    def _run(self) -> None:
        context = ray.get_runtime_context()
        begun = {"node_id": context.get_node_id(), "node": socket.gethostname(), "at": time.time()}
        if _insist(lambda: write(f"{self._name}.start", begun)):
            try:
                end = self._keep(context.gcs_address)
            except OSError as error:
                end = {"reason": f"it cannot start on {begun['node']}: {error}"}
            record = {**end, "at": time.time(), "log": _read_tail(self._one["log"])}
            _insist(lambda: write(f"{self._name}.end", record))
            _insist(lambda: _release(group_of(self._name)))
        context.current_actor.__ray_terminate__.remote()

    def _keep(self, address: str) -> Record:
        """Runs the process to its end."""
        with tempfile.TemporaryDirectory(prefix="trueline-ray-") as folder:
            path = f"{folder}/socket"
            threading.Thread(target=serve, args=(path, perform, lambda: False), daemon=True).start()
            os.makedirs(os.path.dirname(self._one["log"]), exist_ok=True)
            command = [sys.executable, "-ISc", _TIED, str(os.getpid()), *self._one["command"]]
            with open(self._one["log"], "ab") as log:
                child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
                    env=_make_environment(self._one, {SOCKET: path, "RAY_ADDRESS": address}),
                )  # fmt: skip
            self._child = child
            while child.poll() is None:
                with self._lock:
                    self._signal()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it has left behind
        code = child.returncode
        if code < 0:
            return {"reason": f"killed by {signal.Signals(-code).name}"}
        return {"reason": f"exit code {code}", "code": code}


def _make_environment(one: Record, more: Mapping[str, str]) -> dict[str, str]:
    """That of the node, without what makes a process a worker of Ray or of another job."""
    left_out = {"RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "TRUELINE_LIFELINE"}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, **one["passed"], **one["env"], **more}


def _find_need(one: Record) -> dict[str, float]:
    """The resources of one submission, by Ray's names."""
    memory = {"memory": one["memory_mb"] << 20} if one["memory_mb"] else {}
    return {"CPU": one["slots"], **memory, **one["resources"]}


def _count_bundles(one: Record) -> int:
    """How many submissions its job needs to begin, this one included; 1 for a host."""
    return int(max(1, -(-one["gang"] // one["slots"])))


def _make_options(one: Record) -> Record:
    need = dict(_find_need(one))
    options = {
        "name": one["name"], "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": 0, "max_concurrency": 8,
        "num_cpus": need.pop("CPU"),
    }  # fmt: skip
    for key, option in (("memory", "memory"), ("GPU", "num_gpus")):
        if key in need:
            options[option] = need.pop(key)
    return options | {"resources": need}


def _find_place(one: Record) -> tuple[Record, int]:
    """Options that say where it runs, and its bundle of the launch's placement group; -1: none.

    A head makes the group of all that its job needs to begin, so that two jobs never each hold a part of what both
    need. A host takes a free bundle. One whose node seems dead stays unused as long as there is room elsewhere: Ray
    moves it once it has noticed.
    """
    group, lost = group_of(one["name"]), list_lost()
    beside: Record = {"label_selector": {"ray.io/node-id": f"!in({','.join(lost)})"}}
    if not lost or not is_feasible(_find_need(one), lost):  # the selector stays when the node is back
        beside = {}
    if _count_bundles(one) > 1 and _find_placement(group) is None:
        bundles = [_find_need(one)] * _count_bundles(one)
        ray.util.placement_group(bundles, strategy=one["strategy"], name=group, lifetime="detached")
    placement = _find_placement(group)
    if placement is None:
        return beside, -1
    living = [name for name in list_names(group) if name != one["name"] and report(name)["state"] != "ended"]
    taken = {(read(f"{name}.actor") or {}).get("bundle", -1) for name in living}
    nodes = ray.util.placement_group_table(placement)["bundles_to_node_id"]
    free = sorted((nodes[bundle] in lost, bundle) for bundle in nodes if bundle not in taken)
    if not free or (free[0][0] and has_room(_find_need(one), lost)):
        return beside, -1
    bundle = free[0][1]
    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
    return {"scheduling_strategy": strategy}, bundle


def _find_placement(group: str) -> Any:
    with contextlib.suppress(ValueError):
        return ray.util.get_placement_group(group)
    return None


def _release(group: str) -> None:
    """Gives the reservation of a launch back, once nothing of it lives."""
    placement = _find_placement(group)
    if placement is not None and all(report(name)["state"] == "ended" for name in list_names(group)):
        ray.util.remove_placement_group(placement)


def _sweep() -> None:
    """Gives back what launches reserve whose last keeper was killed, and forgets what ended long ago."""
    for one in ray.util.placement_group_table().values():
        if one["state"] != "REMOVED" and list_names(one["name"]):
            _release(one["name"])
    forget_old()


def _insist(work: Callable[[], _Result]) -> _Result:
    """The result of `work`, once Ray's controller answers. Ray ends an actor whose node has lost it for good."""
    while True:
        try:
            return work()
        except Exception:  # noqa: BLE001 - Ray has dozens, and no common one
            time.sleep(RETRY_S)


def _read_tail(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL))
        return base64.b64encode(file.read()).decode()
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
