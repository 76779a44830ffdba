"""How a step is computed: what the recipe or the command line may choose about the mathematics of a job."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from trueline.data.source import Source
from trueline.data.sources.mixture import SampledSource
from trueline.errors import UsageError
from trueline.train.settings import Shuffle, check_backend
from trueline.train.step.plan import DRAWN, IN_ORDER

SHARDS = 8
"""Shards of a step for a model that needs them, when nobody says how many records one has."""

LEAST = 4
"""Records of a shard at the least, then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Raises UsageError for values that cannot be."""

    micro_batch: int = 0
    """Records of one forward (gradient accumulation); 0: a worker's whole share of the step."""
    shuffle: Shuffle = "full"
    """`full`: any record may stand anywhere; `windows`: units of the source (row groups, chunks) are shuffled, and the
    records inside windows of them, so that each is decoded once an epoch; `none`: in the order of the source."""
    bitwise: bool = False
    """Gradients summed in an order that does not depend on the number of workers."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast of the recipe's forward and loss; `fp16` with a GradScaler."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together; 0: they are left as they are."""
    compile: bool = False
    ema: float = 0.0
    """Decay of the moving average of the parameters; 0: none."""
    find_unused_parameters: bool = False
    backend: str = "gloo"
    """What sums gradients: gloo (host memory), nccl, or `module:function` of a backend; see parallel/backend.py."""
    readers: int = 0
    """Processes of each worker that read records ahead; 0: the worker reads it between its steps."""

    def __post_init__(self) -> None:
        if self.micro_batch < 0:
            raise UsageError(f"micro_batch is {self.micro_batch}, expected 0 (none) or a number of records")
        if self.readers < 0:
            raise UsageError(f"readers is {self.readers}, expected 0 (none) or a number of processes for each worker")
        check_backend(self.backend)
        if self.shuffle not in get_args(Shuffle):
            raise UsageError(f"shuffle is '{self.shuffle}', expected {' or '.join(get_args(Shuffle))}")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise UsageError(f"precision is '{self.precision}', expected fp32, bf16 or fp16")
        if not 0.0 <= self.ema < 1.0:
            raise UsageError(f"ema is {self.ema}, expected a decay from 0 (none) to below 1, e.g. 0.999")
        if self.clip_norm < 0:
            raise UsageError(f"clip_norm is {self.clip_norm}, expected 0 (none) or a positive norm")

    @classmethod
    def of(cls, settings: Any) -> Options:
        """The options among `settings` (a JobSettings)."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def blocks(self, source: Source) -> tuple[int, ...]:
        """The blocks of the source, for the plan of a job. Raises UsageError for an order that would undo its own."""
        if self.shuffle == "none":
            return DRAWN if isinstance(source, SampledSource) else IN_ORDER
        if isinstance(source, SampledSource):
            raise UsageError(
                f"shuffle is '{self.shuffle}', and the data set has an order of its own, which that would undo",
                hint='set shuffle = "none" in the recipe (or --shuffle none, or Options(shuffle="none"))',
            )
        return tuple(unit.count for unit in source.units) if self.shuffle == "windows" else ()

    def shard_records(self, global_batch: int, *, needed: bool) -> int:
        """Records of a shard; 0: no shards. `needed`: the model looks at its neighbours in a batch, or draws.

        >>> Options().shard_records(64, needed=True), Options().shard_records(64, needed=False)
        (8, 0)
        """
        if self.micro_batch or not (needed or self.bitwise):
            return min(self.micro_batch, global_batch)
        return min(max(LEAST, -(-global_batch // SHARDS)), global_batch)
