"""What a pod's status says, in the user's words. Pure: time is an argument.

A pod is QUEUED until its container runs: it has no node, or its image is pulled. It is RUNNING until no container of it
runs: the phase of one that is cancelled is Failed before that, and Kubernetes before 1.22 never tells the end of its
container, so that it is taken as ended when its notice is over. The pod of a lost node stays listed until the node
comes back, so it has ended once the time for its deletion is over. Source: the API reference of Pod (v1), and
pkg/kubelet/images, pkg/kubelet/eviction and pkg/scheduler for the reasons.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from trueline.engine.cluster.contract import SubmissionReport, SubmissionState
from trueline.engine.cluster.kubernetes.access import parse_time
from trueline.engine.cluster.kubernetes.pods import CANCELLED, NAME, NOTICE_S, QUEUE

LATE_S = 10.0
"""How much later than announced a pod of a living node is gone."""
DELETED = "its pod was deleted (kubectl delete, or its node was drained)"
WAITS: Mapping[str, str] = {
    "ContainerCreating": "its container is made",
    "PodInitializing": "its container is made",
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "ErrImageNeverPull": "its image is not on the node, and may not be pulled",
    "ErrImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image has no valid name",
    "ImageInspectError": "its image cannot be read",
    "RegistryUnavailable": "the registry of its image does not answer",
    "CreateContainerConfigError": "its container cannot be made",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its container cannot be started",
}
STEPS: Mapping[str, bool] = {
    **dict.fromkeys(("Scheduled", "Pulled", "Created", "Started"), False),
    **dict.fromkeys(("Pulling", "Failed", "BackOff", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox",
                     "FailedSync", "NetworkNotReady"), True),
}  # fmt: skip
"""Events while a container is made, and whether they say what takes the time."""
ENDS: Mapping[str, str] = {
    "DeadlineExceeded": "it was cancelled",
    "Evicted": "it was evicted",
    "NodeLost": "its node does not answer",
    "NodeShutdown": "its node was shut down",
    "Shutdown": "its node was shut down",
    "Terminated": "its node was shut down",
    "Preempted": "it was preempted",
    "Preempting": "it was preempted",
    "OutOfcpu": "its node had too few free cores",
    "OutOfmemory": "its node had too little free memory",
    "OutOfpods": "its node had no room for another pod",
    "NodeAffinity": "its node does not have the labels that it asks for",
    "UnexpectedAdmissionError": "its node refused it",
    "OOMKilled": "it took more memory than it asked for",
    "ContainerCannotRun": "its container cannot be started",
    "StartError": "its container cannot be started",
}


def describe_pod(pod: Mapping[str, Any], now: float) -> SubmissionReport:
    meta, status = pod["metadata"], pod.get("status") or {}
    name, node = meta["annotations"][NAME], pod["spec"].get("nodeName", "")
    phase = status.get("phase", "Pending")
    lost = _is_lost(meta, now)
    if lost or (phase in ("Succeeded", "Failed") and not _is_leaving(meta, status, now)):
        reason, code = describe_end(status)
        if lost and phase not in ("Succeeded", "Failed"):
            reason, code = "its node does not answer, and Kubernetes has given it up", None
        elif "deletionTimestamp" in meta:
            reason = DELETED
        return SubmissionReport(name=name, state=SubmissionState.ENDED, reason=reason, code=code, node=node)
    if phase == "Pending":
        return SubmissionReport(name=name, state=SubmissionState.QUEUED, reason=describe_wait(pod), node=node)
    if "deletionTimestamp" in meta:
        reason = "its pod is being deleted"
    else:
        reason = "its node does not answer" if phase == "Unknown" else ""
    return SubmissionReport(name=name, state=SubmissionState.RUNNING, reason=reason, node=node)


def _is_leaving(meta: Mapping[str, Any], status: Mapping[str, Any], now: float) -> bool:
    """Whether a container of a cancelled pod runs yet."""
    states = [one.get("state") or {} for one in status.get("containerStatuses") or ()]
    until = float(meta["annotations"].get(CANCELLED, 0.0)) + NOTICE_S
    return any("running" in state for state in states) and now < until


def _is_lost(meta: Mapping[str, Any], now: float) -> bool:
    """`deletionTimestamp` is when the pod is to be gone."""
    return "deletionTimestamp" in meta and now > parse_time(meta["deletionTimestamp"]) + LATE_S


def describe_wait(pod: Mapping[str, Any]) -> str:
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            reason = waiting.get("reason", "")
            said = waiting.get("message", "")
            words = WAITS.get(reason, "it waits")
            return f"{words}: {_shorten(said)} ({reason})" if said else f"{words} ({reason})" if reason else words
    if pod["spec"].get("schedulingGates"):
        queue = pod["metadata"].get("labels", {}).get(QUEUE, "")
        return f"the queue {queue} has not admitted it" if queue else "its scheduling gates are closed"
    scheduled = find_condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return _describe_unscheduled(scheduled.get("message", ""), scheduled.get("reason", ""))
    return "its container is made" if pod["spec"].get("nodeName") else "Kubernetes has not looked at it yet"


def _describe_unscheduled(message: str, reason: str) -> str:
    low = message.lower()
    words = "no node can take it"
    if "no nodes available" in low:
        words = "the cluster has no node"
    elif "persistentvolumeclaim" in low:
        words = "a claim that it needs is not there or not bound"
    elif "insufficient" in low:
        words = "it waits for free cores or memory"
    elif "taint" in low or "node selector" in low or "affinity" in low:
        words = "no node is meant for it"
    return f"{words}: {_shorten(message)} ({reason})" if message else f"{words} ({reason})"


def find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((one for one in status.get("conditions") or () if one.get("type") == kind), {})


def describe_end(status: Mapping[str, Any]) -> tuple[str, int | None]:
    """Why it ended, and its exit code."""
    ends = [
        end
        for one in status.get("containerStatuses") or ()
        if (end := (one.get("state") or {}).get("terminated")) is not None
    ]
    code = int(ends[0]["exitCode"]) if ends else None
    if status.get("reason"):
        reason = status["reason"]
        words = ENDS.get(reason, "it failed")
        said = "" if reason == "DeadlineExceeded" else status.get("message", "")
        return (f"{words}: {_shorten(said)} ({reason})" if said else words if reason in ENDS else reason), code
    if code is None:
        return ("exit code 0", 0) if status.get("phase") == "Succeeded" else ("its container was never started", None)
    return describe_exit(ends[0], code), code


def find_end(pod: Mapping[str, Any]) -> float:
    """When it ended, in seconds; 0: it has not."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return 0.0
    ends = [(one.get("state") or {}).get("terminated") or {} for one in status.get("containerStatuses") or ()]
    found = [end["finishedAt"] for end in ends if end.get("finishedAt")]
    return parse_time(max(found, default=pod["metadata"]["creationTimestamp"]))


def describe_exit(end: Mapping[str, Any], code: int) -> str:
    """
    >>> describe_exit({"reason": "Error", "message": "no such module\\n"}, 1), describe_exit({"reason": "Error"}, 137)
    ('exit code 1: no such module', 'killed by SIGKILL')
    """
    if words := ENDS.get(end.get("reason", "")):
        said = f": {_shorten(end['message'])}" if end.get("message") else ""
        return f"{words} ({end['reason']}){said}"
    if end.get("signal") or code > 128:
        try:
            words = f"killed by {signal.Signals(end.get('signal') or code - 128).name}"
        except ValueError:
            words = f"exit code {code}"
    else:
        words = f"exit code {code}"
    lines = end.get("message", "").strip().splitlines() if code else []
    return f"{words}: {_shorten(lines[-1])}" if lines else words


def describe_gone(events: Sequence[Mapping[str, Any]]) -> str:
    """Why a pod is no longer listed, from the events that Kubernetes keeps of it for an hour."""
    for event in events:
        if event.get("reason") == "TaintManagerEviction":
            return "its node was lost or drained, and its pod was deleted"
        if event.get("reason") in ("Preempted", "Preempting"):
            return f"it was preempted: {_shorten(event.get('message', ''))}"
    return DELETED


def describe_last(events: Sequence[Mapping[str, Any]]) -> str:
    """What Kubernetes did last for a pod whose container is made: it pulls an image, or waits for a volume."""
    known = [event for event in events if event.get("message") and event.get("reason") in STEPS]
    newest = max(known, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)
    told = newest is not None and STEPS[newest["reason"]]
    return f"{_shorten(newest['message'])} ({newest['reason']})" if newest is not None and told else ""


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
