"""Whatever happens, in whatever order: hypothesis plays workers, deaths, operators and dead masters against the core.

The model knows what the master cannot: which steps each worker has really applied, as a list of tokens (its lineage).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trueline.engine.contract import make_ref, parse_ref
from trueline.train.master.journal import apply_row
from trueline.train.membership import decide as m
from trueline.train.membership import events as h
from trueline.train.membership.state import Member, MembershipPolicy, State

PICK = st.integers(0, 9)


@dataclass
class Worker:
    ref: str
    doing: str = "starting"
    """starting, idle (waits for a view), entered, grouped, dead"""
    after: int = -1
    """The newest generation that it has dealt with."""
    lineage: tuple[int, ...] | None = None
    reported: int = -1
    hung: bool = False
    served: bool = False
    troubled: bool = False
    """Its group failed: without another view it complains."""

    @property
    def steps(self) -> int:
        return -1 if self.lineage is None else len(self.lineage)


class Job(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.faltered = False
        self.policy = MembershipPolicy(workers=3, min_workers=2, gather_s=2.0, start_s=20.0, max_failures=4)
        self.state, self.now = State(workers=3), 0.0
        self.journal: list[tuple[str, dict]] = []
        self.workers: dict[str, Worker] = {}
        self.unnoticed: dict[str, str] = {}
        self.view: tuple[str, ...] = ()
        self.group: tuple[int, tuple[str, ...]] = (0, ())
        self.fresh = False
        """The group has just been let go."""
        self.disk: dict[str, tuple[int, ...]] = {}
        self.logged = self.newest = 0
        self.over = ""
        self.tokens = itertools.count()
        self.tell(h.Begin())

    # The shell, and what its actions do to the workers. ---------------------------------------------------------

    def tell(self, event: h.Event) -> None:
        self.now += 0.01
        actions = m.decide(self.state, event, self.now, self.policy)
        self.journal += [(action.kind, action.body) for action in actions if isinstance(action, h.Log)]
        for action in actions:
            match action:
                case h.Start(slot, incarnation):
                    ref = make_ref("worker", slot, incarnation)
                    assert ref not in self.workers, "an incarnation is started once"
                    self.workers[ref] = Worker(ref)
                case h.Kill(ref) | h.Fence(ref):
                    self.die(self.workers[ref])
                    self.unnoticed.pop(ref, None)
                case h.Publish():
                    self.publish()
                case h.Release():
                    self.release(action)
                case h.Truncate(steps):
                    self.logged = min(self.logged, steps)
                case h.FailJob(code):
                    self.over = code
                    assert code != "state_lost" or not (self.disk or any(map(self.holds, self.state.members.values())))

    def holds(self, member: Member) -> bool:
        worker = self.workers[member.ref]
        return bool(worker.lineage) and worker.doing != "dead" and not worker.hung and member.left_at is None

    def publish(self) -> None:
        assert self.state.generation == self.newest + 1, "generations grow by one"
        self.newest, self.view = self.state.generation, self.state.view
        for worker in self.workers.values():
            cut = worker.doing == "grouped" and self.group[0] < self.state.cut_below
            if cut or worker.doing == "entered":
                worker.doing = "idle"

    def release(self, release: h.Release) -> None:
        group = [self.workers[ref] for ref in self.view]
        assert len(group) >= self.policy.min_workers
        assert all(worker.after == self.newest for worker in group), "all have entered"
        old = [self.workers[ref] for ref in self.group[1]]
        assert not old or any(worker.doing != "grouped" for worker in old), "one group at most can complete a step"
        source = group[release.source]
        living = [worker for worker in group if worker.doing != "dead" and not worker.hung]
        assert all(worker.steps <= source.steps for worker in living), "the source has applied the most"
        assert all(w.lineage == source.lineage[: w.steps] for w in living if w.lineage), "one lineage"
        if release.checkpoint:
            assert source.lineage is None
            source.lineage = self.disk[release.checkpoint]
        elif source.lineage is None:
            assert self.logged == 0, "nothing begins again in silence"
            source.lineage = ()
        if any(worker.doing == "dead" or worker.hung for worker in group):
            for worker in group:
                self.trouble(worker)
            return
        self.group, self.fresh = (self.newest, self.view), True
        for worker in group:
            worker.doing, worker.served, worker.lineage = "grouped", True, source.lineage

    def trouble(self, worker: Worker) -> None:
        if worker.doing not in ("dead", "starting"):
            worker.doing, worker.troubled = "idle", True

    def picked(self, pick: int, *doing: str) -> Worker | None:
        found = [w for w in self.workers.values() if w.doing in doing and not w.hung]
        return found[pick % len(found)] if found else None

    def complete(self) -> list[Worker]:
        """The members of the group at work, if it can complete a step."""
        group = [self.workers[ref] for ref in self.group[1]]
        return group if all(worker.doing == "grouped" and not worker.hung for worker in group) else []

    # What workers do. -------------------------------------------------------------------------------------------

    running = precondition(lambda self: not self.over)

    @running
    @rule(pick=PICK)
    def ready(self, pick: int) -> None:
        if not self.over and (worker := self.picked(pick, "starting")):
            worker.doing = "idle"
            self.tell(h.Ready(worker.ref, f"{worker.ref}:1"))

    @running
    @rule(pick=PICK)
    def enter(self, pick: int) -> None:
        worker = self.picked(pick, "idle")
        if worker and not self.over and self.newest > worker.after:
            worker.after, worker.troubled = self.newest, False
            if worker.ref in self.view:
                worker.doing = "entered"
                self.tell(h.Entered(worker.ref, self.newest, worker.steps))
            elif worker.served:
                worker.doing = "dead"
                self.unnoticed[worker.ref] = "exit code 0"

    @running
    @rule(applied=st.integers(0, 15), die=st.none() | PICK)
    def step(self, applied: int, die: int | None) -> None:
        """A step; with `die` a member dies in it, and each of the others may or may not have applied it."""
        if not (group := self.complete()):
            return
        self.fresh = False
        token, victim = next(self.tokens), None if die is None else group[die % len(group)]
        for index, worker in enumerate(group):
            if victim is None or (applied >> index) & 1:
                worker.lineage = (*worker.lineage, token)
        if victim is not None:
            self.die(victim)
        elif self.newest > self.group[0]:
            for worker in group:
                worker.doing = "idle"

    def die(self, worker: Worker, why: str = "killed by SIGKILL") -> None:
        """The kernel wakes one peer; the others wait for that one, until they are cut off."""
        peers = self.group[1] if worker.doing == "grouped" else ()
        worker.doing = "dead"
        grouped = [other for other in map(self.workers.__getitem__, peers) if other.doing == "grouped"]
        for other in grouped[:1]:
            self.trouble(other)
        self.unnoticed[worker.ref] = why

    @running
    @rule(pick=PICK)
    def report(self, pick: int) -> None:
        if worker := self.picked(pick, "grouped", "idle", "entered"):
            worker.reported = max(worker.reported, worker.steps if worker.served else -1)
            self.beat(worker)

    def beat(self, worker: Worker) -> None:
        stands = worker.doing == "grouped" and not self.complete()
        self.tell(h.Heartbeat(worker.ref, worker.reported, "waiting", 20.0 if stands else 0.0))
        if worker.doing != "dead" and worker.reported > self.logged:
            self.journal += [("COMMIT", {"step": step}) for step in range(self.logged, worker.reported)]
            self.logged = worker.reported

    @running
    @rule(pick=PICK)
    def complain(self, pick: int) -> None:
        worker = self.picked(pick, "idle")
        if worker and worker.troubled and self.newest == worker.after:
            self.tell(h.GroupBroken(worker.ref, worker.after, "reset by peer"))

    @running
    @rule(pick=PICK)
    def save(self, pick: int) -> None:
        if (worker := self.picked(pick, "grouped")) and worker.lineage:
            path = f"step-{worker.steps}-{len(self.disk)}"
            self.disk[path] = worker.lineage
            self.tell(h.Saved(worker.ref, worker.steps, path))

    @running
    @rule(pick=PICK, record=st.integers(0, 1))
    def suspect(self, pick: int, record: int) -> None:
        worker = self.picked(pick, "grouped")
        if worker and record not in self.state.set_aside:
            self.trouble(worker)  # the others wait for it until they are cut off
            self.tell(h.Suspect(worker.ref, (record,), "ValueError"))

    @running
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        if worker := self.picked(pick, "grouped", "idle", "entered"):
            self.tell(h.Leaving(worker.ref))

    @running
    @rule()
    def leave_all(self) -> None:
        """The whole cluster is asked to go."""
        for worker in list(self.workers.values()):
            if worker.doing in ("grouped", "idle", "entered") and not worker.hung:
                self.tell(h.Leaving(worker.ref))

    # What befalls them. -----------------------------------------------------------------------------------------

    @running
    @rule(pick=PICK)
    def kill(self, pick: int) -> None:
        if worker := self.picked(pick, "starting", "grouped", "idle", "entered"):
            if worker.doing == "grouped" and self.state.careful:
                self.tell(h.Trial(worker.ref, 7))
            self.die(worker)

    @precondition(lambda self: not self.over and not self.faltered)
    @rule(slot=st.integers(0, 2))
    def falter(self, slot: int) -> None:
        """The workers of one slot fail after a step, again and again: in the end it stays empty, if it can be."""
        self.faltered = True  # once in a job: it is long
        for _ in range(2 * self.policy.max_failures):
            self.get_on(2)
            for pick in range(len(self.workers)):
                self.report(pick)
            frail = [one for one in self.workers.values() if parse_ref(one.ref)[1] == slot and one.doing == "grouped"]
            if self.over or not frail:
                return
            self.die(frail[0], "exit code 3")
            self.notice()
            self.time(2)

    @running
    @rule(pick=PICK)
    def hang(self, pick: int) -> None:
        if worker := self.picked(pick, "grouped", "idle", "entered"):
            worker.hung = True

    @running
    @rule()
    def notice(self) -> None:
        lost, self.unnoticed = self.unnoticed, {}
        clean, failed = "exit code 0", "exit code 3"
        self.tell(
            h.Deaths(tuple(h.Death(ref, why, clean=why == clean, failed=why == failed) for ref, why in lost.items()))
        )

    @running
    @rule(workers=st.integers(2, 5))
    def scale(self, workers: int) -> None:
        self.tell(h.Scale(workers, "asked for"))

    @running
    @rule(ticks=st.integers(1, 16))
    def time(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += 0.25
            self.beats()
            self.tell(h.Tick())

    def beats(self) -> None:
        for worker in list(self.workers.values()):
            if worker.doing not in ("starting", "dead") and not worker.hung:
                self.beat(worker)

    @running
    @rule()
    def freeze(self) -> None:
        """The master stands still for a minute: it gives nobody up for that."""
        self.now += 60.0
        well = {member.ref for member in self.state.members.values() if not self.state.is_leaving(member)}
        well -= {ref for ref, worker in self.workers.items() if worker.hung or worker.doing == "dead"}
        self.tell(h.Tick())
        assert well <= self.state.members.keys()
        self.beats()

    @running
    @rule(unanswered=st.booleans())
    def restart_master(self, unanswered: bool) -> None:
        """With `unanswered` it dies between its answers to those who enter: some form the group, one enters again."""
        told = (self.state.workers, self.state.quarantined, self.state.set_aside, self.state.rotation)
        generation = self.state.generation
        self.state = State(workers=self.policy.workers)
        for kind, body in self.journal:
            apply_row(self.state, kind, body, self.now)
        assert self.state.generation == generation
        assert (self.state.workers, self.state.quarantined, self.state.set_aside, self.state.rotation) == told
        alive = frozenset(ref for ref, worker in self.workers.items() if worker.doing != "dead")
        self.unnoticed = {}
        group = [self.workers[ref] for ref in self.group[1]]
        if unanswered and self.fresh and self.group[0] == self.newest and self.complete():
            for worker in group[1:]:
                self.trouble(worker)
            group[0].doing = "entered"
        for worker in self.workers.values():
            if worker.doing == "entered":
                worker.doing, worker.after = "idle", worker.after - 1
        self.tell(h.Begin(alive, launch=False))
        for worker in list(self.workers.values()):
            if worker.doing not in ("starting", "dead") and not worker.hung and not self.over:
                self.tell(h.Ready(worker.ref, f"{worker.ref}:1"))

    @running
    @rule(rounds=st.integers(1, 4))
    def get_on(self, rounds: int) -> None:
        """Everybody does what is next: scripts reach deeper states."""
        for _ in range(rounds):
            for pick in range(len(self.workers)):
                self.ready(pick)
                self.enter(pick)
            self.step(0, None)

    @precondition(lambda self: self.over)
    @rule()
    def rest(self) -> None:
        """The job has ended."""

    # What has to hold. ------------------------------------------------------------------------------------------

    @invariant()
    def the_view_is_of_members_and_published(self) -> None:
        if not self.over:
            assert set(self.state.view) <= self.state.members.keys()
            assert self.state.cut_below <= self.state.generation

    @invariant()
    def each_step_of_a_lineage_was_applied_once(self) -> None:
        for worker in self.workers.values():
            assert worker.lineage is None or len(set(worker.lineage)) == len(worker.lineage)

    def teardown(self) -> None:
        """Left in peace, the job gets on: everybody wanted is in one group that applies a step."""
        for _ in range(600):
            if self.over or self.state.phase == "failed":
                return
            if self.at_work():
                return
            self.notice()
            for pick in range(len(self.workers) if not self.over else 0):
                self.ready(pick)
                self.enter(pick)
                self.complain(pick)
                self.report(pick)
            self.step(0, None)
            self.time(1)
        raise AssertionError(f"nothing gets on: {self.state} {self.workers} {self.group}")

    def at_work(self) -> bool:
        group = self.complete()
        ready = bool(group) and self.group[0] == self.newest and len(group) == self.state.target_workers
        if ready:
            self.step(0, None)
            assert all(worker.lineage == group[0].lineage for worker in group)
        return ready


class LongJob(Job):
    """The same, over more and longer histories."""


def histories(count: int, steps: int) -> settings:
    return settings(
        max_examples=count, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )


Job.TestCase.settings = histories(120, 50)
LongJob.TestCase.settings = histories(600, 80)
TestWhateverHappensTheJobGetsOnAndLosesNothing = pytest.mark.slow(Job.TestCase)
TestWhateverHappensForLongTheJobGetsOnAndLosesNothing = pytest.mark.long(LongJob.TestCase)
