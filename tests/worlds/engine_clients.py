"""Fixtures for tests of submitted jobs: `engine` is each engine in turn, on which `client` submits."""

import shutil
import tempfile
from pathlib import Path

import pytest

from worlds import podman as podmen
from worlds import ray as rays
from worlds import slurm as slurms
from worlds.clusters import Client
from worlds.kubernetes import cluster as kubernetes_clusters
from worlds.waiting import until

__all__ = ["client", "engine", "hosts_client", "kubernetes", "kubernetes_client", "on_each_engine", "podman_client",
           "ray", "ray_client", "slurm", "slurm_client"]  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if lack := slurms.find_lack():
        pytest.skip(f"no Slurm here: {lack}")
    cluster = slurms.Slurm(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def ray():
    if lack := rays.find_lack():
        pytest.skip(f"no Ray here: {lack}")
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # the paths of its sockets have to be short
    cluster = rays.RayCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def client(tmp_path):
    made = Client(tmp_path)
    yield made
    made.close()


@pytest.fixture
def slurm_client(client, slurm):
    client.env |= slurm.env
    yield client
    slurm.call("scancel", "--signal=KILL", "--batch", "--user=root")
    slurm.call("scancel", "--user=root")
    until(lambda: slurm.count_idle() == 2, lambda: slurm.call("sinfo") + slurm.call("squeue"))


@pytest.fixture
def podman_client(client):
    if lack := podmen.find_lack():
        pytest.skip(f"no podman here: {lack}")
    config = client.folder / "containers.conf"
    config.write_text(podmen.CONFIG)
    client.env["CONTAINERS_CONF"] = str(config)
    return client


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory):
    if lack := kubernetes_clusters.find_lack():
        pytest.skip(f"no Kubernetes here: {lack}")
    made = kubernetes_clusters.Kubernetes(tmp_path_factory.mktemp("kubernetes"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def kubernetes_client(client, kubernetes):
    client.env["KUBECONFIG"] = str(kubernetes.kubeconfig)
    yield client
    kubernetes.remove_pods()


@pytest.fixture
def hosts_client(client):
    """Two hosts of two cores lend them to the client's store."""
    client.lend("a", cores=2)
    client.lend("b", cores=2)
    return client


@pytest.fixture
def ray_client(client, ray):
    client.env |= ray.env
    return client


def on_each_engine(*often: str) -> pytest.MarkDecorator:
    """For tests of `engine`: `often` in `make test-jobs`, all of them in `make test-engines`."""
    names = ("local", "hosts", "podman", "ray", "slurm", "kubernetes")
    marked = [name if name in often else pytest.param(name, marks=pytest.mark.engines) for name in names]
    return pytest.mark.parametrize("engine", marked, indirect=True)


@pytest.fixture(
    params=["local", "hosts", "podman", "ray", "slurm", pytest.param("kubernetes", marks=pytest.mark.engines)]
)
def engine(request, client):
    """The name of an engine, on which `client` submits."""
    if request.param != "local":
        request.getfixturevalue(f"{request.param}_client")
    return request.param
