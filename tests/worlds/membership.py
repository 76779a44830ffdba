"""The smallest world for membership: a state to which events are applied, and a clock that the test moves."""

from trueline.train.membership import decide as m
from trueline.train.membership import events as h
from trueline.train.membership import state

POLICY = state.MembershipPolicy(workers=3, min_workers=2, lease_s=10.0, gather_s=5.0, refill_s=0.0)
A, B, C = "worker-0.0", "worker-1.0", "worker-2.0"


class World:
    """A state to which events are applied; `actions` are those of the last event, `rows` its journal entries."""

    def __init__(self, policy: state.MembershipPolicy = POLICY) -> None:
        self.policy, self.state, self.now = policy, state.State(workers=policy.workers), 0.0
        self.actions: tuple[h.Action, ...] = ()
        self.all: list[h.Action] = []
        self.rows: list[h.Log] = []

    def happen(self, *events: h.Event) -> "World":
        for event in events:
            actions = m.decide(self.state, event, self.now, self.policy)
            self.rows = [action for action in actions if isinstance(action, h.Log)]
            self.actions = tuple(action for action in actions if not isinstance(action, h.Log))
            self.all += self.actions
        return self

    def wait(self, seconds: float, *beating: str, **heard: object) -> "World":
        """Time passes in ticks; the heartbeats of `beating` members arrive before each."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            self.happen(*(h.Heartbeat(ref, -1, **heard) for ref in beating), h.Tick())
        return self

    def enter(self, **steps: int) -> "World":
        refs = {"a": A, "b": B, "c": C}
        return self.happen(*(h.Entered(refs[name], self.state.generation, step) for name, step in steps.items()))

    def of(self, kind: type) -> list:
        return [action for action in self.actions if isinstance(action, kind)]

    def releases(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(release.source, release.steps) for release in self.of(h.Release)]


def running(steps: int = 5) -> World:
    world = World().happen(h.Begin(), h.Ready(A, "a:1"), h.Ready(B, "b:1"), h.Ready(C, "c:1")).enter(a=-1, b=-1, c=-1)
    return world.happen(*(h.Heartbeat(ref, steps) for ref in (A, B, C)))


def logged(world: World, kind: str) -> list[dict]:
    return [row.body for row in world.rows if row.kind == kind]
