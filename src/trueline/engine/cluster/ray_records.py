"""What Ray's controller (GCS) knows of submissions: the keys that Trueline writes there, and Ray's own tables.

Ray frees the name of a dead actor, so what a name has done stands in the controller's key-value store, in the namespace
`trueline`:

    NAME          that it was submitted, what it needs      NAME.start    its process begins, or was withdrawn: once
    NAME.actor    the actor and its bundle                  NAME.end      how it ended, and the end of its log
    lost.NODE     a node whose keepers do not answer

`ray/_private/state.py` reads the tables of the controller without its dashboard. Ray's workers get this module by
value.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import state as tables
from ray.experimental import internal_kv

Record = dict[str, Any]
NAMESPACE = "trueline"
SUSPECT_S = 60.0
"""How long no submission goes to a node whose keeper did not answer; Ray itself notices its end after 14 s."""
START_S = 30.0
"""A submission without an actor by then has lost its client."""
KEPT_S = 86_400.0
_WORDS = {
    "RAY_KILL": "it was killed by ray.kill",
    "NODE_DIED": "its node failed",
    "OUT_OF_SCOPE": "its client died before Ray had it",
    "OWNER_DIED": "its client died before Ray had it",
}
_PREFIXES = {
    "actor_died_error_context": "the process of its actor died",
    "oom_context": "it took too much memory",
    "runtime_env_failed_context": "Ray could not prepare it",
    "actor_unschedulable_context": "Ray cannot place it",
    "creation_task_failure_context": "its actor did not start",
}


def group_of(name: str) -> str:
    """The launch of a submission."""
    return name.rpartition(".")[0]


def read(key: str) -> Record | None:
    data = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return None if data is None else json.loads(data)


def write(key: str, record: Record, *, replace: bool = False) -> bool:
    """Whether it was written: without `replace` the first record stays."""
    return not internal_kv._internal_kv_put(key, json.dumps(record), overwrite=replace, namespace=NAMESPACE)


def list_keys(prefix: str) -> list[str]:
    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)]


def list_names(group: str) -> list[str]:
    return sorted(key for key in list_keys(f"{group}.") if group_of(key) == group)


def forget_old() -> None:
    """Removes the records of what ended long ago."""
    for key in list_keys(""):
        if key.startswith("lost.") or key.endswith(".end"):
            record = read(key)
            if record is not None and time.time() - record["at"] > KEPT_S:
                name = key.removesuffix(".end")
                for each in (name, f"{name}.actor", f"{name}.start", f"{name}.end"):
                    internal_kv._internal_kv_del(each, namespace=NAMESPACE)


def list_lost() -> list[str]:
    """Nodes of which a keeper did not answer lately."""
    notes = {key.removeprefix("lost."): read(key) for key in list_keys("lost.")}
    return [node for node, note in notes.items() if node and note and time.time() - note["at"] < SUSPECT_S]


def read_actor(number: str) -> Record:
    """Ray's record of an actor; empty: it has none."""
    found: Record = tables.actors(number)
    return found


def report(name: str) -> Record:
    """A submission as the scheduler lists it."""
    known, actor = read(name) or {"at": 0.0}, read(f"{name}.actor")
    found = read_actor(actor["id"]) if actor is not None else {}
    start, end = read(f"{name}.start"), read(f"{name}.end")  # after the actor's state: it writes its end before
    one: Record = {"name": name, "state": "ended", "reason": "", "node": (start or {}).get("node", ""), "code": None}
    if end is not None:
        return one | {"reason": end["reason"], "code": end.get("code")}
    if start is not None and "withdrawn" in start:
        return one | {"reason": "cancelled while it waited"}
    if actor is None and time.time() - known["at"] < START_S:
        return one | {"state": "queued", "reason": "it is being submitted"}
    if not found:
        return one | {"reason": "Ray knows it no more" if actor else "its client died before it was submitted"}
    if found["State"] == "DEAD":
        return one | {"reason": describe_death(found["DeathCause"])}
    if start is not None:
        return one | {"state": "running"}
    return one | {"state": "queued", "reason": find_obstacle(known["need"], known["bundles"])}


def describe_death(cause: Any) -> str:
    """Why an actor is dead, by Ray's record."""
    if cause.HasField("actor_died_error_context"):
        died = cause.actor_died_error_context
        if (reason := type(died).Reason.Name(died.reason)) in _WORDS:
            return _WORDS[reason]
    for field, prefix in _PREFIXES.items():
        if cause.HasField(field):
            said = str(getattr(getattr(cause, field), "error_message", "")).strip().splitlines()
            return f"{prefix}: {said[0][:200]}" if said else prefix
    return "Ray gives no reason"


def find_obstacle(need: Mapping[str, float], bundles: int) -> str:
    """Why an actor waits that needs this, or its job that many times over."""
    nodes = [one["Resources"] for one in ray.nodes() if one["Alive"]]
    shown = " and ".join(_show(key, value) for key, value in need.items())
    shown = f"{bundles} times {shown}" if bundles > 1 else shown
    for key, value in need.items():
        most = max((node.get(key, 0) for node in nodes), default=0)
        if most < value:
            return (
                f"no node of the Ray cluster has {_show(key, value)} (the largest: {_show(key, most)}), so that it"
                " never starts unless one joins"
            )
    whole = sum(count_fits(node, need) for node in nodes)
    if whole < bundles:
        return (
            f"its job needs {shown} to begin, and the Ray cluster has {whole} of these, so that it never starts unless"
            " nodes join"
        )
    free = list(tables.available_resources_per_node().values())
    if sum(count_fits(node, need) for node in free) >= bundles:
        return "its actor starts"
    left, total = (sum(node.get("CPU", 0) for node in each) for each in (free, nodes))
    return f"it waits for {shown}: {left:g} of the Ray cluster's {total:g} CPUs are free"


def _show(key: str, value: float) -> str:
    if key == "memory":
        return f"{value / 2**20:.0f} MB of memory"
    return f"{value:g} {key}s" if value != 1 and key in ("CPU", "GPU") else f"{value:g} {key}"


def count_fits(node: Mapping[str, float], need: Mapping[str, float]) -> int:
    return min(int(node.get(key, 0) // value) for key, value in need.items() if value)


def has_room(need: Mapping[str, float], without: list[str]) -> bool:
    """Whether a node other than these has it free."""
    free = tables.available_resources_per_node()
    return any(count_fits(node, need) for number, node in free.items() if number not in without)


def is_feasible(need: Mapping[str, float], without: list[str]) -> bool:
    """Whether a node other than these could have it free one day."""
    nodes = {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}
    return any(count_fits(node, need) for number, node in nodes.items() if number not in without)
