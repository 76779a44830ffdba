"""The group of workers that share a step: entering a view, forming its group, and the share of each member.

docs/concepts/generation.md, "A regroup", shows the sequence.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.nn.modules.module import register_module_forward_pre_hook

from trueline import events
from trueline.parallel.exchange import Overtaken, is_collective
from trueline.parallel.gloo import GlooGroup
from trueline.train.faults import Faults
from trueline.train.link.contract import Link
from trueline.train.step import load_balance
from trueline.wire import train_pb2 as pb

PATIENCE_S = 1.0  # after a failed collective, how long to wait for a new view before requesting one


def name_ranks(text: str, members: Sequence[str]) -> str:
    """`text` with the workers in the place of their ranks: a reason for people.

    >>> name_ranks("rank 1 did not connect to 10.0.0.1:7801 in time", ["worker-0.0", "worker-1.2"])
    'worker-1.2 did not connect to 10.0.0.1:7801 in time'
    """
    return re.sub(r"\brank (\d+)\b", lambda m: members[int(m[1])] if int(m[1]) < len(members) else m[0], text)


@dataclass(slots=True)
class WorkerGroup:
    link: Link
    process_group: GlooGroup
    faults: Faults
    view: pb.View = field(default_factory=lambda: pb.View(generation=-1))
    plan: pb.Plan = field(default_factory=pb.Plan)
    rank: int = 0
    split: load_balance.StepSplit = field(default_factory=load_balance.StepSplit)
    order: list[int] = field(default_factory=lambda: [0])
    """Ranks in the order of their shares: shifted by the view's rotation."""
    ordered_weights: tuple[float, ...] = (1.0,)  # the weights of the split in that order
    position: int = 0  # of this worker in that order
    rates: tuple[float, ...] = ()  # records a second by rank, from the account of the last step
    failure: str = ""  # why the last collective failed
    failed: bool = False  # a step failed, and no newer view has arrived yet

    @property
    def size(self) -> int:
        return len(self.view.members)

    @property
    def generation(self) -> int:
        return int(self.view.generation)

    def regroup(self, *, steps: int, rate: float, heal: Callable[[], None]) -> None:
        """Leaves the group and enters the next one that works. `steps`: applied, -1 without a state.

        `heal` runs in the new group; when one of its collectives fails, the next view is entered. Raises SystemExit
        when the next view does not hold this worker.
        """
        after = self.generation
        while True:
            self.process_group.close()
            self.link.report_phase("regrouping")
            view = self._next_view(after)
            if self.link.ref not in view.members:
                if self.generation >= 0:
                    raise SystemExit(0)  # a planned departure: the others continue without this worker
                after = view.generation  # a newcomer whom this view does not hold yet
                continue
            self.faults.at("entering", max(steps, 0))
            plan = self.link.enter(view.generation, steps, rate)
            after = view.generation
            if not plan.superseded and self._try_form(view, plan, heal):
                return

    def _next_view(self, after: int) -> pb.View:
        """The next view; after a failed step one that cuts the old group, since members may still wait in it."""
        while True:
            view = self.link.wait_view(after, PATIENCE_S, cuts=self.generation if self.failed else -1)
            if view is not None:
                self.failed = False
                return view
            if self.generation >= 0 or self.failure:  # the first group may fail too, without a death
                newest = self.link.view
                self.link.report_broken_group(after if newest is None else newest.generation, self.failure)

    def _try_form(self, view: pb.View, plan: pb.Plan, heal: Callable[[], None]) -> bool:
        rank = list(view.members).index(self.link.ref)
        before = self.view, self.plan, self.rank
        try:
            self.faults.at("forming", max(plan.steps, default=0))
            self.process_group.form(view.generation, rank=rank, size=len(view.members), store=plan.store)
            self.view, self.plan, self.rank = view, plan, rank
            self.link.report_phase("healing")
            heal()
        except RuntimeError as error:
            if not is_collective(error):
                raise
            self.view, self.plan, self.rank = before
            self.failure = name_ranks(str(error).partition("\n")[0], view.members)
            events.emit("group.failed", generation=view.generation, why=self.failure)
            return False
        self.link.leads = rank == 0
        return True

    def start_shares(self, behind: list[bool]) -> None:
        """Sets the weights of the first step; members that are `behind` have no share in it."""
        self.rates = tuple(self.plan.rates)
        self.order = [(position - self.view.rotation) % self.size for position in range(self.size)]
        self.position = self.order.index(self.rank)
        # Equal shares after a rotation: with uneven ones the largest share would stay with one rank in any order.
        rates = [0.0] * self.size if self.view.rotation else self.rates
        settling = 0 if any(rate > 0 for rate in self.rates) else load_balance.SETTLING
        self._set_split(load_balance.StepSplit(load_balance.initial_weights(rates, behind=behind), settling=settling))

    @property
    def weights(self) -> tuple[float, ...]:
        """By rank: the proportions in which the members share a step."""
        return self.split.weights

    def _set_split(self, split: load_balance.StepSplit) -> None:
        if split.weights is not self.split.weights or not self.ordered_weights:
            self.ordered_weights = tuple([split.weights[rank] for rank in self.order])
        self.split = split

    def update_rates(self, rates: Sequence[float], records: int) -> None:
        """Takes the members' rates from the account of a step of `records` records."""
        self.rates = tuple(rates)
        self._set_split(self.split.after_step(self.rates, records))

    def rate_to_report(self, measured: float) -> float:
        """This worker's records a second, or its weight until it has measured."""
        own = measured or self.weights[self.rank]
        if own:
            return own
        known = [weight for weight in self.weights if weight > 0]
        return sum(known) / len(known)

    def by_rank(self, numbers: list[int]) -> list[int]:
        """Sorts `numbers`, which are in the order of `order`, by rank."""
        return [number for _, number in sorted(zip(self.order, numbers, strict=True))]

    def is_overtaken(self) -> bool:
        """Whether a newer view cuts this group: it cannot complete a step any more."""
        newest = self.link.view
        return newest is not self.view and newest is not None and newest.cut_below > self.generation

    @contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Raises Overtaken in the block, when a module of any model is called after a newer view has cut this group."""

        def check(*_: object) -> None:
            if self.is_overtaken():
                raise Overtaken("ProcessGroup: a newer view")

        hook = register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            hook.remove()

    def wants_regroup(self) -> bool:
        """Whether there is a newer view to regroup for."""
        newest = self.link.view
        return newest is not self.view and newest is not None and newest.generation > self.generation
