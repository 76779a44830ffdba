"""The smallest model that is wrong in the same way: fewer idioms, then fewer statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.attack.grammar import Sketch, source
from bench.attack.sealed import Record

Attempt = Callable[[str], Record]


def kinds(record: Record) -> frozenset[str]:
    """In which ways a record is wrong."""
    found = {what.partition(":")[0] for what in record.get("wrong") or ()}
    if record.get("wrong_nonfinite"):
        found.add("nonfinite")
    if record.get("narrow"):
        found.add("narrow")
    return frozenset(found)


@dataclass(frozen=True)
class Small:
    """What remained, and what is wrong with it."""

    sketch: Sketch
    kinds: frozenset[str]
    record: Record
    tried: int

    def explains(self, sketch: Sketch, found: frozenset[str]) -> bool:
        """Whether a model is wrong because this one is in it."""
        mine = [idiom.name for idiom in self.sketch.idioms]
        theirs = iter(idiom.name for idiom in sketch.idioms)
        return bool(self.kinds & found) and all(name in theirs for name in mine)


def shrink(sketch: Sketch, record: Record, attempt: Attempt, most: int = 30) -> Small:
    """Makes up to `most` attempts."""
    wanted, tried = kinds(record), 0
    best = Small(sketch, wanted, record, 0)
    again = True
    while again:
        again = False
        for candidate in (*best.sketch.simpler(), *_fewer_lines(best.sketch)):
            if tried == most:
                return replace(best, tried=tried)
            tried += 1
            found = attempt(source(candidate))
            if kinds(found) & wanted:
                best, again = Small(candidate, kinds(found), found, tried), True
                break
    return replace(best, tried=tried)


def _fewer_lines(sketch: Sketch) -> Iterator[Sketch]:
    for at, idiom in enumerate(sketch.idioms):
        if len(idiom.lines) < 2:
            continue
        for drop in range(len(idiom.lines)):
            lines = (*idiom.lines[:drop], *idiom.lines[drop + 1 :])
            smaller = replace(idiom, lines=lines)
            yield replace(sketch, idioms=(*sketch.idioms[:at], smaller, *sketch.idioms[at + 1 :]))
