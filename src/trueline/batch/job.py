"""What `evaluate` and `predict` have in common: their options, and the work that a pool's workers get of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, TypeVar

from trueline import events
from trueline.batch.pool import Work
from trueline.recipe.contract import Mode, Recipe
from trueline.recipe.load import load_recipe, locate_recipe

Result = TypeVar("Result")
PART_RECORDS = 16384
"""Records in a part: a file of some MB, and what is computed again when its process dies."""


class BatchOptions(TypedDict, total=False):
    """Options of `trueline.evaluate` and `trueline.predict`."""

    mode: Mode
    """The records: those of the recipe's `dataset(mode)`."""
    batch: int
    """Records in a call of the model (256)."""
    workers: int
    """Processes of one thread each that share the batches (1: this process alone)."""
    device: str | None
    """Where models compute: auto, cpu, cuda, cuda:N; None: the recipe's own, else auto."""
    format: str
    """Of the parts in a folder: `parquet` or `jsonl`."""
    part_records: int
    """Records in a part (16384)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    recipe: Recipe
    given: object
    """What the caller passed as the recipe."""
    source: str
    """The checkpoint or bundle; empty for the untrained model."""
    mode: Mode
    batch: int = 256
    workers: int = 1
    device: str = "auto"
    format: str = "parquet"
    part_records: int = PART_RECORDS

    @classmethod
    def of(cls, given: str | Path | Recipe, source: str, options: BatchOptions, *, mode: Mode) -> BatchJob:
        """The job of a call; `mode` is what its `options` may override."""
        recipe = given if isinstance(given, Recipe) else load_recipe(given)
        chosen: BatchOptions = {"mode": mode, **options}
        chosen["device"] = options.get("device") or recipe.defaults.device
        return cls(recipe=recipe, given=given, source=source, **chosen)  # type: ignore[arg-type]  # device is not None

    def num_records(self) -> int:
        return self.recipe.source(self.mode).num_records

    def work(self, entry: str, *, num_records: int, chunk: int) -> Work:
        """The Work for a pool whose chunks have `chunk` records. Raises UsageError when workers cannot load the
        recipe."""
        return Work(
            entry=entry, recipe=locate_recipe(self.recipe, self.given, otherwise=", or leave workers at 1"),
            recipe_digest=self.recipe.digest, source=self.source, mode=self.mode, num_records=num_records, batch=chunk,
            device=self.device,
        )  # fmt: skip


def compute_chunks(count: int, compute: Callable[[int, int], Result], size: int, event: str) -> list[Result]:
    """Computes the records [0, count) in chunks of `size`, in this process; emits `event` after each."""
    results = []
    for start in range(0, count, size):
        stop = min(start + size, count)
        results.append(compute(start, stop))
        events.emit(event, done=stop, total=count)
    return results
