"""A submission as a pod. Pure.

The pod is bare: no controller, and `restartPolicy: Never`. What a job's folder needs of the cluster is a claim or a
path of its nodes. A pod that loses its node is given up after five seconds, not after Kubernetes' five minutes.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trueline.engine.cluster.contract import Submission, job_of, role_of
from trueline.engine.cluster.kubernetes.access import POD, POD_UID
from trueline.engine.cluster.settings import KubernetesSettings
from trueline.errors import UsageError

CONTAINER = "trueline"
MANAGED, LAUNCH, ROLE = "app.kubernetes.io/managed-by", "trueline/launch", "trueline/role"
"""Labels of a pod."""
NAME, CANCELLED = "trueline/name", "trueline/cancelled"
"""Annotations: the name of its submission, and when it was cancelled with notice."""
QUEUE = "kueue.x-k8s.io/queue-name"
NOTICE_S = 30
"""Seconds between SIGTERM and SIGKILL, for a checkpoint."""
LOST_S = 5
LONGEST = 63
"""Of a label's value."""


def make_pod_name(name: str) -> str:
    """A pod's name has lower-case letters, digits, dots and hyphens alone; what has to be changed gets a digest.

    >>> make_pod_name("digits-1-3f09c2.1.host-2"), make_pod_name("My_job-1.1.head")
    ('digits-1-3f09c2.1.host-2', 'my-job-1.1.head-eab31e')
    """
    plain = ".".join(re.sub("[^a-z0-9-]+", "-", part).strip("-") or "x" for part in name.lower().split("."))
    return plain if plain == name and len(plain) <= 200 else f"{plain[:200].rstrip('.-')}-{_digest(name)}"


def make_label(text: str) -> str:
    """
    >>> make_label("digits-1-3f09c2.1")
    'digits-1-3f09c2.1'
    """
    if len(text) <= LONGEST and re.fullmatch("[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", text):
        return text
    plain = re.sub("[^A-Za-z0-9-]+", "-", text).strip("-")[: LONGEST - 9]
    return f"x{plain.rstrip('-')}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def make_pod(submission: Submission, settings: KubernetesSettings, owner: Mapping[str, str] | None) -> dict[str, Any]:
    """`owner`: name and uid of the pod that submits it; Kubernetes removes it after that one is removed."""
    mounts = _list_mounts(settings)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": make_pod_name(submission.name),
            "labels": {
                MANAGED: "trueline",
                LAUNCH: make_label(job_of(submission.name)),
                ROLE: role_of(submission.name),
                **({QUEUE: settings.queue} if settings.queue else {}),
                **settings.labels,
            },
            "annotations": {NAME: submission.name},
            "ownerReferences": make_owners(owner),
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": NOTICE_S,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,  # the sandbox reaps what a worker's death leaves behind
            "tolerations": [*map(dict, settings.tolerations), *_leave_lost_nodes()],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *(volume for volume, _ in mounts)],
            "containers": [_make_container(submission, settings, [mount for _, mount in mounts])],
            **_choose_place(settings),
        },
    }


def make_owners(owner: Mapping[str, str] | None) -> list[dict[str, str]]:
    return [{"apiVersion": "v1", "kind": "Pod", **owner}] if owner else []


def _leave_lost_nodes() -> list[dict[str, Any]]:
    return [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_S}
        for what in ("not-ready", "unreachable")
    ]


def _choose_place(settings: KubernetesSettings) -> dict[str, Any]:
    given = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "schedulerName": settings.scheduler,
        "nodeSelector": dict(settings.node_selector),
        "imagePullSecrets": [{"name": name} for name in settings.pull_secrets],
        "securityContext": {
            name: number for name, number in (("runAsUser", settings.user), ("fsGroup", settings.group)) if number
        },
    }
    return {name: value for name, value in given.items() if value}


def _make_container(
    submission: Submission, settings: KubernetesSettings, mounts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    memory = {"memory": f"{submission.memory_mb}Mi"} if submission.memory_mb else {}
    env = {name: os.environ[name] for name in settings.env if name in os.environ} | submission.env
    return {
        "name": CONTAINER,
        "image": settings.image,
        **({"imagePullPolicy": settings.pull} if settings.pull else {}),
        "command": [escape(word) for word in submission.command],
        "env": [
            *({"name": name, "value": escape(value)} for name, value in env.items()),
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in ((POD, "metadata.name"), (POD_UID, "metadata.uid"))
            ),
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
        "resources": {
            "requests": {"cpu": str(submission.slots), **memory, **settings.resources},
            "limits": {**memory, **settings.resources},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *mounts],
        "securityContext": {"allowPrivilegeEscalation": False},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def escape(text: str) -> str:
    """Kubernetes replaces $(NAME) in commands and values.

    >>> escape("$(HOME) $x")
    '$$(HOME) $$x'
    """
    return text.replace("$", "$$")


def _list_mounts(settings: KubernetesSettings) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Volumes with where they are in the container. Raises UsageError."""
    found = []
    for number, (what, text) in enumerate(
        [*(("claim", one) for one in settings.claims), *(("mount", one) for one in settings.mounts)]
    ):
        source, there, read_only = split_mount(text, needs_place=what == "claim")
        kind = {"persistentVolumeClaim": {"claimName": source}} if what == "claim" else {"hostPath": {"path": source}}
        name = f"{what}-{number}"
        found.append((
            {"name": name, **kind},
            {"name": name, "mountPath": there, **({"readOnly": True} if read_only else {})},
        ))  # fmt: skip
    return found


def split_mount(text: str, *, needs_place: bool = False) -> tuple[str, str, bool]:
    """SOURCE[:THERE][:ro] as source, place and whether it is read only. Raises UsageError.

    >>> split_mount("/data:/digits:ro"), split_mount("/data")
    (('/data', '/digits', True), ('/data', '/data', False))
    """
    source, *more = text.split(":")
    read_only = more[-1:] == ["ro"]
    there = more[: len(more) - read_only]
    if not source or len(there) > 1 or (needs_place and not there) or not (there or [source])[0].startswith("/"):
        form = "CLAIM:FOLDER[:ro]" if needs_place else "FOLDER[:THERE][:ro]"
        raise UsageError(f"[engine.kubernetes] mounts '{text}', expected {form}, with the folder from /")
    return source, (there or [source])[0], read_only


def find_unmounted(command: Sequence[str], settings: KubernetesSettings) -> str:
    """A folder of this machine that the command names and that the pod would not have; empty: there is none."""
    places = [split_mount(text)[1].rstrip("/") for text in (*settings.claims, *settings.mounts)]
    for word in command[1:]:
        if word.startswith("/") and os.path.isdir(word) and not any(f"{word}/".startswith(f"{at}/") for at in places):
            return word
    return ""
