"""Evaluation while training: when it is due, what is best, when to stop. Shared by all members, redone after a regroup.

Each member measures its part of the evaluation records; the sums are reduced over the group, so every record counts
once and none is padded. What is due is a function of the steps applied alone, so all members turn to it together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trueline.data.order import permutation
from trueline.errors import UsageError, join_names
from trueline.train.step.group import WorkerGroup
from trueline.train.step.replica import Replica
from trueline.wire import train_pb2 as pb

BATCH = 256
"""Most records of a chunk."""
CHUNKS = 32
"""Chunks at the least, where there are so many records: what members share out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    every: int
    """Steps; 0: at the end of each epoch."""
    monitor: str
    """`loss` or a metric, smaller is better; `-NAME`: larger is better."""
    patience: int = 0
    """Evaluations without a new best one after which training stops; 0: never."""

    def due(self, steps: int, epoch_steps: int, last: int) -> bool:
        """True when an evaluation belongs after so many applied steps of `last`; the last one is always evaluated.

        >>> rule = Rule(every=3, monitor="loss")
        >>> [steps for steps in range(9) if rule.due(steps, epoch_steps=4, last=8)]
        [3, 6, 8]
        """
        return steps > 0 and (steps % (self.every or epoch_steps) == 0 or steps == last)

    def value(self, evaluation: dict[str, Any]) -> float:
        """What is compared; smaller is better."""
        name = self.monitor.removeprefix("-")
        found = evaluation["loss"] if name == "loss" else evaluation["metrics"][name]
        return -float(found) if self.monitor.startswith("-") else float(found)

    def judge(self, earlier: Sequence[dict[str, Any]], evaluation: dict[str, Any]) -> dict[str, Any]:
        """`evaluation` with `best` and `stop`, seen after `earlier` ones."""
        value = self.value(evaluation)
        best = not math.isnan(value) and all(value < self.value(other) for other in earlier if other["best"])
        since = next((i for i, other in enumerate(reversed(earlier)) if other["best"]), len(earlier))
        stop = bool(self.patience) and not best and since + 1 >= self.patience
        return {**evaluation, "best": best, "stop": stop}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """`measure(start, stop)` gives the sums over those records: the loss, then each metric in the order of `names`."""

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
        """Bounds of the records that are measured together, whoever does it."""
        size = min(BATCH, max(1, self.num_records // CHUNKS))
        return [(start, min(start + size, self.num_records)) for start in range(0, self.num_records, size)]

    def sums(self, chunks: Sequence[tuple[int, int]], overtaken: Callable[[], bool]) -> list[float]:
        """The sums over `chunks`; what it has so far when the group is `overtaken` by a new view."""
        totals = [0.0] * (1 + len(self.names))
        for start, stop in chunks:
            if overtaken():
                break
            found = self.measure(start, stop)
            totals = [total + one for total, one in zip(totals, found, strict=True)]
        return totals

    def measure_all(self, group: WorkerGroup, replica: Replica | None) -> list[float]:
        """The sums of all members, measured with the averaged parameters if any are kept.

        `replica` is None for a member without the state: it adds zeros. Raises RuntimeError when a peer fails.
        """
        totals = [0.0] * (1 + len(self.names))
        if replica is not None:
            chunks = self.chunks()
            mine = chunks[slice(*permutation.split(len(chunks), group.ordered_weights)[group.position])]
            with replica.use_averages():
                totals = self.sums(mine, group.is_overtaken)
            if group.is_overtaken():  # before the cut they could still be summed, and they are of a part
                raise RuntimeError("ProcessGroup: a newer view")
        row = torch.tensor(totals, dtype=torch.float64)
        group.process_group.wait(dist.all_reduce(row, async_op=True))
        found: list[float] = row.tolist()
        return found

    def enter(self, replica: Replica, totals: Sequence[float]) -> dict[str, Any]:
        """The evaluation that `totals` say, entered in the ledger."""
        ledger = replica.ledger
        evaluation = self.evaluation(totals, ledger.steps, ledger.evaluations)
        ledger.evaluations.append(evaluation)
        return evaluation

    def evaluation(self, totals: Sequence[float], step: int, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The evaluation that the sums over all members say. Twelve digits: the order of the sums does not show."""
        loss, *metrics = (float(f"{total / self.num_records:.12g}") for total in totals)
        named = dict(zip(self.names, metrics, strict=True))
        plain = {"step": step, "records": self.num_records, "loss": loss, "metrics": named}
        return self.rule.judge(earlier, plain)


def as_message(evaluation: dict[str, Any]) -> pb.Evaluation:
    return pb.Evaluation(**{**evaluation, "metrics": json.dumps(evaluation["metrics"])})
