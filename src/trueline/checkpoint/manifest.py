"""Checkpoints as folders: which there are, whether they are whole, which stay. Loads no tensor and imports no torch.

A job that is resumed begins here while its agent imports torch. What is in a checkpoint: `checkpoint.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_128

from trueline import events, files
from trueline.errors import CheckpointError, OtherSchema
from trueline.storage.checkpoint_store import open_checkpoint_store
from trueline.storage.location import Location, join_location, split_location

SCHEMA = 3
"""3: the digest of the tensors is of XXH3, which takes a tenth of the processor time of BLAKE3."""
MANIFEST = "checkpoint.json"
TENSORS = "state.safetensors"
open_place = partial(open_checkpoint_store, seal=MANIFEST)
Found = TypeVar("Found")


def folder_name(step: int) -> str:
    """
    >>> folder_name(120)
    'step-00000120'
    """
    return f"step-{step:08d}"


def read_body(path: Location) -> dict[str, Any]:
    """The manifest with the skeleton of the state, and `digest`, its own. Raises CheckpointError, StorageError."""
    file = join_location(path, MANIFEST)
    folder, name = split_location(path)
    try:
        with open_place(folder).fetch(name, MANIFEST) as local:
            envelope = json.loads(local.read_text())
        text, digest = envelope["body"], envelope["digest"]
        if files.sha256_bytes(text.encode()) != digest:
            raise CheckpointError(f"{file} was changed after it was written", hint="use another checkpoint of the job")
        body: dict[str, Any] = json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}",
            hint="a checkpoint is a folder like JOB/checkpoints/step-00000276",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is torn, or not of a checkpoint: {error}") from error
    if body.get("schema") != SCHEMA:
        raise OtherSchema(
            f"{file} has schema {body.get('schema')}, this version reads {SCHEMA}",
            hint="use the version of Trueline that wrote it, or move it away: an older checkpoint is then the newest",
        )
    return {**body, "digest": digest}


def digest_file(path: Path) -> str:
    """XXH3 of 128 bits, 32 hex digits, as `xxhsum -H128` prints it. It finds damage, not a forger, who could write
    another manifest as well. Source: github.com/Cyan4973/xxHash, doc/xxhash_spec.md."""
    digest, room = xxh3_128(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(room):
            digest.update(memoryview(room)[:count])
    return digest.hexdigest()


@contextmanager
def open_tensors(path: Location, digest: str) -> Iterator[Path]:
    """A local file with the checkpoint's tensors, of this digest. Raises CheckpointError, StorageError."""
    file = join_location(path, TENSORS)
    folder, name = split_location(path)
    try:
        with open_place(folder).fetch(name, TENSORS) as local:
            if digest_file(local) != digest:
                raise CheckpointError(
                    f"{file} was changed or torn: its XXH3 digest is not the one in {MANIFEST}",
                    hint="use another checkpoint of the job",
                )
            yield local
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing", hint="use another checkpoint of the job") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def verify(path: Location) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are as they were written. Raises CheckpointError, StorageError."""
    body = read_body(path)
    with open_tensors(path, body["files"].get(TENSORS, "")):
        return body


def find_latest(folder: Location) -> tuple[Location, dict[str, Any]] | None:
    """Place and manifest of the newest checkpoint in `folder` that verifies; one that does not is reported.

    Raises StorageError when a store does not answer, which does not mean that it has no checkpoint, and OtherSchema for
    one that another version wrote: the job has come further than the checkpoints that can be read.
    """
    return first_whole(folder, lambda path: (path, verify(path)))


def first_whole(folder: Location, read_one: Callable[[Location], Found]) -> Found | None:
    """What `read_one` returns for the newest checkpoint for which it raises no CheckpointError; None: there is none.
    Raises OtherSchema."""
    for step in reversed(steps(folder)):
        path = join_location(folder, folder_name(step))
        try:
            return read_one(path)
        except OtherSchema:
            raise
        except CheckpointError as error:
            events.emit("checkpoint.refused", path=str(path), why=error.message)
    return None


def steps(folder: Location) -> list[int]:
    """The steps that have a checkpoint in `folder`, oldest first, without verifying them."""
    return _steps(open_place(folder).names())


def _steps(names: Sequence[str]) -> list[int]:
    """
    >>> _steps(["step-00000120", "notes"])
    [120]
    """
    return [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]


def best(folder: Location) -> Location | None:
    """The checkpoint of the best evaluation so far that is still in `folder`; None before the first evaluation.

    The newest manifest tells which: `evaluations`, a list of {step, loss, metrics, best}.
    """
    there = steps(folder)
    for step in reversed(there):
        try:
            evaluations = read_body(join_location(folder, folder_name(step))).get("evaluations") or []
        except CheckpointError as error:
            events.emit("checkpoint.refused", path=str(join_location(folder, folder_name(step))), why=error.message)
            continue
        kept = [one["step"] for one in evaluations if one["best"] and one["step"] in there]
        return join_location(folder, folder_name(kept[-1])) if kept else None
    return None


def best_step(evaluations: Sequence[dict[str, Any]]) -> int | None:
    """The step of the last evaluation that was the best until then.

    >>> best_step([{"step": 8, "best": True}, {"step": 16, "best": True}, {"step": 24, "best": False}])
    16
    """
    return next((one["step"] for one in reversed(evaluations) if one["best"]), None)


def select_removed(steps: Sequence[int], *, newest: int, keep: int, best: int | None) -> list[int]:
    """Those of `steps` that are removed after `newest` was written: all but the `keep` last ones up to it, and the
    best.

    Later steps stay and do not count: they are damaged ones before which a job resumed, or another writer's.

    >>> select_removed([10, 20, 30, 40, 90], newest=40, keep=2, best=10)
    [20]
    """
    past = [step for step in sorted(steps) if step <= newest]
    return [step for step in past[: -max(keep, 1)] if step != best]


def prune(folder: Location, *, newest: int, keep: int, best: int | None = None) -> None:
    """Removes the checkpoints of `select_removed` in `folder`, and older parts that dead writers left in a store."""
    place = open_place(folder)
    for step in select_removed(_steps(place.names()), newest=newest, keep=keep, best=best):
        place.remove(folder_name(step))
    for step in _steps(place.names(unfinished=True)):
        if step < newest:
            place.remove(folder_name(step))


def sweep(folder: Location) -> int:
    """Removes all unfinished entries in `folder`; returns their number. Call it only where no writer can be active."""
    place = open_place(folder)
    leftovers = place.names(unfinished=True)
    for name in leftovers:
        place.remove(name)
    return len(leftovers)
