"""The ledger: which records have been applied, kept inside the replicated state.

Every step carries a few extra numbers through the same allreduce as the gradients: how many records each worker
contributed, a digest of which ones, the generation and the step. All members see the same sums, compare them with
the plan of the step before they touch the parameters, and only then apply it. So a step is either applied with
exactly its records or not at all, and the counts testify to what the gradients held, not to what was planned.
Where the records are few enough, a tally rides along too: one counter for each record, summed by the allreduce.

Words of one worker (float32; sums stay below 2**24, where float32 is exact):

    0 records, low 12 bits     2 digest, low 12 bits     4 generation mod 4096     6 wish to regroup
    1 records, high bits       3 digest, high 12 bits    5 step mod 4096           7 1: it holds the state
                                                                                   8 records x mean loss

A member that is still taking the state (an observer) sends zeros, but for its wish.

Torch-free: the master uses it to know what an epoch's digest has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trueline.errors import RecordsMiscounted

WORDS = 9
DIGEST_BITS = 24
MASK = (1 << DIGEST_BITS) - 1

Ints = npt.NDArray[np.int64]


def digest(records: Ints) -> int:
    """A 24-bit digest of a set of record ids that does not depend on their order; digests of parts add up.

    Mixer: splitmix64 (Steele, Lea, Flood 2014).

    >>> (digest(np.array([5, 7])) + digest(np.array([1]))) % 2**24 == digest(np.array([7, 1, 5]))
    True
    """
    return int(mixed(records).sum(dtype=np.uint64)) & MASK


def mixed(records: Ints) -> npt.NDArray[np.uint64]:
    """Each record's part of a digest: the sum of parts, modulo 2**24, is the digest of the records."""
    z = records.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z & np.uint64(MASK)


def total(parts: npt.NDArray[np.uint64]) -> int:
    """The digest of records whose parts these are."""
    return int(parts.sum()) & MASK


def digest_of_all(num_records: int) -> int:
    """The digest of the records 0 to num_records - 1, in pieces of a million."""
    total = 0
    for start in range(0, num_records, 1 << 20):
        total += digest(np.arange(start, min(start + (1 << 20), num_records), dtype=np.int64))
    return total & MASK


def words(count: int, digest: int, generation: int, step: int, *, wish: bool) -> list[float]:
    """The words of one worker but for the last, records x mean loss, which is the worker's to fill in."""
    return [
        float(count & 4095),
        float(count >> 12),
        float(digest & 4095),
        float(digest >> 12),
        float(generation & 4095),
        float(step & 4095),
        float(wish),
        1.0,
    ]


def observing(*, wish: bool) -> list[float]:
    """The words of a member that takes part without holding the state."""
    return [0.0] * 6 + [float(wish), 0.0, 0.0]


def counted(words: Sequence[float]) -> int:
    """How many records `words` say, of one worker or summed."""
    return round(words[0]) + (round(words[1]) << 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """The words of all workers, summed."""

    count: int
    digest: int
    wishes: int
    loss: float
    """Mean over the step's records."""


def check(summed: list[float], *, records: int, plan_digest: int, generation: int, step: int) -> Sums:
    """Compares the summed words with the plan of the step: `records` in number. Raises RecordsMiscounted."""
    low, high, digest_low, digest_high, generations, steps, wishes, holders = map(round, summed[:8])
    count = low + (high << 12)
    found = (digest_low + (digest_high << 12)) & MASK
    same_step = steps == holders * (step & 4095) and generations == holders * (generation & 4095)
    if count != records or found != plan_digest or not same_step or not holders:
        raise RecordsMiscounted(
            f"step {step} of generation {generation}: the gradients hold {count} records with digest {found:06x}, "
            f"the plan has {records} with digest {plan_digest:06x}; the step was not applied",
            hint="this is a defect of Trueline or of a changing data set; please report it with the job's logs",
        )
    return Sums(count=count, digest=found, wishes=wishes, loss=summed[8] / max(count, 1))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What of a step was set aside: its ids in the plan, and which records of the source would have stood there. The
    two differ where the source has an order of its own."""

    ids: tuple[int, ...] = ()
    of: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What has been applied so far. It travels with the parameters: into checkpoints and to joining workers."""

    num_records: int
    steps: int = 0
    """Optimizer steps applied in the job."""
    epoch_steps: int = 0
    epoch_records: int = 0
    epoch_digest: int = 0
    epoch_left_out: list[int] = field(default_factory=list)
    """Ids of its applied steps that were set aside,"""
    epoch_left_out_of: list[int] = field(default_factory=list)
    """and the records of the source that they stand for."""
    tally: npt.NDArray[np.int32] | None = None
    """Applications of each record in the current epoch, as counted by the gradients; None: too many records."""
    certificates: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """What was measured while training, oldest first: step, records, loss, metrics, best, stop."""

    @property
    def stopped(self) -> bool:
        """True when an evaluation ended the job."""
        return bool(self.evaluations) and bool(self.evaluations[-1]["stop"])

    def apply(self, sums: Sums, tally: npt.NDArray[np.int32] | None, left_out: LeftOut | None = None) -> None:
        """Enters an applied step. `tally` is how often each record was in it, `left_out` what was set aside of it."""
        if left_out is not None:
            self.epoch_left_out += left_out.ids
            self.epoch_left_out_of += left_out.of
        self.steps += 1
        self.epoch_steps += 1
        self.epoch_records += sums.count
        self.epoch_digest = (self.epoch_digest + sums.digest) & MASK
        if self.tally is not None and tally is not None:
            self.tally += tally

    def close_epoch(self, epoch: int, *, partial: bool = False) -> dict[str, Any]:
        """Ends epoch `epoch` with its certificate and begins the next one.

        `partial`: the job was stopped within it, so that records may have been applied no time.
        """
        kept = None if self.tally is None else np.delete(self.tally, self.epoch_left_out)
        named = sorted(zip(self.epoch_left_out, self.epoch_left_out_of, strict=True))
        out, out_of = [one for one, _ in named], [one for _, one in named]
        certificate = {
            "epoch": epoch,
            "steps": self.epoch_steps,
            "records": self.epoch_records,
            "digest": self.epoch_digest,
            "tally_min": -1 if kept is None or partial or not len(kept) else int(kept.min()),
            "tally_max": -1 if self.tally is None else int(self.tally.max()),
            "set_aside": out,
            "set_aside_of": out_of if out_of != out else [],
        }
        self.certificates.append(certificate)
        self.epoch_steps = self.epoch_records = self.epoch_digest = 0
        self.epoch_left_out, self.epoch_left_out_of = [], []
        if self.tally is not None:
            self.tally[:] = 0
        return certificate

    def as_tree(self) -> dict[str, Any]:
        return {
            "num_records": self.num_records,
            "steps": self.steps,
            "epoch_steps": self.epoch_steps,
            "epoch_records": self.epoch_records,
            "epoch_digest": self.epoch_digest,
            "epoch_left_out": list(self.epoch_left_out),
            "epoch_left_out_of": list(self.epoch_left_out_of),
            "tally": None if self.tally is None else self.tally.copy(),
            "certificates": [dict(certificate) for certificate in self.certificates],
            "evaluations": [dict(evaluation) for evaluation in self.evaluations],
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Ledger:
        found = {"epoch_left_out_of": list(tree["epoch_left_out"]), **tree}
        if found["tally"] is not None:
            found["tally"] = np.array(found["tally"], dtype=np.int32)
        return cls(**found)
