"""The master's durable log: one append-only SQLite file in WAL mode.

Rows are facts about the surviving state, which the log follows and never leads: VIEW before a view is published, COMMIT
after a step was applied, FORMED with the first of a generation, TRUNCATE when the survivors have applied less.

A dead master's rows are all there. A power cut may lose the newest ones that `append` does not wait for. Rows of steps:
the workers hold the state and report them again. Rows about the processes of a launch, its checkpoints and the
certificates in them: after a power cut the next launch starts all workers again, from the newest checkpoint in the
store, and they send all certificates at the end.
"""

import contextlib
import json
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trueline import files
from trueline.engine.contract import make_ref, parse_ref
from trueline.errors import DiskFull, StorageError
from trueline.train.membership.poison import set_aside
from trueline.train.membership.state import Member, State

Row = tuple[str, dict[str, Any]]
REMEMBERED = 4096
"""Newest steps whose rows a restarted master reads; what it needs of earlier ones is in other rows."""
PROBE_BYTES = 1 << 16
STEPS = ("COMMIT", "FORMED")
STEPS_AND_LAUNCH = (*STEPS, "START", "VIEW", "CKPT", "EPOCH")
"""Also rows during which workers would wait for the master: a busy disk takes seconds to confirm one."""


class Journal:
    """Raises StorageError when the file cannot be written, DiskFull while there is no room.

    `unawaited`: kinds of rows whose write to the disk is not awaited.
    """

    def __init__(self, path: Path, unawaited: Collection[str] = STEPS) -> None:
        self.path, self._unawaited = path, unawaited
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS log (seq INTEGER PRIMARY KEY, kind TEXT, body TEXT)")
            self._db.execute("CREATE INDEX IF NOT EXISTS others ON log (seq) WHERE kind <> 'COMMIT'")
        except sqlite3.Error as error:
            full = self._describe(error)
            raise type(full)(f"the journal {path} cannot be opened: {error}") from error

    def append(self, *rows: Row) -> None:
        """Writes the rows in one transaction; they are on the disk when it returns, unless none of them is awaited."""
        self.append_texts([(kind, _encode(kind, body)) for kind, body in rows])

    def append_texts(self, rows: Sequence[tuple[str, str]]) -> None:
        """`append` for rows whose bodies are JSON already."""
        if not rows:
            return
        durable = any(kind not in self._unawaited for kind, _ in rows)
        try:
            self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO log (kind, body) VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # the transaction may be over, or the file closed
                self._db.execute("ROLLBACK")
            raise self._describe(error) from error

    def _describe(self, error: sqlite3.Error) -> StorageError:
        """DiskFull, if a file beside the journal cannot be written either: SQLite reports a quota as an I/O error."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the module's own errors have none
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            try:
                files.write_atomic(self.path.with_name(".room"), bytes(PROBE_BYTES))
                self.path.with_name(".room").unlink(missing_ok=True)
            except DiskFull as full:
                return DiskFull(f"the journal {self.path} cannot be written: {full.message}", hint=full.hint)
            except StorageError:
                pass  # SQLite's reason says more
        if code == sqlite3.SQLITE_FULL:
            return DiskFull(f"the journal {self.path} cannot be written: {error}")
        return StorageError(f"the journal {self.path} cannot be written: {error}")

    def rows(self) -> Iterator[Row]:
        """The rows that a restarted master needs, in order: all but COMMITs before the newest `REMEMBERED` steps."""
        for kind, body in self.texts():
            yield kind, json.loads(body)

    def texts(self) -> Iterator[tuple[str, str]]:
        """`rows` with their bodies as JSON."""
        newest = "SELECT seq FROM log WHERE kind = 'COMMIT' ORDER BY seq DESC LIMIT 1 OFFSET ?"
        (since,) = self._db.execute(newest, (REMEMBERED - 1,)).fetchone() or (0,)
        before = "SELECT kind, body FROM log INDEXED BY others WHERE kind <> 'COMMIT' AND seq < ? ORDER BY seq"
        after = "SELECT kind, body FROM log WHERE seq >= ? ORDER BY seq"
        for query in (before, after):
            yield from self._db.execute(query, (since,))

    def close(self) -> None:
        self._db.close()


def _encode(kind: str, body: dict[str, Any]) -> str:
    """As JSON; in a fraction of the time for the rows that come with every step, whose numbers are finite."""
    return msgspec.json.encode(body).decode() if kind == "COMMIT" else json.dumps(body)


def apply_row(state: State, kind: str, body: dict[str, Any], now: float) -> None:
    """Brings `state` to where it was when the row was written.

    Workers of the last view count as alive until the engine or their silence proves otherwise. The view stays in force,
    so that no worker regroups only because the master was away. Members that were to leave by a planned view may be at
    their last step, until a step of that view is known.
    """
    match kind:
        case "START":
            role, slot, incarnation = parse_ref(body["ref"])
            state.incarnations[slot] = incarnation + 1
            state.pending.pop(make_ref(role, slot, incarnation - 1), None)
            state.pending[body["ref"]] = now
        case "VIEW":
            _apply_view(state, body, now)
        case "COMMIT" | "FORMED":
            state.committed = max(state.committed, body["step"] + 1)
            if len(state.members) > len(state.view) and body.get("generation") == state.generation:
                state.members = {ref: state.members[ref] for ref in state.view}
        case "TRUNCATE":
            state.committed = body["steps"]
        case "CKPT":
            state.checkpoint, state.checkpoint_step = body["path"], body["step"]
        case "HALT":
            state.halting = body["why"]
        case "LAUNCH":
            state.workers, state.halting = body["workers"], ""
            state.lift_quarantines()
        case "SCALE":
            state.workers = body["workers"]
            if body["again"]:
                state.lift_quarantines()
        case "QUARANTINE":
            slot = body["slot"]
            state.quarantined[slot], state.retry_at[slot] = body["why"], now + body.get("retry_s", 0.0)
            state.relapses[slot] = body.get("times", 1)
        case "RETRY":
            state.quarantined.pop(body["slot"], None)
            state.retry_at.pop(body["slot"], None)
        case "SUSPECT":
            state.suspects.setdefault(body["record"], {})[body["worker"]] = body["why"]
            state.places[body["record"]] = body.get("where", "")
        case "POISON":
            set_aside(state, body["record"], body["why"])
            state.places[body["record"]] = body.get("where", "")


def _apply_view(state: State, body: dict[str, Any], now: float) -> None:
    before = state.view
    state.generation, state.cut_below, state.view = body["generation"], body["cut_below"], tuple(body["members"])
    state.rotation, state.careful = body.get("rotation", 0), body.get("careful", False)
    state.phase, state.released = "running" if state.view else "gathering", True
    state.awaited, state.unfinished = set(state.view), set(state.view)
    state.died_at = state.committed if state.careful else -1
    for ref in state.view:
        state.pending.pop(ref, None)
    planned = state.cut_below < state.generation
    state.members = {
        ref: Member(ref=ref, slot=parse_ref(ref)[1], store="", seen_at=now, steps=0, rank=rank, joined=True)
        for rank, ref in [*enumerate(state.view), *((-1, ref) for ref in before if planned and ref not in state.view)]
    }
