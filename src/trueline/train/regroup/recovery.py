"""Brings members to the state of the member that is furthest ahead: at once, or beside the training.

`heal` runs in every member of a new group. A small state is broadcast, and one that takes less time than the steps of
its only holder. Any other is offered by its source, and fetched by the members that are behind while the steps
continue. Until it has arrived they **observe**: they take part in every all-reduce with zeros and keep its results.
"""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trueline.checkpoint import checkpoint
from trueline.errors import CheckpointError
from trueline.parallel.finite import are_finite
from trueline.storage.location import split_location
from trueline.train.faults import Faults
from trueline.train.regroup import state_transfer
from trueline.train.step.group import WorkerGroup
from trueline.train.step.ledger import StepAccount
from trueline.train.step.replica import Reduced, Replica

MOST_KEPT = 8  # steps that an observer keeps before it makes the others wait for its state
KEPT_BYTES = 256 << 20
"""So much of gradients an observer keeps of more steps than one: a large model's fill the memory."""
BROADCAST_BYTES_S, READ_BYTES_S = 1.5e9, 4e9
"""How fast a state is broadcast over gloo; how fast the members on one machine read it."""
PATIENCE = 0.5
"""For how long a step may wait for the end of a transfer, as a part of the time that it has lasted."""


class Recovery:
    """Whether this worker has the state, and how it gets it."""

    def __init__(self, replica: Replica, group: WorkerGroup, faults: Faults, *, global_batch: int = 0) -> None:
        self._replica, self._group, self._faults, self._global_batch = replica, group, faults, global_batch
        self._offer = state_transfer.Offer()
        self.address = self._offer.address
        self.has_state = False  # this worker has a state, of any step
        self._parameter_bytes = sum(value.nbytes for value in replica.model.parameters())
        self.observed = 0  # steps that the group has applied while this worker observes
        self._fetch: state_transfer.Fetch | None = None
        self._room: state_transfer.Room | None = None
        """Made before there is a state, and taken once."""
        self._kept: list[Reduced | list[float]] = []
        group.link.transfer = self.transfer

    @property
    def holds(self) -> bool:
        """Whether this worker has the state of the group's current step."""
        return self.has_state and self._fetch is None

    def heal(self) -> None:
        """Brings members of a new group to one state. When a peer fails, raises RuntimeError and changes nothing."""
        plan, rank = self._group.plan, self._group.rank
        self._faults.at("healing", max(plan.steps, default=0))
        most = plan.steps[plan.source]
        if plan.checkpoint and rank == plan.source:
            self._replica.restore(_newest(plan.checkpoint).state)
        behind = [other != plan.source and (step < most or step < 0) for other, step in enumerate(plan.steps)]
        streamed = any(behind) and most > 0 and not plan.checkpoint and self.large and not self._is_brief(behind)
        if streamed:
            self._stream(behind)
        elif any(behind):
            mine = self._replica.state() if rank == plan.source else None
            room = self._take_room() if behind[rank] else None
            state = state_transfer.broadcast(self._group.process_group, mine, source=plan.source, room=room)
            if room is not None and state is not None:
                self._replica.restore(state)
        self._room = None
        self._agree_on_scale()
        self.has_state = self.has_state or not (streamed and behind[rank])
        self._forget_evaluation()
        self._group.start_shares(behind if streamed else [False] * len(behind))

    def _agree_on_scale(self) -> None:
        """Takes the source's fp16 scale: after a death in a step that overflows some members have halved it."""
        scaler = self._replica.optimizer_step.scaler
        if not scaler.is_enabled():
            return
        mine = scaler.state_dict()
        row = torch.tensor([mine["scale"], mine["_growth_tracker"]], dtype=torch.float64)
        self._group.process_group.wait(dist.broadcast(row, self._group.plan.source, async_op=True))
        scaler.load_state_dict({**mine, "scale": row[0].item(), "_growth_tracker": int(row[1])})

    @property
    def large(self) -> bool:
        """Whether to stream the state, from what all members know: the parameters, with two optimizer values each."""
        return 3 * self._parameter_bytes > state_transfer.STREAM_BYTES

    def _is_brief(self, behind: list[bool]) -> bool:
        """Whether the only member with the state sends it in less time than it computes a step alone.

        While the newcomer observes it would compute alone, and a step alone takes longer than one of both.
        """
        rate = self._group.plan.rates[self._group.plan.source] if self._group.plan.rates else 0.0
        if behind.count(False) > 1 or rate <= 0:
            return False
        size = 3 * sum(value.nbytes for value in self._replica.model.parameters())
        address = self._group.plan.states[self._group.plan.source]  # all members decide alike
        local = address.startswith("127.")
        return size / (READ_BYTES_S if local else BROADCAST_BYTES_S) <= self._global_batch / rate

    def _stream(self, behind: list[bool]) -> None:
        group, plan = self._group, self._group.plan
        sources = pick_sources(behind, plan.states, plan.source)
        if readers := list(sources.values()).count(group.rank):
            self._offer.publish(group.generation, self._replica.snapshot(readers=readers, patience=PATIENCE))
        elif behind[group.rank]:
            address = plan.states[sources[group.rank]]
            self._fetch = state_transfer.Fetch(address, group.generation, self._take_room())
            self.observed = plan.steps[plan.source]

    def make_room(self) -> None:
        """Prepares memory for the state that a replacement will receive: the others still take their step."""
        if self.large:
            self._room = state_transfer.Room(self._replica.model.state_dict())
            self._room.touch(self._replica.optimizer_step.foresee_moments())

    def _take_room(self) -> state_transfer.Room:
        """Where this worker receives a state: in its own parameters, unless it has a state to lose."""
        room, self._room = self._room, None
        return room or state_transfer.Room(None if self.has_state else self._replica.model.state_dict())

    def transfer(self) -> tuple[int, int, bool]:
        """Bytes that this worker has received or sent of a state, all of them (0: none moves), whether it sends."""
        fetch = self._fetch
        if fetch is None or fetch.moved == fetch.total > 0:  # all is there: it waits for the end of a step
            return (*self._offer.progress, True)
        return fetch.moved, fetch.total, False

    def _forget_evaluation(self) -> None:
        """Drops an evaluation of the current step, which is repeated: some members may not have entered it."""
        ledger = self._replica.ledger
        if self.holds and ledger.evaluations and ledger.evaluations[-1]["step"] == ledger.steps:
            ledger.evaluations.pop()

    def forget(self) -> None:
        """Drops the running transfer: this worker leaves the group."""
        self._offer.withdraw()
        self._fetch = None
        self._kept.clear()

    def count_holders(self, holders: int) -> None:
        """Drops the offered copy once all members hold the state."""
        if holders == self._group.size:
            self._offer.withdraw()

    def keep(self, account: StepAccount) -> None:
        """Keeps the sums of the last step until the state has arrived; waits a little, as its source does."""
        if self._fetch is not None:
            patient_until = time.monotonic() + PATIENCE * (time.monotonic() - self._fetch.began)
            self._fetch.join(lambda: time.monotonic() > patient_until or self._group.is_overtaken())
        reduced = self._replica.keep(account, copied=not self.has_arrived())
        self._kept.append(reduced)
        if self._advances(reduced):
            self.observed += 1

    def _advances(self, reduced: Reduced) -> bool:
        """Whether the others applied the step: not if its loss, or a gradient, is not finite."""
        if not math.isfinite(reduced.account.loss_sum):
            return False
        return are_finite([reduced.beside, *(value for value in reduced.gradients if value is not None)])

    def keep_evaluation(self, totals: list[float]) -> None:
        self._kept.append(totals)

    @property
    def crowded(self) -> bool:
        """Whether the limit of kept steps is reached, so that the others have to wait for the state."""
        steps = [kept for kept in self._kept if isinstance(kept, Reduced)]
        size = sum(value.nbytes for kept in steps for value in kept.gradients if value is not None)
        return len(self._kept) >= MOST_KEPT or (len(steps) > 1 and size > KEPT_BYTES)

    def has_arrived(self) -> bool:
        """Whether the transfer is over: `take` returns the state, or raises."""
        return self._fetch is not None and self._fetch.over

    def wait(self) -> None:
        """Returns when the transfer is over, or a newer view makes it useless."""
        if self._fetch is not None:
            self._fetch.join(self._group.is_overtaken)

    def take(self) -> list[Reduced | list[float]]:
        """Restores the received state; returns what followed it. Raises RuntimeError if the transfer failed."""
        fetch, kept, self._kept = self._fetch, self._kept, []
        assert fetch is not None
        if fetch.state is None:
            raise RuntimeError(f"ProcessGroup: {fetch.trouble or 'the transfer of the state was interrupted'}")
        self._fetch = None
        self._replica.restore(fetch.state)
        self.has_state = True
        self._forget_evaluation()
        return kept

    def close(self) -> None:
        self._offer.close()


def pick_sources(behind: Sequence[bool], states: Sequence[str], source: int) -> dict[int, int]:
    """From which rank each rank that is behind fetches its state: one of its own host if that has a member with the
    state, so that the state does not cross the network; else `source`.

    >>> pick_sources([False, False, True, True], ["a:1", "b:1", "b:2", "c:1"], 0)
    {2: 1, 3: 0}
    """
    hosts = [state.rpartition(":")[0] for state in states]
    holders = [source, *(rank for rank, late in enumerate(behind) if not late and hosts[rank])]
    return {
        rank: next((holder for holder in holders if hosts[holder] == hosts[rank]), source)
        for rank, late in enumerate(behind) if late
    }  # fmt: skip


def _newest(where: str) -> checkpoint.Checkpoint:
    """The checkpoint at `where`, or the newest valid one if it is torn. Raises CheckpointError, StorageError."""
    try:
        return checkpoint.read(where)
    except CheckpointError:
        older = checkpoint.latest(split_location(where)[0])
        if older is None:
            raise
        return older
