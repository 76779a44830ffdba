"""What a capture says about itself: every format that was tried, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trueline import events
from trueline.runtime.session import Format

State = Literal["refuse", "explicit"]
"""What becomes of a model that writes its own buffers: refused, or they become inputs and outputs."""


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
    submodule: str = ""
    """The first submodule whose output a program that disagrees does not have: its name and class."""
    defined: str = ""
    """`file:line` of that class."""
    hint: str = ""
    """What to do about a refusal, where it is known."""
    range: str = ""
    """What a proven program may be asked, in words."""

    @property
    def reason(self) -> str:
        """`why`, with the submodule and where it is defined."""
        if not self.submodule:
            return self.why
        place = f" at {self.defined}" if self.defined else ""
        return f"{self.why}; the first submodule whose output differs: {self.submodule}{place}"

    @property
    def told(self) -> str:
        """The attempt as one line for a terminal."""
        if self.verdict == "refused":
            return f"{self.format}: refused ({self.reason})"
        bound = f", because of {self.line}; `trueline doctor` may know a rewrite" if self.line else ""
        how = f" ({self.how})" if self.how else ""
        return f"{self.format}: proven for {self.range or 'the sizes of its example'}{bound}{how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A sealed bundle and every attempt that was made on the way."""

    path: Path
    digest: str
    serve: str
    """The program that a server takes."""
    programs: tuple[Attempt, ...]


def tell(attempt: Attempt) -> None:
    """Emits the event of an attempt that has come to its end."""
    if attempt.verdict == "proven":
        events.emit(
            "program.proven",
            format=attempt.format,
            probes=attempt.probes,
            max_abs_error=attempt.max_abs_error,
            seconds=attempt.seconds,
            range=attempt.range,
            bound_by=attempt.line or None,
        )
    else:
        events.emit("program.refused", format=attempt.format, why=attempt.reason, line=attempt.line)
