"""What a user wants to be trained before anything is quantized. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.compress.derive.plan import parse_amounts, parse_matches
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveWishes:
    """`amounts`: shares to prune; `student`: its recipe, or `drop`: how many layers a ready one lacks; `matches`:
    submodules of the student that learn from submodules of the teacher."""

    amounts: Mapping[str, float]
    student: str | Path | None
    drop: str
    matches: Mapping[str, str]
    qat: bool
    checkpoint: Location | None

    @classmethod
    def of(
        cls, *, prune: str | None, distill: str | Path | None, drop: str | None, match: Sequence[str], qat: bool,
        checkpoint: Location | None,
    ) -> DeriveWishes:  # fmt: skip
        """Raises UsageError."""
        if distill is not None and drop:
            raise UsageError("--distill names a student, and --drop makes one: give one of them")
        if match and distill is None and not drop:
            raise UsageError(
                "--match is about a student, and there is none",
                hint="name its recipe: --distill student/recipe.py, or let it be made: --drop 0.5",
            )
        return cls(
            amounts=parse_amounts(prune) if prune else {}, student=distill, drop=drop or "",
            matches=parse_matches(match), qat=qat, checkpoint=checkpoint,
        )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.amounts or self.student is not None or self.drop or self.qat)

    @property
    def starts_from_checkpoint(self) -> bool:
        return bool(self.amounts or self.qat or self.drop or self.matches)
