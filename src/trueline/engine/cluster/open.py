"""Opens the scheduler of an engine's settings. Nothing is connected before its first use."""

from trueline.engine.cluster.contract import Scheduler
from trueline.engine.cluster.settings import (
    AnySettings,
    HostsSettings,
    KubernetesSettings,
    LocalSettings,
    PodmanSettings,
    RaySettings,
    SlurmSettings,
)


def open_scheduler(settings: AnySettings) -> Scheduler:
    match settings:
        case LocalSettings():
            from trueline.engine.cluster.local import LocalScheduler

            return LocalScheduler(settings)
        case HostsSettings():
            from trueline.engine.cluster.pool import PoolScheduler

            return PoolScheduler(settings)
        case PodmanSettings():
            from trueline.engine.cluster.podman import PodmanScheduler

            return PodmanScheduler(settings)
        case RaySettings():
            from trueline.engine.cluster.ray import RayScheduler

            return RayScheduler(settings)
        case SlurmSettings():
            from trueline.engine.cluster.slurm import SlurmScheduler

            return SlurmScheduler(settings)
        case KubernetesSettings():
            from trueline.engine.cluster.kubernetes.scheduler import KubernetesScheduler

            return KubernetesScheduler(settings)
