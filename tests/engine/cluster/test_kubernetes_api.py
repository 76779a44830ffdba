"""The Kubernetes scheduler makes pods, puts their status into words, and names what the API server refuses."""

import base64
import json
import ssl
import sys
import time

import pytest

from trueline.engine.cluster.contract import Submission, SubmissionState
from trueline.engine.cluster.kubernetes import access
from trueline.engine.cluster.kubernetes.pods import make_label, make_pod, make_pod_name, split_mount
from trueline.engine.cluster.kubernetes.scheduler import KubernetesScheduler
from trueline.engine.cluster.kubernetes.words import describe_pod
from trueline.engine.cluster.settings import KubernetesSettings, parse_engine
from trueline.errors import EngineAway, UsageError
from worlds.certificates import Authority
from worlds.kubernetes.fake import FakeApi

QUEUED, RUNNING, ENDED = SubmissionState.QUEUED, SubmissionState.RUNNING, SubmissionState.ENDED
NOW = 1_800_000_000.0
HEAD, HOST = "a-1.1.head", "a-1.1.host-1"


def submission(name: str = HEAD, **more) -> Submission:
    return Submission(name=name, command=("python3", "-m", "x", "s3://b/a-1", "1"), log="/l", **more)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A kubeconfig, which KUBECONFIG names."""
    path = tmp_path / "config"
    path.write_text(json.dumps({
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "jobs"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443"}}],
        "users": [{"name": "u", "user": {"token": "t-1"}}],
    }))  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv(access.POD, raising=False)
    monkeypatch.delenv(access.POD_UID, raising=False)
    return path


@pytest.fixture
def api(config):
    return FakeApi()


def open_scheduler(api, **settings) -> KubernetesScheduler:
    return KubernetesScheduler(KubernetesSettings(image="i:1", **settings), api.transport)


def edit(config, **user) -> None:
    known = json.loads(config.read_text())
    known["users"][0]["user"] = user
    config.write_text(json.dumps(known))


def pod_of(phase: str, **status) -> dict:
    return {
        "metadata": {"annotations": {"trueline/name": HEAD}, "labels": {}, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "n1"} if phase != "Pending" else {},
        "status": {"phase": phase, **status},
    }


def container(**state) -> list[dict]:
    return [{"name": "trueline", "state": state}]


def test_nothing_starts_a_pod_again_and_a_lost_node_is_left_after_five_seconds():
    spec = make_pod(submission(slots=4, memory_mb=100), KubernetesSettings(image="i:1"), None)["spec"]
    assert spec["restartPolicy"] == "Never"
    assert {one["key"]: one["tolerationSeconds"] for one in spec["tolerations"]} == {
        "node.kubernetes.io/not-ready": 5, "node.kubernetes.io/unreachable": 5,
    }  # fmt: skip
    (made,) = spec["containers"]
    assert made["resources"] == {"requests": {"cpu": "4", "memory": "100Mi"}, "limits": {"memory": "100Mi"}}


def test_settings_of_the_cluster_are_in_the_pod(monkeypatch):
    monkeypatch.setenv("WORD", "$(HOME)")
    settings = parse_engine("kubernetes:gpu", {"kubernetes": {
        "image": "i:1", "service_account": "trueline", "node_selector": {"disk": "ssd"}, "env": ["WORD", "ABSENT"],
        "gpu": {
            "resources": {"nvidia.com/gpu": "1"}, "priority_class": "high", "queue": "q", "claims": ["jobs:/jobs"],
            "tolerations": [{"key": "gpu", "operator": "Exists"}], "mounts": ["/x:/y:ro"],
            "secrets": ["s3"], "pull_secrets": ["registry"], "labels": {"team": "a"},
        },
    }})  # fmt: skip
    pod = make_pod(submission(), settings, {"name": "head", "uid": "7"})
    spec, (made,) = pod["spec"], pod["spec"]["containers"]
    assert pod["metadata"]["labels"] | {"team": "a", "kueue.x-k8s.io/queue-name": "q"} == pod["metadata"]["labels"]
    assert pod["metadata"]["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "head", "uid": "7"}]
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("trueline", "high")
    assert (spec["nodeSelector"], spec["imagePullSecrets"]) == ({"disk": "ssd"}, [{"name": "registry"}])
    assert spec["tolerations"][0] == {"key": "gpu", "operator": "Exists"}
    assert made["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert made["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert made["env"][0] == {"name": "WORD", "value": "$$(HOME)"}
    assert [one["mountPath"] for one in made["volumeMounts"]] == ["/dev/shm", "/jobs", "/y"]
    assert [one.get("readOnly", False) for one in made["volumeMounts"]] == [False, False, True]


@pytest.mark.parametrize("text", ["claim", ":/x", "claim:x", "claim:/x:/y"])
def test_a_claim_without_a_folder_is_refused_by_its_form(text):
    with pytest.raises(UsageError, match="expected CLAIM:FOLDER"):
        split_mount(text, needs_place=True)


@pytest.mark.parametrize(
    "name", ["digits-1-3f09c2.1.head", "My_Job-1-3f09c2.1.host-2", "a..b-1.1.head", "x" * 300 + "-1.1.head"]
)
def test_every_job_has_names_that_kubernetes_takes_and_no_two_share_one(name):
    made = make_pod_name(name)
    assert len(made) <= 253
    assert all(part.strip("-") == part and part and part == part.lower() for part in made.split("."))
    assert len(make_label(name)) <= 63
    assert make_pod_name(name + "1") != made


@pytest.mark.parametrize(
    ("pod", "state", "reason"),
    [
        (pod_of("Pending"), QUEUED, "Kubernetes has not looked at it yet"),
        (pod_of("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                        "message": "0/2 nodes are available: 2 Insufficient memory."}]), QUEUED,
         "it waits for free cores or memory: 0/2 nodes are available: 2 Insufficient memory. (Unschedulable)"),
        (pod_of("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                        "message": "0/1 nodes are available: 1 node(s) had taint {gpu: }."}]), QUEUED,
         "no node is meant for it: 0/1 nodes are available: 1 node(s) had taint {gpu: }. (Unschedulable)"),
        (pod_of("Pending", containerStatuses=container(waiting={
            "reason": "ImagePullBackOff", "message": 'Back-off pulling image "no/such:1"'})), QUEUED,
         'its image cannot be pulled: Back-off pulling image "no/such:1" (ImagePullBackOff)'),
        (pod_of("Pending", containerStatuses=container(waiting={
            "reason": "CreateContainerConfigError", "message": 'secret "s3" not found'})), QUEUED,
         'its container cannot be made: secret "s3" not found (CreateContainerConfigError)'),
        (pod_of("Running", containerStatuses=container(running={})), RUNNING, ""),
        (pod_of("Unknown", containerStatuses=container(running={})), RUNNING, "its node does not answer"),
        (pod_of("Failed", reason="DeadlineExceeded", message="Pod was active",
                containerStatuses=container(terminated={"exitCode": 3})), ENDED, "it was cancelled"),
        (pod_of("Succeeded", containerStatuses=container(terminated={"exitCode": 0})), ENDED, "exit code 0"),
        (pod_of("Failed", containerStatuses=container(terminated={
            "exitCode": 1, "reason": "Error", "message": "Traceback\nNo module named trueline\n"})), ENDED,
         "exit code 1: No module named trueline"),
        (pod_of("Failed", containerStatuses=container(terminated={"exitCode": 137, "reason": "Error"})), ENDED,
         "killed by SIGKILL"),
        (pod_of("Failed", containerStatuses=container(terminated={"exitCode": 137, "reason": "OOMKilled"})), ENDED,
         "it took more memory than it asked for (OOMKilled)"),
        (pod_of("Failed", reason="Evicted", message="The node was low on resource: memory."), ENDED,
         "it was evicted: The node was low on resource: memory. (Evicted)"),
        (pod_of("Failed", reason="OutOfcpu", message="Pod Node didn't have enough resource: cpu"), ENDED,
         "its node had too few free cores: Pod Node didn't have enough resource: cpu (OutOfcpu)"),
        (pod_of("Failed"), ENDED, "its container was never started"),
    ],
)  # fmt: skip
def test_what_a_pod_says_becomes_words(pod, state, reason):
    found = describe_pod(pod, NOW)
    assert (found.state, found.reason) == (state, reason)


def test_a_pod_that_is_cancelled_runs_until_its_container_ends_or_its_notice_is_over():
    pod = pod_of("Failed", reason="DeadlineExceeded", containerStatuses=container(running={}))
    pod["metadata"]["annotations"]["trueline/cancelled"] = str(NOW)
    assert describe_pod(pod, NOW + 29).state is RUNNING
    assert describe_pod(pod, NOW + 31).state is ENDED  # as kubelets before 1.22 leave it
    pod["status"]["containerStatuses"] = container(terminated={"exitCode": 0})
    assert describe_pod(pod, NOW + 1).state is ENDED


def test_the_pod_of_a_dead_node_has_ended_once_the_time_for_its_deletion_is_over():
    pod = pod_of("Running", containerStatuses=container(running={}))
    pod["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"  # NOW
    assert describe_pod(pod, NOW + 1).state is RUNNING
    found = describe_pod(pod, NOW + 30)
    assert (found.state, found.reason) == (ENDED, "its node does not answer, and Kubernetes has given it up")


def test_a_pod_that_a_queue_holds_says_which():
    pod = pod_of("Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}])
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    assert describe_pod(pod, NOW).reason == "the queue team has not admitted it"


def test_a_pod_of_a_job_uses_its_account_whatever_kubeconfig_there_is(config, tmp_path, monkeypatch):
    monkeypatch.setenv(access.POD, HEAD)
    monkeypatch.setattr(access, "ACCOUNT", tmp_path / "account")
    with pytest.raises(EngineAway, match="this pod has no"):
        access.find_access()
    (tmp_path / "account").mkdir()
    authority = Authority(tmp_path)
    for name, data in (("token", b"t-2\n"), ("namespace", b"jobs"), ("ca.crt", authority.certificate.read_bytes())):
        (tmp_path / "account" / name).write_bytes(data)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = access.find_access()
    assert (found.server, found.namespace, found.read_token()) == ("https://[fd00::1]:443", "jobs", "t-2")
    (tmp_path / "account" / "token").write_text("t-3")  # Kubernetes exchanges it hourly
    assert found.read_token() == "t-3"


def test_submitting_asks_for_one_pod_by_the_token_of_the_kubeconfig(api):
    scheduler = open_scheduler(api)
    for _ in range(2):
        assert scheduler.submit(submission()) == HEAD
    assert [*api.pods] == [HEAD]
    assert {header["authorization"] for header in api.headers} == {"Bearer t-1"}


@pytest.mark.parametrize(
    ("status", "message", "hint"),
    [
        (403, 'pods is forbidden: User "ada" cannot create resource "pods" in API group ""', "guide of clusters"),
        (403, 'pods "a-1.1.head" is forbidden: exceeded quota: small, requested: cpu=1', "wait until other pods"),
        (
            403,
            'pods "a" is forbidden: error looking up service account jobs/x: serviceaccount "x" not found',
            "correct",
        ),
        (404, 'namespaces "jobs" not found', "correct"),
        (422, "Pod is invalid: spec.tolerations[0].operator: Unsupported value", "correct"),
        (401, "Unauthorized", "kubeconfig"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words_and_with_the_next_act(api, status, message, hint):
    api.refusals["POST pods"] = (status, "Forbidden", message)
    with pytest.raises(UsageError, match="Kubernetes refuses it") as refused:
        open_scheduler(api).submit(submission())
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert api.pods == {}


def test_rights_that_are_missing_to_see_a_job_are_told_before_it_is_submitted(api):
    api.refusals["GET pods"] = (403, "Forbidden", 'pods is forbidden: User "ada" cannot list resource "pods"')
    with pytest.raises(UsageError, match="cannot list"):
        open_scheduler(api).submit(submission())
    assert api.pods == {}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_or_away_is_no_refusal_and_loses_nothing(api, status):
    scheduler = open_scheduler(api)
    scheduler.submit(submission())
    api.away = True
    for call in (lambda: scheduler.list("a-1.1"), lambda: scheduler.submit(submission(HOST)),
                 lambda: scheduler.cancel(HEAD), lambda: scheduler.read_log(HEAD)):  # fmt: skip
        with pytest.raises(EngineAway, match="does not answer"):
            call()
    api.away = False
    api.refusals["GET pods"] = (status, "", "leader changed")
    with pytest.raises(EngineAway, match=f"answers {status}: leader changed"):
        scheduler.list("a-1.1")
    api.refusals.clear()
    assert [one.name for one in scheduler.list("a-1.1")] == [HEAD]


def test_a_pod_that_is_deleted_behind_our_back_has_ended_with_the_reason_of_its_events(api):
    scheduler = open_scheduler(api)
    scheduler.submit(submission())
    del api.pods[HEAD]
    (found,) = scheduler.list("a-1.1")
    assert (found.state, found.reason) == (ENDED, "its pod was deleted (kubectl delete, or its node was drained)")

    other = open_scheduler(api)  # which has never seen it
    assert other.list("a-1.1") == []
    api.events = [{"reason": "Preempted", "message": "Preempted by jobs/big on node n1"}]
    (found,) = other.list("a-1.1")
    assert (found.state, found.reason) == (ENDED, "it was preempted: Preempted by jobs/big on node n1")


def test_while_the_image_is_pulled_the_newest_event_says_so_and_the_log_is_empty(api):
    scheduler = open_scheduler(api)
    scheduler.submit(submission())
    api.pods[HEAD]["status"] = {"phase": "Pending", "containerStatuses": container(waiting={
        "reason": "ContainerCreating"})}  # fmt: skip
    api.events = [
        {"reason": "Pulling", "message": 'Pulling image "i:1"', "lastTimestamp": "2026-01-01T00:00:02Z"},
        {"reason": "Scheduled", "message": "assigned", "lastTimestamp": None, "eventTime": "2026-01-01T00:00:01Z"},
    ]
    (found,) = scheduler.list("a-1.1")
    assert found.reason == 'its container is made (ContainerCreating): Pulling image "i:1" (Pulling)'
    assert scheduler.read_log(HEAD) == b""
    api.refusals["GET events"] = (403, "Forbidden", "events is forbidden")
    assert scheduler.list("a-1.1")[0].reason == "its container is made (ContainerCreating)"


def test_a_cancel_with_notice_keeps_the_pod_and_one_without_deletes_it(api):
    scheduler = open_scheduler(api)
    for name in (HEAD, HOST):
        scheduler.submit(submission(name))
        api.pods[name]["status"] = {"phase": "Running", "containerStatuses": container(running={})}
    api.logs[HOST] = b"last words\n"
    scheduler.cancel(HEAD)
    assert api.pods[HEAD]["spec"]["activeDeadlineSeconds"] == 1
    scheduler.cancel(HOST, grace=False)
    assert [*api.pods] == [HEAD]
    ended = {one.name: one for one in scheduler.list("a-1.1")}[HOST]
    assert (ended.state, ended.reason) == (ENDED, "it was cancelled")
    assert scheduler.read_log(HOST) == b"last words\n"


def test_hosts_belong_to_the_pod_that_leads_also_after_another_one_leads(api, monkeypatch):
    open_scheduler(api).submit(submission())
    lead(api, monkeypatch, HEAD).submit(submission(HOST))
    lead(api, monkeypatch, HEAD).submit(submission("a-1.1.host-2"))
    assert api.pods[HOST]["metadata"]["ownerReferences"][0]["uid"] == f"uid-{HEAD}"
    lead(api, monkeypatch, HOST).list("a-1.1")
    assert "ownerReferences" not in api.pods[HOST]["metadata"]
    assert api.pods["a-1.1.host-2"]["metadata"]["ownerReferences"][0]["uid"] == f"uid-{HOST}"
    patches = sum(call[0] == "PATCH" for call in api.calls)
    lead(api, monkeypatch, HOST).list("a-1.1")
    assert sum(call[0] == "PATCH" for call in api.calls) == patches


def lead(api, monkeypatch, pod: str) -> KubernetesScheduler:
    """The scheduler as the process in a pod has it, but for its service account."""
    monkeypatch.setenv(access.POD_UID, f"uid-{pod}")
    monkeypatch.delenv(access.POD, raising=False)
    return open_scheduler(api)


def test_pods_of_launches_that_ended_long_ago_are_removed_when_a_job_is_submitted(api):
    scheduler = open_scheduler(api)
    for number, ends in enumerate(["2026-01-01T00:00:00Z", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())]):
        name = f"old{number}-1.1.head"
        scheduler.submit(submission(name))
        api.pods[name]["status"] = {"phase": "Failed", "containerStatuses": container(terminated={
            "exitCode": 1, "finishedAt": ends})}  # fmt: skip
    scheduler.submit(submission())
    assert [*api.pods] == ["old1-1.1.head", HEAD]


def test_a_store_that_pods_do_not_have_is_refused_with_the_settings_that_give_it(api, tmp_path):
    one = Submission(name=HEAD, command=("python3", "-m", "x", str(tmp_path)), log="/l")
    with pytest.raises(UsageError, match=f"pods do not have {tmp_path}"):
        open_scheduler(api).submit(one)
    open_scheduler(api, mounts=(str(tmp_path.parent),)).submit(one)
    assert [*api.pods] == [HEAD]


def test_without_an_image_or_a_kubeconfig_the_lack_is_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="Kubernetes needs an image"):
        KubernetesScheduler(KubernetesSettings())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no"))
    monkeypatch.delenv(access.POD, raising=False)
    with pytest.raises(EngineAway, match="there is no kubeconfig"):
        access.find_access()
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(EngineAway, match="there is no kubeconfig"):
        access.find_access()


def test_a_context_that_is_not_there_is_named_with_those_that_are(config):
    with pytest.raises(UsageError, match=r"no context 'prod' \(has: here\)"):
        access.find_access(context="prod")
    config.write_text("a: [")
    with pytest.raises(UsageError, match="cannot be used"):
        access.find_access()


def test_a_plugin_of_the_kubeconfig_gives_the_token_once_until_that_ends(config, tmp_path):
    counter = tmp_path / "count"
    code = (
        f"import os, json; open({str(counter)!r}, 'a').write('x');"
        "asked = json.loads(os.environ['KUBERNETES_EXEC_INFO']);"
        "print(json.dumps({'status': {'token': os.environ['WORD'] + asked['kind'],"
        " 'expirationTimestamp': '2100-01-01T00:00:00Z'}}))"
    )
    edit(config, exec={
        "apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", code],
        "env": [{"name": "WORD", "value": "t-"}],
    })  # fmt: skip
    found = access.find_access()
    assert [found.read_token(), found.read_token()] == ["t-ExecCredential"] * 2
    assert counter.read_text() == "x"
    edit(
        config, exec={"apiVersion": "v1", "command": sys.executable, "args": ["-c", "import sys; sys.exit('no login')"]}
    )
    with pytest.raises(EngineAway, match="no login"):
        access.find_access().read_token()


def test_certificates_of_the_kubeconfig_are_used(config, tmp_path):
    authority = Authority(tmp_path)
    own = authority.issue("ada")
    known = json.loads(config.read_text())
    known["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(
        authority.certificate.read_bytes()
    ).decode()
    config.write_text(json.dumps(known))
    edit(config, **{"client-certificate": own.certificate.name, "client-key": own.key.name})
    context = access.find_access().context
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert [dict(entry[0] for entry in one["subject"])["commonName"] for one in context.get_ca_certs()] == ["authority"]
