"""What a capture says about itself: every format that was tried, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trueline.runtime.session import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One format that was tried."""

    format: Format
    verdict: Literal["proven", "refused"]
    why: str
    """Empty when proven."""
    line: str
    """`file:line: source` of the user's code that explains a refusal or a bound, where one was found."""
    seconds: float
    size_bytes: int
    probes: int
    max_abs_error: float
    how: str = ""
    """In which way it was made, where a format knows several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A sealed bundle and every attempt that was made on the way."""

    path: Path
    digest: str
    programs: tuple[Attempt, ...]
