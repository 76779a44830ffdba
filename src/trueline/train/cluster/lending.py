"""How a host of a submitted job lends its cores: it waits in the store for the head's address and token, and joins.

It ends with its launch, and after ten leases without a master. If the head dies, it may lead the job
(`train/launch/standby.py`), and then has the head's duties.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from trueline import events
from trueline.engine.cluster.open import open_scheduler
from trueline.engine.hosts.agent import HostAgent
from trueline.engine.hosts.relay import Relay
from trueline.engine.hosts.standby import JoinRequest
from trueline.errors import StorageError
from trueline.train.cluster.duties import leading
from trueline.train.cluster.store import JobStore, JoinKit
from trueline.train.launch.hosts import own_versions
from trueline.train.launch.launcher import LocalJob
from trueline.train.launch.lend import lend
from trueline.train.launch.standby import StandbyMaster

POLL_S, WATCH_S = 0.25, 2.0


def wait_for_kit(store: JobStore, number: int) -> JoinKit | None:
    """None: the launch ended before its head listened."""
    while not is_over(store, number):
        if (kit := store.read_kit(number)) is not None:
            return kit
        time.sleep(POLL_S)  # a store sends no notice
    return None


def is_over(store: JobStore, number: int) -> bool:
    launch = store.last_launch()
    return launch is None or launch.number != number or store.read_end(number) is not None


def make_watch(store: JobStore, number: int, relay: Relay) -> Callable[[], "asyncio.Future[str]"]:
    """What ends a host that no master sends away: the launch's end in the store, or ten leases without a master."""

    async def watch() -> str:
        while True:
            await asyncio.sleep(WATCH_S)
            if relay.is_fenced:
                return "no master of the job answers"
            with contextlib.suppress(StorageError):  # the store may be away, and come back
                if await asyncio.to_thread(is_over, store, number):
                    await asyncio.sleep(WATCH_S)  # the master sends the host away itself, if it can
                    return "the launch has ended"

    return lambda: asyncio.ensure_future(watch())


def run(store: JobStore, number: int, role: str, agent: HostAgent) -> str:
    """Lends the cores until the job does not need them; returns why that is. `agent`: one that has begun."""
    job, launch = store.read_job(), store.last_launch()
    kit = wait_for_kit(store, number)
    if launch is None or kit is None:
        agent.end()
        return "the launch has ended"
    engine = launch.engine
    request = JoinRequest(
        address=kit.address, token=kit.token, cores=engine.slots, name=role, interface=engine.interface,
        ports=engine.ports, versions=own_versions(),
    )  # fmt: skip

    def lead(leader: LocalJob) -> contextlib.AbstractContextManager[None]:
        events.logger.setLevel(logging.WARNING)  # each step is an event, and they are in the store
        return leading(store, job, launch, open_scheduler(engine), role=role, leader=leader)

    relay = Relay(request, StandbyMaster(request, around=lead), agent)
    return asyncio.run(lend(relay, until=make_watch(store, number, relay)))
