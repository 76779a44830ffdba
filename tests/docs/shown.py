"""Whether a program printed what a page shows.

A line `[...]` stands for any lines, `[...]` inside a line for any text. What differs from run to run is listed in
`VARYING`; a fraction may differ by `TOLERANCE`; everything else has to be equal, whole numbers and words of errors too.
What a program prints on a slow machine alone (`OF_SLOW_MACHINES`) need not be on the page.
"""

from __future__ import annotations

import json
import re

ELLIPSIS = "[...]"
VARYING = {
    "a duration": r"\d+(?:\.\d+)? (?:ms|s|min|minutes|seconds)\b",
    "a rate": r"records_per_s=\d+",
    "a digest": r"\b[0-9a-f]{10,64}(?:…)?(?![\w-])",
    "a local address": r"127\.0\.0\.1:\d+",
    "a size": r"\d+(?:\.\d+)? (?:kB|KiB|MB|MiB|GB|GiB)\b",
    "a difference near the rounding error": r"\d(?:\.\d+)?e-0[4-9]",
    "a date": r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?",
}
OF_SLOW_MACHINES = re.compile(r"  before step 0 the loss is tried .* \(\d+ s so far\)")
TOLERANCE = 0.03
"""Of the number itself, and at least this much: losses and probabilities depend on the processor's kernels."""
_FRACTION = r"-?\d+\.\d+(?:e[-+]?\d+)?"
_PARTS = re.compile(
    "|".join(
        [
            rf"(?P<any>{re.escape(ELLIPSIS)})",
            *(f"(?:{form})" for form in VARYING.values()),
            f"(?P<fraction>{_FRACTION})",
        ]
    )
)


def _pattern_of(line: str) -> tuple[re.Pattern[str], list[float]]:
    """A pattern for what may stand in place of `line`, with a group for each fraction, and those fractions."""
    pattern, fractions, end = "", [], 0
    for match in _PARTS.finditer(line):
        pattern += re.escape(line[end : match.start()])
        end = match.end()
        if match["any"]:
            pattern += ".*?"
        elif match["fraction"]:
            pattern += r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
            fractions.append(float(match["fraction"]))
        else:
            pattern += next(form for form in VARYING.values() if re.fullmatch(form, match.group()))
    return re.compile(pattern + re.escape(line[end:])), fractions


def same_line(shown: str, printed: str) -> bool:
    """Whether `printed` is the line `shown` but for what may vary."""
    pattern, fractions = _pattern_of(shown.rstrip())
    match = pattern.fullmatch(printed.rstrip())
    return match is not None and all(
        abs(float(found) - expected) <= TOLERANCE * max(1.0, abs(expected))
        for found, expected in zip(match.groups(), fractions, strict=True)
    )


def _spread(text: str) -> str:
    """JSON with a value a line; text that is none, as it is."""
    try:
        return json.dumps(json.loads(text), indent=1)
    except ValueError:
        return text


def json_difference(shown: str, printed: str) -> str | None:
    """As `difference`; the page may break the lines of a JSON document where it likes."""
    return difference(_spread(shown), _spread(printed))


def difference(shown: str, printed: str) -> str | None:
    """None if `printed` is what the page shows, else the first line that it lacks or has in addition."""
    wanted = shown.rstrip().splitlines()
    lines = [line for line in printed.rstrip().splitlines() if line in wanted or not OF_SLOW_MACHINES.fullmatch(line)]
    at, skips = 0, False
    for line in wanted:
        if line.strip() == ELLIPSIS:
            skips = True
            continue
        while at < len(lines) and not same_line(line, lines[at]):
            if not skips:
                return f"the page shows   {line}\nbut printed was  {lines[at]}"
            at += 1
        if at == len(lines):
            return f"the page shows   {line}\nbut no such line was printed"
        at, skips = at + 1, False
    if at < len(lines) and not skips:
        return f"printed was  {lines[at]}\nwhich the page does not show"
    return None
