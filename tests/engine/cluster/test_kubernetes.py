"""Kubernetes: the shared suite on a real one with two nodes, which `make kubernetes` builds."""

import sys
from pathlib import Path

import psutil
import pytest

from conformance.scheduler import *  # noqa: F403 - the shared suite
from conformance.scheduler import ENDED, POLITE, QUEUED, RUNNING, STUBBORN, Scheduled
from conformance.scheduler_logs import *  # noqa: F403
from conformance.scheduler_queue import *  # noqa: F403
from trueline.engine.cluster.kubernetes.access import POD
from trueline.engine.cluster.kubernetes.scheduler import KubernetesScheduler
from trueline.engine.cluster.settings import KubernetesSettings
from trueline.errors import EngineAway, UsageError
from worlds.kubernetes.cluster import SPACE, STRANGER, Kubernetes, find_lack
from worlds.kubernetes.images import HOST, list_mounts
from worlds.waiting import until, until_ended

pytestmark = [pytest.mark.slow, pytest.mark.engines]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if lack := find_lack():
        pytest.skip(f"no Kubernetes here: {lack}")
    made = Kubernetes(tmp_path_factory.mktemp("kubernetes"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def make_settings(cluster, folder: Path, **more) -> KubernetesSettings:
    known = {"image": HOST, "pull": "Never", "kubeconfig": str(cluster.kubeconfig), "python": sys.executable}
    return KubernetesSettings(**known | {"mounts": list_mounts(folder)} | more)


@pytest.fixture
def settings(cluster, tmp_path, monkeypatch):
    monkeypatch.delenv(POD, raising=False)
    return make_settings(cluster, tmp_path, node_selector={"trueline.test/node": "n1"})


@pytest.fixture
def other_client(settings):
    return KubernetesScheduler(settings)


_number = 0


@pytest.fixture
def scheduled(settings, tmp_path, cluster):
    global _number  # events tell of pods that are gone
    _number += 1
    cores = str(cluster.count_cores())
    yield Scheduled(KubernetesScheduler(settings), tmp_path, job=f"suite{_number}-1", waits_for=cores)
    cluster.remove_pods()


@pytest.mark.parametrize(
    ("more", "words"), [({"memory_mb": 10_000_000}, "Insufficient memory"), ({"slots": 1000}, "Insufficient cpu")]
)
def test_why_a_pod_waits_is_told(scheduled, more, words):
    name = scheduled.submit("head", "true", **more)
    found = until(lambda: words in (one := scheduled.find(name)).reason and one, lambda: scheduled.find(name))
    assert (found.state, found.reason.partition(":")[0]) == (QUEUED, "it waits for free cores or memory")
    scheduled.scheduler.cancel(name)
    assert scheduled.wait(name, ENDED).reason == "cancelled while it waited"


def test_an_image_that_cannot_be_pulled_is_told_and_the_log_is_empty(cluster, tmp_path):
    settings = make_settings(cluster, tmp_path, image="127.0.0.1:1/no/such:1", pull="IfNotPresent")
    world = Scheduled(KubernetesScheduler(settings), tmp_path, job="pulls-1")
    name = world.submit("head", "true")
    found = until(lambda: (one := world.find(name)) and "cannot be pulled" in one.reason and one,
                  lambda: world.find(name))  # fmt: skip
    assert found.state is QUEUED
    assert "no/such:1" in found.reason
    assert world.scheduler.read_log(name) == b""
    world.scheduler.cancel(name)
    cluster.remove_pods()


def test_rights_that_forbid_pods_and_a_namespace_or_account_that_is_not_there_are_named(cluster, tmp_path):
    stranger = cluster.write_kubeconfig("other.conf", STRANGER)
    for more, words in (
        ({"kubeconfig": str(stranger)}, 'User "stranger" cannot list resource "pods"'),
        ({"kubeconfig": str(cluster.write_kubeconfig("unknown.conf", "nobody"))}, "it does not know your credentials"),
        ({"namespace": "elsewhere"}, 'namespaces "elsewhere" not found'),
        ({"service_account": "nobody"}, 'serviceaccount "nobody" not found'),
        ({"priority_class": "urgent"}, "no PriorityClass with name urgent was found"),
        ({"resources": {"Bad Name": "1"}}, "Invalid value"),
    ):
        world = Scheduled(KubernetesScheduler(make_settings(cluster, tmp_path, **more)), tmp_path, job="refused-1")
        with pytest.raises(UsageError, match="Kubernetes refuses it") as refused:
            world.submit("head", "true")
        assert words in refused.value.message
    assert not cluster.read(f"api/v1/namespaces/{SPACE}/pods")["items"]


def test_a_quota_that_is_full_is_told(cluster, scheduled):
    cluster.make(SPACE, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"},
                         "spec": {"hard": {"requests.cpu": "1"}}}, "resourcequotas")  # fmt: skip
    try:

        def refused() -> str:
            try:
                scheduled.scheduler.cancel(scheduled.submit("head", POLITE, slots=2))
            except UsageError as error:
                return error.message
            return ""

        assert "exceeded quota: small, requested: requests.cpu=2" in until(refused, "a refusal")
    finally:
        cluster.call("DELETE", f"api/v1/namespaces/{SPACE}/resourcequotas/small")


def test_a_pod_that_is_deleted_behind_our_back_is_told_also_to_another_client(scheduled, other_client, cluster):
    name = scheduled.submit("head", POLITE)
    scheduled.wait_ready(name)
    cluster.call("DELETE", f"api/v1/namespaces/{SPACE}/pods/{name}")
    for client in (scheduled.scheduler, other_client):

        def find(client=client):
            return next((one for one in client.list(f"{scheduled.job}.1") if one.state is ENDED), None)

        found = until(find, lambda: scheduled.find(name))
        assert found.reason == "its pod was deleted (kubectl delete, or its node was drained)"


def test_an_api_server_that_is_away_is_no_refusal_and_what_runs_continues(scheduled, cluster):
    name = scheduled.submit("head", f"echo ready; until test -e {scheduled.folder}/go; do sleep 0.05; done; echo done")
    scheduled.wait_ready(name)
    cluster.stop_api()
    try:
        with pytest.raises(EngineAway, match="API server"):
            scheduled.scheduler.list(f"{scheduled.job}.1")
        with pytest.raises(EngineAway):
            scheduled.submit("host-1", "true")
        (scheduled.folder / "go").touch()
    finally:
        cluster.start_api()
        until(cluster.answers, cluster.read_logs)
    assert scheduled.wait(name, ENDED).code == 0
    assert scheduled.scheduler.read_log(name) == b"ready\ndone\n"


def test_what_takes_more_memory_than_it_asked_for_is_told(scheduled):
    name = scheduled.submit("head", "head -c 200m /dev/zero | tail", memory_mb=50)
    found = scheduled.wait(name, ENDED)
    assert "memory" in found.reason, found


def test_the_last_line_of_what_fails_is_the_reason(scheduled):
    found = scheduled.wait(scheduled.submit("head", "echo started; echo no such module >&2; exit 3"), ENDED)
    assert (found.code, found.reason) == (3, "exit code 3: no such module")


def test_a_cancel_without_grace_ends_the_process_itself(scheduled):
    mark = f"{scheduled.folder}/mark"
    name = scheduled.submit("head", f": {mark}; {STUBBORN}")
    scheduled.wait_ready(name)
    pids = [one.pid for one in psutil.process_iter(["cmdline"]) if mark in " ".join(one.info["cmdline"] or ())]
    assert pids
    scheduled.scheduler.cancel(name, grace=False)
    until_ended(pids)


def test_a_node_that_dies_leaves_a_pod_that_no_one_starts_again_and_that_ends(scheduled, cluster, tmp_path):
    world = Scheduled(KubernetesScheduler(make_settings(
        cluster, tmp_path, node_selector={"trueline.test/node": "n2"})), tmp_path, job="lost-1")  # fmt: skip
    name = world.submit("head", POLITE)
    world.wait_ready(name)
    assert world.find(name).node == "n2"
    cluster.nodes["n2"].kill()
    found = world.wait(name, ENDED)
    assert "node" in found.reason
    assert found.state is not RUNNING
    cluster.nodes["n2"].restart()
    cluster.wait_ready("n2")
