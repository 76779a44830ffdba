"""Opens the scheduler of an engine's settings. Nothing is connected before its first use, unless one is expected."""

import contextlib
import threading

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
from trueline.errors import EngineAway, UsageError


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


def begin_connecting(settings: AnySettings) -> None:
    """Begins what the first call would wait for, while the caller imports and reads: a client of Ray takes two seconds
    to connect. Where that fails, the first call says so."""
    if isinstance(settings, RaySettings):
        scheduler = open_scheduler(settings)
        threading.Thread(target=_try_to_list, args=(scheduler,), name="connecting", daemon=True).start()


def _try_to_list(scheduler: Scheduler) -> None:
    with contextlib.suppress(EngineAway, UsageError):
        scheduler.list("")
