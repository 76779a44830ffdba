"""The options of how a step is computed. Their fields are those of the same name in `JobSettings`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from trueline.data.source import Source
from trueline.data.sources.mixture import SampledSource
from trueline.errors import UsageError
from trueline.recipe.settings import StepSettings
from trueline.settings import check
from trueline.train.settings import check_backend
from trueline.train.step.plan import DRAWN, IN_ORDER

SHARDS = 8  # shards of a step, by default, for a model that needs them
LEAST = 4  # least number of records in such a shard


@dataclass(frozen=True, kw_only=True)
class Options(StepSettings):
    """The settings of a step, for custom loops too. Raises UsageError for values out of range."""

    def __post_init__(self) -> None:
        check(self)
        check_backend(self.backend)

    @classmethod
    def of(cls, settings: Any) -> Options:
        """The options among `settings` (a JobSettings)."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def blocks(self, source: Source) -> tuple[int, ...]:
        """The blocks of the job's plan. Raises UsageError if `shuffle` would undo the source's own order."""
        if self.shuffle == "none":
            return DRAWN if isinstance(source, SampledSource) else IN_ORDER
        if isinstance(source, SampledSource):
            raise UsageError(
                f"shuffle is '{self.shuffle}', and the data set has an order of its own, which that would undo",
                hint='set shuffle = "none" in the recipe (or --shuffle none, or Options(shuffle="none"))',
            )
        return tuple(unit.count for unit in source.units) if self.shuffle == "windows" else ()

    def shard_records(self, global_batch: int, *, needed: bool) -> int:
        """Records of a shard; 0: no shards. `needed`: by the model (`ModelTraits.needs_shards`).

        >>> Options().shard_records(64, needed=True), Options().shard_records(64, needed=False)
        (8, 0)
        """
        if self.micro_batch or not (needed or self.bitwise):
            return min(self.micro_batch, global_batch)
        return min(max(LEAST, -(-global_batch // SHARDS)), global_batch)
