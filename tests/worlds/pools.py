"""A pool of hosts that lend their cores to a store: its hosts and a client in this process, with a clock of its own."""

from conformance.scheduler import POLITE, Scheduled
from trueline.engine.cluster.pool import PoolScheduler
from trueline.engine.cluster.pool_lender import PoolLender
from trueline.engine.cluster.pool_records import LEASE_S
from trueline.engine.cluster.settings import HostsSettings


class Clock:
    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


class Pool:
    """Hosts in this process, which act when they are told to."""

    def __init__(self, store, folder):
        self.store, self.folder, self.clock = store, folder, Clock()
        self.lenders = {}
        self.client = PoolScheduler(HostsSettings(pool=str(store)))
        self.client._view._now = self.clock

    def lend(self, name, cores, **more):
        self.lenders[name] = PoolLender(self.store, name=name, cores=cores, now=self.clock, **more)
        self.lenders[name].step()

    def step(self, *names):
        for name in names or self.lenders:
            self.lenders[name].step()

    def submit(self, job, role, script=POLITE, **more):
        made = Scheduled(self.client, self.folder, job)
        return made.submit(role, script, **more)

    def report(self, name):
        (found,) = [one for one in self.client.list(name.rpartition(".")[0]) if one.name == name]
        return found

    def running(self, host):
        return sorted(self.lenders[host].running)

    def pass_lease(self, *alive):
        for _ in range(8):
            self.clock.s += LEASE_S / 4
            self.step(*alive)

    def close(self):
        for lender in self.lenders.values():
            for one in lender.running.values():
                one.process.kill()
                one.process.wait()
                one.output.close()
