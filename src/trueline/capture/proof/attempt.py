"""What a capture reports: every format that was tried, and its verdict."""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path, PurePath
from typing import Any, Literal

from trueline import events
from trueline.runtime.session import Format

TableRows = Literal["float32", "float16", "int8"]
TABLE_FILE_MB = 2_000  # of one file of a table beside an ONNX program
State = Literal["refuse", "explicit"]
"""A model that writes its own buffers is refused, or they become inputs and outputs."""

_FOLDERS = re.compile(r"(?<![\w.)\]])/(?:[^\s/:'\"(),]+/)+")
"""The folders of a path in a message; of a quotient, `a/b/c`, nothing."""
_LINE = re.compile(r"(.+?):(\d+)(?=: |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One format that was tried."""

    format: Format
    verdict: Literal["proven", "refused", "untried"]
    """`untried`: the time limit ended first."""
    emitted: bool
    """Whether a program was made."""
    why: str
    """Empty when proven."""
    line: str
    """`file:line: source` of the user's code that explains a refusal or a bound, where one was found."""
    seconds: float
    size_bytes: int = 0
    probes: int = 0
    max_abs_error: float = 0.0
    given_error: float = 0.0
    """The largest absolute error on records of the user."""
    how: str = ""
    """The way it was made, where a format has several."""
    submodule: str = ""
    """The first submodule whose output a program that disagrees does not have: its name and class."""
    defined: str = ""
    """`file:line` of that class."""
    hint: str = ""
    """The advice that goes with a refusal, where there is one."""
    range: str = ""
    """The inputs that a proven program accepts, in words."""

    @property
    def reason(self) -> str:
        """`why`, with the submodule and where it is defined."""
        if not self.submodule:
            return self.why
        place = f" at {self.defined}" if self.defined else ""
        return f"{self.why}; the first submodule whose output differs: {self.submodule}{place}"

    @property
    def summary(self) -> str:
        """The attempt as one line for a terminal."""
        if self.verdict == "untried":
            return f"{self.format}: {self.why}{f'; it was at {self.line}' if self.line else ''}"
        if self.verdict == "refused":
            return f"{self.format}: refused ({self.reason}{f'; see {self.line}' if self.line else ''})"
        bound = f", because of {self.line}; `trueline doctor` may know a rewrite" if self.line else ""
        how = f" ({self.how})" if self.how else ""
        return f"{self.format}: proven for {self.range or 'the sizes of its example'}{bound}{how}"

    def as_record(self) -> dict[str, Any]:
        """For the bundle's lineage: without empty fields, and of `line` the file's name and number alone, since a
        bundle names no folder of the machine that captured it and holds no source."""
        place = _LINE.match(self.line)
        optional = {
            "why": _FOLDERS.sub("", self.why),
            "line": f"{PurePath(place[1]).name}:{place[2]}" if place else "",
            "how": self.how,
            "submodule": self.submodule,
            "range": self.range,
        }
        always = ("format", "verdict", "emitted", "seconds", "size_bytes", "probes", "max_abs_error")
        return {
            **{name: getattr(self, name) for name in always},
            "seconds": round(self.seconds, 3),
            **{name: value for name, value in optional.items() if value},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A sealed bundle and every attempt that was made on the way."""

    path: Path
    digest: str
    serve: str
    """Format of the program to serve."""
    programs: tuple[Attempt, ...]

    def _repr_html_(self) -> str:
        lines = [*(one.summary for one in self.programs), f"serve: {self.serve}", f"bundle: {self.path}"]
        return f"<pre>{escape(chr(10).join(lines))}</pre>"


def emit_event(attempt: Attempt) -> None:
    """Emits the event of a finished attempt."""
    if attempt.verdict != "proven":
        events.emit(f"program.{attempt.verdict}", format=attempt.format, why=attempt.reason, line=attempt.line)
        return
    fields = {
        name: getattr(attempt, name)
        for name in ("format", "probes", "max_abs_error", "given_error", "seconds", "range")
    }
    events.emit("program.proven", **fields, bound_by=attempt.line or None)
