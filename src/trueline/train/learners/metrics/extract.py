"""Evaluation metrics from lines of a log, as FfDL's regex_extractor finds them. Pure.

A group's regex is matched from the beginning of each of the last `lookahead` lines, with `.` for line ends too; the
lines of a match are used up, and its values are a record. FfDL matched from the oldest line alone, which lost the last
records of a log, and used up all lines. `%{FLOAT:loss}` names a pattern of the library below. Source: FfDL's
metrics/log_collectors/regex_extractor (extract_from_log.py, patterns/common-patterns).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

PATTERNS: Mapping[str, str] = {
    "GLOG_STAMP": r"[EFIW]\d\d\d\d\s+\d\d\:\d\d\:\d*\.\d+",
    "TIMESTAMP": r"(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}[.]\d+?Z|[-+]\d{2}:\d{2}?)",
    "FLOAT": r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?",
    "INT": r"[-+]?\d+",
    "INT_ANY": r"[-+]?(0[xX][\dA-Fa-f]+|0[0-7]*|\d+)",
    "HEX": r"[-+]?(0[xX])?[\dA-Fa-f]+",
}
STEPS = ("iteration", "step", "global_step", "epoch")
"""Names of an etime that counts; the first one that a record has is its step."""
_NAMED = re.compile(r"%\{(\w+)(?::(\w+))?\}")
MOST_LINE = 10_000
"""Characters of a line that are looked at."""


class MetricGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Scalars and times by name: each a type and a value, or `$GROUP` of the regex."""

    name: str
    regex: str
    scalars: dict[str, tuple[str, str]] = {}
    etimes: dict[str, tuple[str, str]] = {}


class MetricRecord(NamedTuple):
    """What one match has found. `scalars`: numbers alone."""

    group: str
    step: int | None
    """None: the times count nothing."""
    scalars: dict[str, float]


def compile_regex(regex: str) -> "re.Pattern[str]":
    """The regex with its names of patterns replaced. Raises re.error, KeyError for an unknown pattern."""

    def replace(match: "re.Match[str]") -> str:
        if match[1] not in PATTERNS:
            raise KeyError(f"there is no pattern {match[1]} (has: {', '.join(PATTERNS)})")
        return f"(?P<{match[2]}>{PATTERNS[match[1]]})" if match[2] else f"(?:{PATTERNS[match[1]]})"

    return re.compile(_NAMED.sub(replace, regex), re.MULTILINE | re.DOTALL)


class MetricExtractor:
    """Finds records in the lines of one log, which come one after another."""

    def __init__(self, groups: Sequence[MetricGroup], lookahead: int) -> None:
        self._groups = [(group, compile_regex(group.regex)) for group in groups]
        self._lookahead, self._window = lookahead, list[str]()

    def read(self, line: str) -> list[MetricRecord]:
        """The records that the window with this line, whose end it has, holds."""
        self._window = [*self._window, line if len(line) <= MOST_LINE else line[:MOST_LINE] + "\n"][-self._lookahead :]
        found = []
        while (record := self._find()) is not None:
            found.append(record)
        return found

    def _find(self) -> MetricRecord | None:
        for first in range(len(self._window)):
            text = "".join(self._window[first:])
            for group, regex in self._groups:
                match = regex.match(text)
                if match is not None:
                    lines = max(1, match[0].removesuffix("\n").count("\n") + 1)
                    del self._window[first : first + lines]
                    return _make_record(group, match.groupdict())
        return None


def _make_record(group: MetricGroup, found: Mapping[str, str | None]) -> MetricRecord:
    times = {name: _convert(value, found) for name, (_, value) in group.etimes.items()}
    scalars = {name: _convert(value, found) for name, (_, value) in group.scalars.items()}
    return MetricRecord(group.name, find_step(times), {key: one for key, one in scalars.items() if one is not None})


def _convert(value: str, found: Mapping[str, str | None]) -> float | None:
    """None: it is no number."""
    text = found.get(value[1:]) if value.startswith("$") else value
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def find_step(times: Mapping[str, float | None]) -> int | None:
    """The step in the times of a record.

    >>> find_step({"timestamp": None, "epoch": 2.0}), find_step({})
    (2, None)
    """
    for name in (*STEPS, *times):
        value = times.get(name)
        if value is not None and math.isfinite(value):
            return int(value)
    return None


def parse_emetrics(line: str) -> MetricRecord | None:
    """A line of an evaluation-metrics.txt: an EMetrics record as JSON. None: it is none."""
    try:
        record = json.loads(line)
        group = str(record.get("grouplabel") or record.get("group_label") or "metrics")
        read = {
            kind: {name: _convert(str(one["value"]), {}) for name, one in (record.get(kind) or {}).items()}
            for kind in ("etimes", "values")
        }
    except (ValueError, AttributeError, KeyError, TypeError):
        return None
    scalars = {name: value for name, value in read["values"].items() if value is not None}
    return MetricRecord(group, find_step(read["etimes"]), scalars)


def find_loss(scalars: Mapping[str, float]) -> float | None:
    """The loss among the scalars of a record.

    >>> find_loss({"accuracy": 0.5, "avg_loss": 1.25})
    1.25
    """
    named = [value for name, value in scalars.items() if "loss" in name.lower()]
    return named[0] if named else None
