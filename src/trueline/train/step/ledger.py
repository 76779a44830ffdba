"""The ledger: which records have been applied. It is part of the replicated state.

Every step sends a `StepAccount` through the same all-reduce as the gradients. All members see the same sums and compare
them with the plan before they touch the parameters: a step is applied with exactly its records or not at all, and the
counts prove what the gradients held, not what was planned. Torch-free: the master computes digests too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from trueline.errors import RecordsMiscounted

DIGEST_BITS = 24
MASK = (1 << DIGEST_BITS) - 1
_BITS = DIGEST_BITS // 2
_LOW = (1 << _BITS) - 1
_LARGEST = float(np.finfo(np.float32).max)

Ints = npt.NDArray[np.int64]


def digest(records: Ints) -> int:
    """A 24-bit digest of a set of record ids that does not depend on their order; digests of parts add up.

    Mixer: splitmix64 (Steele, Lea, Flood 2014).

    >>> (digest(np.array([5, 7])) + digest(np.array([1]))) % 2**24 == digest(np.array([7, 1, 5]))
    True
    """
    return sum_digest(mix_ids(records))


def mix_ids(records: Ints) -> npt.NDArray[np.uint64]:
    """Each record's part of a digest."""
    z = records.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z & np.uint64(MASK)


def sum_digest(parts: npt.NDArray[np.uint64]) -> int:
    """The digest of the records that have these parts: their sum modulo 2**24."""
    return int(parts.sum()) & MASK


def digest_of_all(num_records: int) -> int:
    """The digest of the records 0 to num_records - 1, computed a million at a time."""
    total = 0
    for start in range(0, num_records, 1 << 20):
        total += digest(np.arange(start, min(start + (1 << 20), num_records), dtype=np.int64))
    return total & MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """Travels through the all-reduce beside the gradients of a step: one member's account, or the sum over all.

    A member that holds the state fills in all fields, an observer (still receiving the state) only `wishes`.
    """

    count: int = 0  # records in the gradients
    digest: int = 0  # of these records, modulo 2**24
    generations: int = 0  # the generation modulo 4096, once for each holder
    steps: int = 0  # the step modulo 4096, once for each holder
    wishes: int = 0  # members that want to regroup
    holders: int = 0  # members that hold the state
    loss_sum: float = 0.0  # losses times what each of them counts
    weight: float = 0.0  # what the losses count together: records, or their weights
    rates: Sequence[float] = ()  # records a second, by rank
    settings: Sequence[float] = ()  # of the optimizer, from the members with records: `optimizer_settings.py`
    LOSS_WORD: ClassVar[int] = 8  # index of `loss_sum` in `pack()`

    @classmethod
    def of_holder(
        cls, *, count: int, digest: int, generation: int, step: int, wish: bool, loss_sum: float = 0.0,
        weight: float | None = None, rates: Sequence[float] = (),
    ) -> StepAccount:  # fmt: skip
        """The account of one member that holds the state; `weight`: by default `count`."""
        return cls(
            count=count, digest=digest & MASK, generations=generation & _LOW, steps=step & _LOW, wishes=int(wish),
            holders=1, loss_sum=loss_sum, weight=float(count) if weight is None else weight, rates=rates,
        )  # fmt: skip

    @property
    def loss(self) -> float:
        """Mean over the records, or over their weights."""
        return self.loss_sum / (self.weight or max(self.count, 1))

    @staticmethod
    def num_words(size: int) -> int:
        """Length of `pack()` in a group of `size` members, without settings."""
        return 10 + size

    def pack(self) -> list[float]:
        """As words whose sums over all members make the account of the step.

        A word travels as float32 and its sum stays below 2**24, where float32 is exact, so numbers of 24 bits take two
        words. A `loss_sum` beyond float32 becomes infinite.
        """
        return [
            float(self.count & _LOW), float(self.count >> _BITS),
            float(self.digest & _LOW), float(self.digest >> _BITS),
            float(self.generations), float(self.steps), float(self.wishes), float(self.holders),
            self.loss_sum if not abs(self.loss_sum) > _LARGEST else math.copysign(math.inf, self.loss_sum),
            self.weight, *self.rates, *self.settings,
        ]  # fmt: skip

    @classmethod
    def unpack(cls, words: Sequence[float], *, settings: int = 0) -> StepAccount:
        """The account of packed words, or of their sums; the last `settings` of them are such."""
        end = len(words) - settings
        low, high, digest_low, digest_high, generations, steps, wishes, holders = map(round, words[:8])
        return cls(
            count=low + (high << _BITS), digest=(digest_low + (digest_high << _BITS)) & MASK, generations=generations,
            steps=steps, wishes=wishes, holders=holders, loss_sum=words[cls.LOSS_WORD], weight=words[9],
            rates=words[10:end], settings=words[end:] if settings else (),
        )  # fmt: skip

    def check(self, *, records: int, plan_digest: int, generation: int, step: int) -> None:
        """Compares the sum over all members with the plan of the step. Raises RecordsMiscounted."""
        holders = self.holders
        same_step = self.steps == holders * (step & _LOW) and self.generations == holders * (generation & _LOW)
        if self.count != records or self.digest != plan_digest or not same_step or not holders:
            raise RecordsMiscounted(
                f"step {step} of generation {generation}: the gradients hold {self.count} records with digest "
                f"{self.digest:06x}, the plan has {records} with digest {plan_digest:06x}; the step was not applied",
                hint="this is a defect of Trueline or of a changing data set; please report it with the job's logs",
            )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was set aside of a step. `ids` and `of` differ if the source has an order of its own."""

    ids: tuple[int, ...] = ()  # ids in the plan
    of: tuple[int, ...] = ()  # the records of the source at these ids


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What has been applied so far. Checkpoints and state transfers carry it with the parameters."""

    num_records: int
    steps: int = 0  # optimizer steps applied in the job
    epoch_steps: int = 0
    epoch_records: int = 0
    epoch_digest: int = 0
    epoch_left_out: list[int] = field(default_factory=list)  # ids set aside in the epoch's applied steps
    epoch_left_out_of: list[int] = field(default_factory=list)  # their records in the source
    tally: npt.NDArray[np.int32] | None = None
    """Applications of each record in the current epoch, counted by the gradients; None: too many records."""
    certificates: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Oldest first: step, records, loss, metrics, best, stop."""
    loss: dict[str, Any] = field(default_factory=dict)
    """How the loss of a step is made: `reduction`, and `shard_records` if each loss is of a whole shard."""

    @property
    def stopped(self) -> bool:
        """Whether an evaluation ended the job."""
        return bool(self.evaluations) and bool(self.evaluations[-1]["stop"])

    def apply(self, account: StepAccount, tally: npt.NDArray[np.int32] | None, left_out: LeftOut | None = None) -> None:
        """Enters the account of an applied step. `tally`: how often each record was in it."""
        if left_out is not None:
            self.epoch_left_out += left_out.ids
            self.epoch_left_out_of += left_out.of
        self.steps += 1
        self.epoch_steps += 1
        self.epoch_records += account.count
        self.epoch_digest = (self.epoch_digest + account.digest) & MASK
        if self.tally is not None and tally is not None:
            self.tally += tally

    def close_epoch(self, epoch: int, *, partial: bool = False) -> dict[str, Any]:
        """Ends `epoch` with its certificate and begins the next one. `partial`: the job was stopped within it."""
        kept = None if self.tally is None else np.delete(self.tally, self.epoch_left_out)
        pairs = sorted(zip(self.epoch_left_out, self.epoch_left_out_of, strict=True))
        out, out_of = [record for record, _ in pairs], [record for _, record in pairs]
        certificate = {
            "epoch": epoch, "steps": self.epoch_steps, "records": self.epoch_records, "digest": self.epoch_digest,
            "tally_min": -1 if kept is None or partial or not len(kept) else int(kept.min()),
            "tally_max": -1 if self.tally is None else int(self.tally.max()),
            "set_aside": out, "set_aside_of": out_of if out_of != out else [], **self.loss,
        }  # fmt: skip
        self.certificates.append(certificate)
        self.epoch_steps = self.epoch_records = self.epoch_digest = 0
        self.epoch_left_out, self.epoch_left_out_of = [], []
        if self.tally is not None:
            self.tally[:] = 0
        return certificate

    def as_tree(self) -> dict[str, Any]:
        """A copy of all fields, for `from_tree`. What grows with the epochs is JSON text: as nodes of a tree, thousands
        of certificates would take longer to send than the parameters, and a death is healed by sending the state."""
        tree = {name.name: getattr(self, name.name) for name in fields(self)}
        tree["tally"] = None if self.tally is None else self.tally.copy()
        tree["epoch_left_out"], tree["epoch_left_out_of"] = list(self.epoch_left_out), list(self.epoch_left_out_of)
        tree["certificates"] = msgspec.json.encode(self.certificates, enc_hook=int).decode()
        tree["evaluations"] = json.dumps(self.evaluations)  # with NaN as it is
        return tree

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Ledger:
        tree = {"epoch_left_out_of": list(tree["epoch_left_out"]), **tree}
        if tree["tally"] is not None:
            tree["tally"] = np.array(tree["tally"], dtype=np.int32)
        return cls(**tree | {name: read_list(tree, name) for name in ("certificates", "evaluations")})


def read_list(tree: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The certificates or evaluations of `Ledger.as_tree`; checkpoints of earlier releases have lists.

    >>> read_list(Ledger(num_records=4, certificates=[{"epoch": 0}]).as_tree(), "certificates")
    [{'epoch': 0}]
    """
    found = tree.get(name) or []
    return list(json.loads(found)) if isinstance(found, str) else found
