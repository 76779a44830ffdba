"""Evaluation while training: when it is due, which one is the best, when to stop.

Each member measures its part of the evaluation records, and the sums are reduced over the group: every record counts
once, and none is padded. Whether an evaluation is due depends on the applied steps alone, so all members begin it
together. After a regroup the current step's evaluation is repeated: some members may not have entered it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from trueline.data.order import permutation
from trueline.errors import UsageError, join_names
from trueline.parallel.exchange import GradientExchange
from trueline.train.link.contract import ProgressReporter
from trueline.train.settings import Fault
from trueline.train.step import model_traits
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.step.group import WorkerGroup
from trueline.train.step.plan import JobPlan
from trueline.train.step.replica import Replica
from trueline.wire import train_pb2 as pb

BATCH = 256
"""Most records of a chunk."""
CHUNKS = 32
"""Least number of chunks, if there are enough records: members share out chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    every: int
    """Steps; 0: at the end of each epoch."""
    monitor: str
    """`loss` or a metric, smaller is better; `-NAME`: larger is better."""
    patience: int = 0
    """Evaluations without a new best one after which training stops; 0: never."""

    def due(self, steps: int, epoch_steps: int, last: int) -> bool:
        """Whether an evaluation is due after `steps` of `last` applied steps; the last step always has one.

        >>> rule = Rule(every=3, monitor="loss")
        >>> [steps for steps in range(9) if rule.due(steps, epoch_steps=4, last=8)]
        [3, 6, 8]
        """
        return steps > 0 and (steps % (self.every or epoch_steps) == 0 or steps == last)

    def value(self, evaluation: dict[str, Any]) -> float:
        """The monitored value; smaller is better."""
        name = self.monitor.removeprefix("-")
        value = float(evaluation["loss"] if name == "loss" else evaluation["metrics"][name])
        return -value if self.monitor.startswith("-") else value

    def judge(self, earlier: Sequence[dict[str, Any]], evaluation: dict[str, Any]) -> dict[str, Any]:
        """`evaluation` with `best` and `stop`, compared with `earlier` ones."""
        value = self.value(evaluation)
        best = not math.isnan(value) and all(value < self.value(other) for other in earlier if other["best"])
        since = next((i for i, other in enumerate(reversed(earlier)) if other["best"]), len(earlier))
        stop = bool(self.patience) and not best and since + 1 >= self.patience
        return {**evaluation, "best": best, "stop": stop}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """`measure(start, stop)` returns sums over those records: the loss, then each metric in the order of `names`."""

    rule: Rule
    num_records: int
    names: tuple[str, ...]
    measure: Callable[[int, int], list[float]]

    def __post_init__(self) -> None:
        name = self.rule.monitor.removeprefix("-")
        if name != "loss" and name not in self.names:
            known = join_names(["loss", *self.names])
            raise UsageError(f"monitor is '{self.rule.monitor}', and there is no metric '{name}'; there are {known}")

    def chunks(self) -> list[tuple[int, int]]:
        """Bounds of the records that are measured together, whichever member does it."""
        size = min(BATCH, max(1, self.num_records // CHUNKS))
        return [(start, min(start + size, self.num_records)) for start in range(0, self.num_records, size)]

    def measure_all(self, group: WorkerGroup, replica: Replica | None) -> list[float]:
        """The sums of all members, measured with the averaged parameters if there are any.

        `replica` is None for a member without the state: it adds zeros. Raises RuntimeError when a peer fails.
        """
        totals = [0.0] * (1 + len(self.names))
        if replica is not None:
            chunks = self.chunks()
            mine = chunks[slice(*permutation.split(len(chunks), group.ordered_weights)[group.position])]
            with replica.optimizer_step.use_averages():
                for start, stop in mine:
                    if group.is_overtaken():
                        break
                    totals = [total + value for total, value in zip(totals, self.measure(start, stop), strict=True)]
            if group.is_overtaken():  # the group is not cut yet, so incomplete sums could still be reduced
                raise RuntimeError("ProcessGroup: a newer view")
        row = torch.tensor(totals, dtype=torch.float64)
        group.process_group.wait(dist.all_reduce(row, async_op=True))
        reduced: list[float] = row.tolist()
        return reduced

    def evaluation(self, totals: Sequence[float], step: int, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The evaluation that the sums over all members give, rounded to twelve digits to hide the order of the sum."""
        loss, *metrics = (float(f"{total / self.num_records:.12g}") for total in totals)
        named = dict(zip(self.names, metrics, strict=True))
        plain = {"step": step, "records": self.num_records, "loss": loss, "metrics": named}
        return self.rule.judge(earlier, plain)


def as_message(evaluation: dict[str, Any]) -> pb.Evaluation:
    return pb.Evaluation(**{**evaluation, "metrics": json.dumps(evaluation["metrics"])})


Surround = Callable[[GradientExchange, WorkerGroup, Callable[[], int]], GradientExchange]
"""What takes the place of an exchange of gradients in a group, at the step that the callable returns."""


def keep_exchange(exchange: GradientExchange, group: WorkerGroup, at: Callable[[], int]) -> GradientExchange:
    """Changes nothing."""
    return exchange


class LoopExtras(TypedDict, total=False):
    """Further arguments of `Elastic`; a recipe's job has all of them."""

    validation: Validation | None
    checkpointer: Checkpointer | None
    faults: tuple[Fault, ...]
    traits: model_traits.ModelTraits | None
    owned: bool
    """Whether the loop is Trueline's own: between steps nothing changes the model, and a forward may be given up."""
    exchange: Surround
    """Stands around the exchange of gradients."""


class Evaluations:
    """The evaluations of a worker's loop, if the job has a `Validation`."""

    def __init__(
        self,
        validation: Validation | None,
        plan: JobPlan,
        replica: Replica,
        group: WorkerGroup,
        link: ProgressReporter,
        checkpointer: Checkpointer | None,
    ) -> None:
        self.validation, self._plan, self._replica = validation, plan, replica
        self._group, self._link, self._checkpointer = group, link, checkpointer
        self._measured_at = -1

    def due(self, at: int) -> bool:
        """Whether an evaluation is due after `at` applied steps."""
        if self.validation is None or self._measured_at == at:
            return False
        return self.validation.rule.due(at, self._plan.epoch_steps, self._plan.total_steps)

    def forget(self) -> None:
        """The membership has changed: the current step's evaluation is due again."""
        self._measured_at = -1

    def measure(self, at: int, *, holds: bool) -> list[float]:
        """The sums of all members; one without the state adds zeros. Raises RuntimeError when a peer fails."""
        assert self.validation is not None
        totals = self.validation.measure_all(self._group, self._replica if holds else None)
        self._measured_at = at
        return totals

    def enter(self, totals: list[float]) -> None:
        """Enters the evaluation of the current state in the ledger, reports it, and has the best state written."""
        assert self.validation is not None
        ledger = self._replica.ledger
        evaluation = self.validation.evaluation(totals, ledger.steps, ledger.evaluations)
        ledger.evaluations.append(evaluation)
        self._link.report_evaluation(as_message(evaluation))
        if self._checkpointer is not None and self._group.rank == 0 and evaluation["best"]:
            self._checkpointer.after_step(self._replica, self._link, ends_epoch=False, best=True)

    def value(self) -> float | None:
        """The monitored value of the current state, smaller is better; None: it was not evaluated."""
        ledger = self._replica.ledger
        if self.validation is None or not ledger.evaluations or ledger.evaluations[-1]["step"] != ledger.steps:
            return None
        return self.validation.rule.value(ledger.evaluations[-1])
