"""The master's durable log: one SQLite file in WAL mode, appended to and never changed.

Rows are facts about the surviving state, which the log follows and never leads: VIEW before a view is published,
COMMIT after a step was applied, TRUNCATE when the survivors turned out to have applied less. A master that comes
back reads the rows in order and knows generation, members, incarnations, progress and checkpoints. A row that a
power cut lost costs nothing but the master's memory of it: the workers hold the truth and say it again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueline.engine.contract import parse_ref
from trueline.errors import StorageError
from trueline.train.members import Member, State

Row = tuple[str, dict[str, Any]]


class Journal:
    """Raises StorageError when the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS log (seq INTEGER PRIMARY KEY, kind TEXT, body TEXT)")
        except sqlite3.Error as error:
            raise StorageError(f"the journal {path} cannot be opened: {error}") from error

    def append(self, *rows: Row) -> None:
        """Writes the rows in one transaction; they are on the disk when it returns."""
        if not rows:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT INTO log (kind, body) VALUES (?, ?)",
                [(kind, json.dumps(body)) for kind, body in rows],
            )
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StorageError(f"the journal {self.path} cannot be written: {error}") from error

    def rows(self) -> Iterator[Row]:
        for kind, body in self._db.execute("SELECT kind, body FROM log ORDER BY seq"):
            yield kind, json.loads(body)

    def close(self) -> None:
        self._db.close()


def replay(rows: Iterator[Row], now: float) -> tuple[State, list[Row]]:
    """The members' state that the log tells of, and the rows themselves. Workers of the last view are taken to live

    until the engine or their silence says otherwise; a view stays in force, so that nobody has to regroup only
    because the master was away.
    """
    state, seen = State(), list(rows)
    for kind, body in seen:
        state = _apply(state, kind, body, now)
    return state, seen


def _apply(state: State, kind: str, body: dict[str, Any], now: float) -> State:
    match kind:
        case "START":
            _, slot, incarnation = parse_ref(body["ref"])
            return replace(state, incarnations={**state.incarnations, slot: incarnation + 1})
        case "VIEW":
            view = tuple(body["members"])
            return replace(
                state,
                phase="running" if view else "gathering",
                generation=body["generation"],
                cut_below=body["cut_below"],
                view=view,
                released=True,
                members={ref: Member(ref=ref, store="", seen_at=now, steps=0) for ref in view},
            )
        case "COMMIT":
            return replace(state, committed=max(state.committed, body["step"] + 1))
        case "TRUNCATE":
            return replace(state, committed=body["steps"])
        case "CKPT":
            return replace(state, checkpoint=body["path"], checkpoint_step=body["step"])
        case _:
            return state
