"""What a capture says about itself: every format that was tried, and what became of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from trueline import events
from trueline.runtime.session import Format

State = Literal["refuse", "explicit"]
"""What becomes of a model that writes its own buffers: refused, or they become inputs and outputs."""

_FOLDERS = re.compile(r"(?<![\w.)\]])/(?:[^\s/:'\"(),]+/)+")
"""The folders of a path that a message names; of a quotient, `a/b/c`, nothing."""
_LINE = re.compile(r"(.+?):(\d+)(?=: |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One format that was tried."""

    format: Format
    verdict: Literal["proven", "refused"]
    emitted: bool
    """Whether there was a program to ask; what is refused before could not be made."""
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
            return f"{self.format}: refused ({self.reason}{f'; see {self.line}' if self.line else ''})"
        bound = f", because of {self.line}; `trueline doctor` may know a rewrite" if self.line else ""
        how = f" ({self.how})" if self.how else ""
        return f"{self.format}: proven for {self.range or 'the sizes of its example'}{bound}{how}"

    def as_record(self) -> dict[str, Any]:
        """For the bundle's lineage: without what is empty, and of `line` the file's name and number alone.

        A bundle names no folder of the machine that captured it and holds no source.
        """
        found = _LINE.match(self.line)
        said = {
            "why": _FOLDERS.sub("", self.why),
            "line": f"{PurePath(found[1]).name}:{found[2]}" if found else "",
            "how": self.how,
            "submodule": self.submodule,
            "range": self.range,
        }
        return {
            "format": self.format,
            "verdict": self.verdict,
            "emitted": self.emitted,
            "seconds": round(self.seconds, 3),
            "size_bytes": self.size_bytes,
            "probes": self.probes,
            "max_abs_error": self.max_abs_error,
        } | {name: value for name, value in said.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A sealed bundle and every attempt that was made on the way."""

    path: Path
    digest: str
    serve: str
    """Format of the program to serve."""
    programs: tuple[Attempt, ...]


def emit_event(attempt: Attempt) -> None:
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
