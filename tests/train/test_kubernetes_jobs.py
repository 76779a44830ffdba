"""Submitted jobs on a real Kubernetes while that is struck: pods deleted, a node dead, the API server away."""

import re
import time

import pytest

from worlds.clusters import Client
from worlds.kubernetes.cluster import SPACE, Kubernetes, find_lack
from worlds.waiting import until

pytestmark = pytest.mark.engines


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


@pytest.fixture
def client(cluster, tmp_path):
    made = Client(tmp_path, **cluster.env)
    yield made
    cluster.remove_pods()
    made.close()


def delete_pod(cluster, name: str) -> None:
    answer = cluster.call("DELETE", f"api/v1/namespaces/{SPACE}/pods/{name}")
    assert answer.is_success, answer.text


def list_pods(cluster) -> dict[str, dict]:
    return {one["metadata"]["name"]: one for one in cluster.read(f"api/v1/namespaces/{SPACE}/pods")["items"]}


def test_what_kubectl_deletes_leaves_between_two_steps(client, cluster):
    client.submit("kubernetes", "--workers", "1:2")
    client.wait_workers(2)
    head, host = f"{client.unique}.1.head", f"{client.unique}.1.host-1"
    pods = list_pods(cluster)
    assert pods[host]["metadata"]["ownerReferences"][0]["uid"] == pods[head]["metadata"]["uid"]
    at = time.time()
    delete_pod(cluster, host)
    client.wait("host.leaving", after=at)
    client.wait_workers(2, after=client.wait("host.joined", after=at, host="host-2"))
    delete_pod(cluster, head)
    end = client.wait_end()
    assert (end.outcome, end.why) == ("stopped", "the launcher got SIGTERM")
    assert client.count() == (end.step, 0, 0)
    until(lambda: not list_pods(cluster), lambda: f"Kubernetes removes the hosts of a head: {[*list_pods(cluster)]}")
    until(lambda: not client.processes(), "the end of all processes")


def test_a_head_that_is_deleted_without_notice_leaves_a_dead_job_that_resume_continues(client, cluster):
    job = client.submit("kubernetes", "--workers", "1:1")
    client.wait("checkpoint.saved")
    answer = cluster.call(
        "DELETE", f"api/v1/namespaces/{SPACE}/pods/{client.unique}.1.head", params={"gracePeriodSeconds": 0}
    )
    assert answer.is_success
    client.kill("head")
    facts = until(lambda: (one := client.read())["state"] == "dead" and one, lambda: client.read())
    assert "its head has ended: its pod was deleted (kubectl delete, or its node was drained)" in facts["why"]
    at = time.time()
    client.run("resume", job)
    client.wait_workers(1, after=at)
    client.run("halt", job)
    assert client.count()[1:] == (0, 0)


def test_training_continues_while_the_api_server_is_away_and_a_lost_host_is_replaced_after(client, cluster):
    client.submit("kubernetes", "--workers", "1:2")
    client.wait_workers(2)
    cluster.stop_api()
    try:
        at = time.time()
        client.kill("host-1")
        client.wait_workers(1, after=at)
        client.wait("duties.delayed", after=at)
        assert client.read()["state"] == "running"
        shown = client.run("submit", "tiny", "--on", "kubernetes", "--store", str(client.store), code=1)
        assert "API server" in shown
    finally:
        cluster.start_api()
        until(cluster.answers, cluster.read_logs)
    client.wait_workers(2, after=client.wait("host.joined", after=at, host="host-2"))
    client.run("halt", client.job)
    assert client.count()[1:] == (0, 0)


def test_a_node_that_dies_is_replaced_before_kubernetes_knows_and_a_host_leads_when_it_had_the_head(client, cluster):
    """The node's pods stay listed; those of the hosts belong to the new leader's, and stay when the head's goes."""
    client.submit("kubernetes", "--workers", "1:3")
    client.wait_workers(3)
    head = f"{client.unique}.1.head"
    node = cluster.find_node(head)
    at = time.time()
    cluster.nodes[node].kill()
    client.wait("step.applied", after=at)
    leader = until(lambda: (one := client.where.read_status(1)) and one.leader != "head" and one.leader,
                   lambda: client.logs())  # fmt: skip
    pods = until(
        lambda: (
            (found := list_pods(cluster))
            and all(
                [own["name"] for own in pod["metadata"].get("ownerReferences", ())] == [f"{client.unique}.1.{leader}"]
                for name, pod in found.items()
                if name not in (head, f"{client.unique}.1.{leader}")
            )
            and found
        ),
        lambda: {name: pod["metadata"].get("ownerReferences") for name, pod in list_pods(cluster).items()},
    )
    assert not pods[f"{client.unique}.1.{leader}"]["metadata"].get("ownerReferences")
    cluster.call("DELETE", f"api/v1/namespaces/{SPACE}/pods/{head}", params={"gracePeriodSeconds": 0})
    cluster.nodes[node].restart()
    cluster.wait_ready(node)
    client.wait_workers(3, after=time.time())
    client.run("halt", client.job)
    assert client.count()[1:] == (0, 0)


def test_why_a_job_waits_is_shown_and_halt_withdraws_it(client, cluster):
    toml = client.folder / "trueline.toml"
    toml.write_text(toml.read_text().replace('pull = "Never"', 'pull = "Never"\nmemory_mb = 10000000'))
    job = client.submit("kubernetes", "--workers", "1:1")
    facts = until(lambda: "memory" in (one := client.read())["why"] and one, lambda: client.read())
    assert facts["state"] == "queued"
    assert re.search(r"0/2 nodes are available: 2 Insufficient memory", facts["why"])
    assert "is queued: it waits for free cores or memory" in client.run("logs", job)
    assert "halted while it waited" in client.run("halt", job)
    assert not list_pods(cluster)


def test_an_account_without_the_role_is_told_in_the_log_and_the_job_trains_with_what_it_has(client, cluster):
    toml = client.folder / "trueline.toml"
    toml.write_text(toml.read_text().replace('service_account = "trueline"', 'service_account = "default"'))
    job = client.submit("kubernetes", "--workers", "1:2")
    client.wait("duties.delayed")
    assert client.run("logs", job, "--worker", "head") == ""
    client.wait_workers(1)
    shown = client.run("logs", job)
    assert re.search(r'User "system:serviceaccount:jobs:default" cannot \w+ resource "pods"', shown)
    client.run("halt", job)
