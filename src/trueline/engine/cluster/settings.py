"""What an engine needs to know, from `[engine.NAME]` of trueline.toml: partition, image, slots, ...

`--on slurm` reads `[engine.slurm]`; `--on slurm:staging` reads `[engine.slurm]` and over it `[engine.slurm.staging]`.
The settings travel with the job, so that its head can submit hosts and a later client can resume it.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from trueline.errors import UsageError, closest, join_names


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    slots: int = 1
    """Workers of the head and of each host, a core each."""
    memory_mb: int = 0
    """Reserved for the head and for each host; 0: the scheduler's default."""
    python: str = ""
    """Python there that has Trueline; empty: the path of this one."""
    interface: str = ""
    """Name or address of the network that the hosts share; empty: the one of the host's name, else of the route."""
    ports: str = ""
    """FIRST-LAST for workers; empty: any."""


class LocalSettings(EngineSettings, frozen=True, kw_only=True, tag="local"):
    """Detached processes of this machine."""

    capacity: int = 0
    """Slots of this machine for all jobs of the user; 0: its CPUs."""


class HostsSettings(EngineSettings, frozen=True, kw_only=True, tag="hosts"):
    """Hosts that lend their cores: `trueline join STORE` runs on each."""

    pool: str = ""
    """The store where they lend them; empty: the job's."""
    env: tuple[str, ...] = ()
    """Names of variables that head and hosts get from who submits, beside those of the host. They lie in the store."""


class SlurmSettings(EngineSettings, frozen=True, kw_only=True, tag="slurm"):
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    """Limit for the head and each host, as `sbatch --time` takes it."""
    logs: str = ""
    """Folder that all nodes share, for output before the job runs; empty: in the store, if that is a folder."""
    options: tuple[str, ...] = ()
    """More options of sbatch, as `--gres=gpu:1`."""


class PodmanSettings(EngineSettings, frozen=True, kw_only=True, tag="podman"):
    """Containers of this machine."""

    image: str = ""
    """With Python and Trueline; `python` names another one than python3 in it."""
    rootfs: str = ""
    """A root file system to run in place of an image. The container cannot change its files; `/` is this machine's."""
    capacity: int = 0
    """Slots of this machine for all jobs of the user; 0: its CPUs."""
    mounts: tuple[str, ...] = ()
    """FOLDER or FOLDER:THERE[:ro], beside the store."""
    env: tuple[str, ...] = ()
    """Names of variables that the container gets, such as those of the store's credentials."""
    options: tuple[str, ...] = ()
    """More options of `podman run`."""


class KubernetesSettings(EngineSettings, frozen=True, kw_only=True, tag="kubernetes"):
    """Pods of a cluster."""

    image: str = ""
    """With Python and Trueline; `python` names another one than python3 in it."""
    namespace: str = ""
    """Empty: that of the kubeconfig's context, else default."""
    kubeconfig: str = ""
    """Empty: what KUBECONFIG names, else ~/.kube/config. Pods use their service account."""
    context: str = ""
    """Of the kubeconfig; empty: the current one."""
    service_account: str = ""
    """Of the pods, which submit hosts by it: it needs the Role of the guide."""
    priority_class: str = ""
    queue: str = ""
    """A local queue of Kueue."""
    scheduler: str = ""
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, str | int], ...] = ()
    """As in a pod's specification: {key = "gpu", operator = "Exists", effect = "NoSchedule"}."""
    resources: dict[str, str] = {}
    """More of what each pod needs, as {"nvidia.com/gpu" = "1"}."""
    claims: tuple[str, ...] = ()
    """CLAIM:FOLDER[:ro], persistent volume claims: the store, if that is a folder, and data."""
    mounts: tuple[str, ...] = ()
    """FOLDER[:THERE][:ro] of the nodes."""
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become variables, such as the credentials of the store."""
    pull_secrets: tuple[str, ...] = ()
    pull: Literal["", "Always", "IfNotPresent", "Never"] = ""
    """When the image is pulled; empty: as Kubernetes does."""
    env: tuple[str, ...] = ()
    """Names of variables that the pods get from who submits."""
    labels: dict[str, str] = {}
    user: int = 0
    """Number of the user that runs in the pods; 0: the image's."""
    group: int = 0
    """Number of the group that gets the claims; 0: they stay as they are."""


class RaySettings(EngineSettings, frozen=True, kw_only=True, tag="ray"):
    address: str = ""
    """HOST:PORT of the cluster, from one of its nodes; ray://HOST:10001 from elsewhere; empty: RAY_ADDRESS, else the
    cluster that runs on this machine."""
    resources: tuple[str, ...] = ()
    """NAME=NUMBER, more that the head and each host need, as GPU=1."""
    strategy: str = "PACK"
    """Where Ray reserves what a job needs to begin: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD."""
    env: tuple[str, ...] = ()
    """Names of variables that head and hosts get, such as those of the store's credentials."""
    logs: str = ""
    """Folder that all nodes share, for output before the job runs; empty: in the store, if that is a folder."""


AnySettings = LocalSettings | HostsSettings | SlurmSettings | PodmanSettings | RaySettings | KubernetesSettings
KINDS: Mapping[str, type[AnySettings]] = {
    "hosts": HostsSettings, "kubernetes": KubernetesSettings, "local": LocalSettings, "podman": PodmanSettings,
    "ray": RaySettings, "slurm": SlurmSettings,
}  # fmt: skip


def parse_engine(on: str, tables: Mapping[str, Any], where: str = "trueline.toml") -> AnySettings:
    """The settings of `--on KIND[:NAME]`; `tables`: what stands under `engine` in the file `where`. Raises UsageError.

    >>> parse_engine("local", {"local": {"slots": 2}}).slots
    2
    """
    kind, _, name = on.partition(":")
    if kind not in KINDS:
        near = closest(kind, KINDS)
        raise UsageError(
            f"there is no engine '{kind}' (has: {join_names(KINDS)})", hint=f"did you mean '{near}'?" if near else ""
        )
    table = tables.get(kind, {})
    own = KINDS[kind].__struct_fields__
    variants = {key: value for key, value in table.items() if isinstance(value, Mapping) and key not in own}
    given = {key: value for key, value in table.items() if key not in variants}
    if name:
        if name not in variants:
            raise UsageError(
                f"{where} has no table [engine.{kind}.{name}] (has: {join_names(variants)})",
                hint=f"write the table, or say --on {kind}",
            )
        given |= variants[name]
    shown = f"{where}: [engine.{on.replace(':', '.')}]"
    for key in given:
        if key not in own:
            near = closest(key, own)
            raise UsageError(f"{shown} has no setting '{key}'", hint=f"did you mean '{near}'?" if near else "")
    try:
        settings = msgspec.convert(given, KINDS[kind], strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{shown}: {error}") from error
    if settings.slots < 1:
        raise UsageError(f"{shown}: slots is {settings.slots}, expected at least 1")
    return settings


def kind_of(settings: AnySettings) -> str:
    """
    >>> kind_of(LocalSettings())
    'local'
    """
    return str(type(settings).__struct_config__.tag)
