"""The scheduler of a Kubernetes cluster: pods of one namespace, by their labels.

A pod that is cancelled with notice gets a deadline that is over (`activeDeadlineSeconds`), so that its log and its end
stay readable; one that is killed, or that has not started, is deleted. Kubernetes removes the hosts of a head after the
head's pod. Where a host leads in the head's place, it takes the others over (`_adopt`), since that pod may go with its
node. Needs create, get, list, patch and delete of pods, get of pods/log, and list of events for better words.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from trueline.engine.cluster.contract import Submission, SubmissionReport, SubmissionState, job_of, role_of
from trueline.engine.cluster.kubernetes.access import POD, POD_UID, find_access
from trueline.engine.cluster.kubernetes.api import KubeApi, KubeRefusal
from trueline.engine.cluster.kubernetes.pods import (
    CANCELLED,
    CONTAINER,
    LAUNCH,
    MANAGED,
    ROLE,
    find_unmounted,
    make_label,
    make_owners,
    make_pod,
    make_pod_name,
)
from trueline.engine.cluster.kubernetes.words import describe_gone, describe_last, describe_pod, find_end
from trueline.engine.cluster.settings import KubernetesSettings
from trueline.errors import EngineAway, UsageError

HEAD = "head"
KEPT_S = 86_400.0
"""How long the pods of an ended launch stay."""


class KubernetesScheduler:
    """`transport` is for tests."""

    def __init__(self, settings: KubernetesSettings, transport: httpx.BaseTransport | None = None) -> None:
        if not settings.image:
            raise UsageError(
                "Kubernetes needs an image with Python and Trueline",
                hint="set image in [engine.kubernetes] of trueline.toml",
            )
        self._settings, self._transport = settings, transport
        self._opened: KubeApi | None = None
        self._namespace = settings.namespace
        self._seen: dict[str, str] = {}
        """Submissions that were listed or submitted, with why they are gone if that is known."""
        self._logs: dict[str, bytes] = {}
        """What was written by the pods that this process has deleted."""
        uid = os.environ.get(POD_UID, "")
        self._own = {"name": os.environ.get(POD, ""), "uid": uid} if uid else None

    @property
    def _api(self) -> KubeApi:
        if self._opened is None:
            access = find_access(self._settings.kubeconfig, self._settings.context)
            self._namespace = self._namespace or access.namespace
            self._opened = KubeApi(access, self._transport)
        return self._opened

    def submit(self, submission: Submission) -> str:
        if self._seen.get(submission.name):  # it is gone: to Kubernetes its name is free again
            return make_pod_name(submission.name)
        if self._own is None and (folder := find_unmounted(submission.command, self._settings)):
            raise UsageError(
                f"pods do not have {folder}, which the job needs",
                hint="name it in claims or mounts of [engine.kubernetes], or use a store like s3://bucket/jobs",
            )
        leads = role_of(submission.name) == HEAD  # the next launch of a head that gives way outlives its pod
        pod = make_pod(submission, self._settings, None if leads else self._own)
        if leads and self._own is None:
            self._sweep()  # which also finds now that the rights to see the job are missing
        try:
            self._call("POST", "pods", body=pod)
        except KubeRefusal as refusal:
            if refusal.reason != "AlreadyExists":
                raise
        self._seen.setdefault(submission.name, "")
        return str(pod["metadata"]["name"])

    def cancel(self, name: str, *, grace: bool = True) -> None:
        pod = self._read(name)
        if pod is None:
            return
        found = describe_pod(pod, time.time())
        if found.state is SubmissionState.ENDED and "deletionTimestamp" not in pod["metadata"]:
            return
        if grace and found.state is SubmissionState.RUNNING:
            over = {
                "metadata": {"annotations": {CANCELLED: str(int(time.time()))}},
                "spec": {"activeDeadlineSeconds": 1},
            }
            self._call("PATCH", f"pods/{make_pod_name(name)}", body=over, patch=True)
            return
        with suppress(EngineAway):  # its node may be dead
            self._logs[name] = self.read_log(name)
        self._seen[name] = "it was cancelled" if found.state is SubmissionState.RUNNING else "cancelled while it waited"
        self._delete(make_pod_name(name))

    def list(self, job: str) -> Sequence[SubmissionReport]:
        pods, now = self._list_pods(job), time.time()
        found = {(report := describe_pod(pod, now)).name: (pod, report) for pod in pods}
        reports = [self._explain(pod, report) for pod, report in found.values()]
        self._seen.update({name: self._seen.get(name, "") for name in found})
        if self._own is not None:
            self._adopt(pods)
        known = {name for name in self._seen if job_of(name) == job} | {f"{job}.{HEAD}"}
        return [*reports, *(gone for name in sorted(known - {*found}) if (gone := self._describe_gone(name)))]

    def read_log(self, name: str) -> bytes:
        try:
            return self._call("GET", f"pods/{make_pod_name(name)}/log", container=CONTAINER)
        except KubeRefusal as refusal:
            if refusal.status in (400, 404):  # no container yet; no such pod
                return self._logs.get(name, b"")
            raise

    def _call(self, method: str, what: str, **more: Any) -> bytes:
        api = self._api  # which knows the namespace
        return api.call(method, f"/api/v1/namespaces/{self._namespace}/{what}", **more)

    def _list_pods(self, job: str) -> Sequence[dict[str, Any]]:
        answer = self._call("GET", "pods", labelSelector=f"{MANAGED}=trueline,{LAUNCH}={make_label(job)}")
        pods: Sequence[dict[str, Any]] = json.loads(answer)["items"]
        return pods

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._call("GET", f"pods/{make_pod_name(name)}"))
        except KubeRefusal as refusal:
            if refusal.status == 404:
                return None
            raise
        return found

    def _delete(self, pod: str) -> None:
        try:
            self._call("DELETE", f"pods/{pod}", gracePeriodSeconds=0)
        except KubeRefusal as refusal:
            if refusal.status != 404:
                raise

    def _list_events(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Of a pod; none where the account may not read them."""
        chosen = f"involvedObject.kind=Pod,involvedObject.name={make_pod_name(name)}"
        with suppress(KubeRefusal):
            events: Sequence[Mapping[str, Any]] = json.loads(self._call("GET", "events", fieldSelector=chosen))["items"]
            return events
        return ()

    def _explain(self, pod: Mapping[str, Any], report: SubmissionReport) -> SubmissionReport:
        """While a container is made, the pod's events alone say what takes the time."""
        made = report.state is SubmissionState.QUEUED and report.reason.startswith("its container is made")
        last = describe_last(self._list_events(report.name)) if made else ""
        if not last:
            return report
        return SubmissionReport(
            name=report.name, state=report.state, reason=f"{report.reason}: {last}", node=report.node
        )

    def _describe_gone(self, name: str) -> SubmissionReport | None:
        """The end of a submission that has no pod; None: there never was one, as far as is known."""
        reason = self._seen.get(name, "")
        if not reason:
            events = self._list_events(name)
            if not events and name not in self._seen:
                return None
            reason = self._seen[name] = describe_gone(events)
        return SubmissionReport(name=name, state=SubmissionState.ENDED, reason=reason)

    def _adopt(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the pods of a leader before this one."""
        assert self._own is not None
        for pod in pods:
            meta = pod["metadata"]
            owners = [one["uid"] for one in meta.get("ownerReferences", ())]
            own = meta["uid"] == self._own["uid"]
            if meta["labels"][ROLE] == HEAD or owners == ([] if own else [self._own["uid"]]):
                continue
            body = {"metadata": {"ownerReferences": None if own else make_owners(self._own)}}
            with suppress(KubeRefusal):  # it went meanwhile
                self._call("PATCH", f"pods/{meta['name']}", body=body, patch=True)

    def _sweep(self) -> None:
        """Removes heads that ended long ago, and with them their hosts."""
        chosen = f"{MANAGED}=trueline,{ROLE}={HEAD}"
        for pod in json.loads(self._call("GET", "pods", labelSelector=chosen))["items"]:
            ended_at = find_end(pod)
            if ended_at and time.time() - ended_at > KEPT_S:
                with suppress(KubeRefusal):
                    self._delete(pod["metadata"]["name"])
