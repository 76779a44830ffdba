"""What the store keeps of a job's folder for its next launch: settings, columns, journal, parts of parameter servers.

Parameter servers begin with their parts of the checkpoint that the journal names last. So the parts are in the store
before that journal, and older ones are removed after it.
"""

import contextlib
import json
import sqlite3
from pathlib import Path

from trueline.errors import StorageError
from trueline.train.cluster.store import JobStore
from trueline.train.job_dir import JobDir

KEPT = ("job.json", "columns.json", "loss.json", "weights.safetensors", "summary.json")
JOURNAL = "kept/journal.sqlite"
CUTS = "ps/cuts"
"""Where the master of parameter servers has their parts of a checkpoint, in the job's folder."""
TRIES = 5


def keep_files(store: JobStore, folder: JobDir, *, journal: bool) -> None:
    """Copies to the store what another launch needs. Raises StorageError."""
    for name in KEPT:
        path = folder.path / name
        if path.is_file():
            store.write(f"kept/{name}", path.read_bytes())
    if journal and folder.journal.exists():
        _keep_journal(store, folder)


def _keep_journal(store: JobStore, folder: JobDir) -> None:
    for _ in range(TRIES):
        data, step = copy_journal(folder)
        parts = {f"step-{step}.{path.name}": path for path in folder.path.glob(f"{CUTS}/step-{step}/*.part")}
        there = store.names("kept/cuts") if parts else set()
        with contextlib.suppress(FileNotFoundError):  # the next checkpoint is there, and these parts are not
            for name in parts.keys() - there:
                store.write(f"kept/cuts/{name}", parts[name].read_bytes())
            store.write(JOURNAL, data)
            for name in there - parts.keys():
                store.remove(f"kept/cuts/{name}")
            return
    raise StorageError(f"the checkpoints of {folder.path} change faster than they can be copied")


def copy_journal(folder: JobDir) -> tuple[bytes, int]:
    """The journal as one file, also while the master appends to it; and the step of the checkpoint that it names last,
    -1 without one."""
    with (
        contextlib.closing(sqlite3.connect(f"file:{folder.journal}?mode=ro", uri=True)) as source,
        contextlib.closing(sqlite3.connect(":memory:")) as copy,
    ):
        source.backup(copy)
        row = copy.execute("SELECT body FROM log WHERE kind = 'CKPT' ORDER BY seq DESC LIMIT 1").fetchone()
        return copy.serialize(), json.loads(row[0])["step"] if row else -1


def restore_files(store: JobStore, folder: Path) -> bool:
    """Fetches what the launch before has left in the store; False: there is nothing."""
    found = False
    for name in store.names("kept/cuts"):
        cut, _, part = name.partition(".")
        (folder / CUTS / cut).mkdir(parents=True, exist_ok=True)
        (folder / CUTS / cut / part).write_bytes(store.get(f"kept/cuts/{name}") or b"")
    for name in (*KEPT, "journal.sqlite"):
        data = store.get(f"kept/{name}")
        if data is not None:
            (folder / name).write_bytes(data)
            found = found or name == "job.json"
    return found
