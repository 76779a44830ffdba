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
    """`prunings`: shares to prune, each a model of its own, reached in `rounds`; `student`: its recipe, or `drop`: how
    many layers a ready one lacks; `matches`: submodules of the student that learn from submodules of the teacher;
    `distance`: the name of a function of the student's recipe by which it learns from the teacher's answers."""

    prunings: Sequence[Mapping[str, float]]
    rounds: int
    student: str | Path | None
    drop: str
    matches: Mapping[str, str]
    distance: str
    qat: bool
    checkpoint: Location | None

    @classmethod
    def of(
        cls, *, prune: str | Sequence[str] | None, rounds: int, distill: str | Path | None, drop: str | None,
        match: Sequence[str], distance: str | None, qat: bool, checkpoint: Location | None,
    ) -> DeriveWishes:  # fmt: skip
        """Raises UsageError."""
        if distill is not None and drop:
            raise UsageError("--distill names a student, and --drop makes one: give one of them")
        prunings = [prune] if isinstance(prune, str) else list(prune or ())
        if rounds < 1 or (rounds > 1 and not prunings):
            raise UsageError(
                f"rounds is {rounds}, expected 1 or more, and something to prune",
                hint="--prune channels=0.4 --rounds 4 removes 40 % in four parts, and trains after each",
            )
        if (match or distance) and distill is None and not drop:
            raise UsageError(
                f"{'--match' if match else '--distill-loss'} is about a student, and there is none",
                hint="name its recipe: --distill student/recipe.py, or let it be made: --drop 0.5",
            )
        return cls(
            prunings=[parse_amounts(text) for text in prunings], rounds=rounds, student=distill, drop=drop or "",
            matches=parse_matches(match), distance=distance or "", qat=qat, checkpoint=checkpoint,
        )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.prunings or self.student is not None or self.drop or self.qat)

    @property
    def starts_from_checkpoint(self) -> bool:
        """Whether the parent's parameters are needed; a student's own are trained first."""
        return bool(self.drop or self.matches or (self.student is None and (self.prunings or self.qat)))
