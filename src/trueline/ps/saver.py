"""The process that makes an ordinary checkpoint of the parts that servers wrote in one cut.

Evaluate, capture and register read it as they read any other. A table stands in the model's state with its sorted ids
and their rows; the optimizer's slots stay in the parts, from which servers begin again.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trueline import files
from trueline.checkpoint import checkpoint, model_files
from trueline.errors import DiskFull, StorageError, TruelineError
from trueline.ps.master.checkpoints import FACTS, FULL_EXIT, RESULT
from trueline.ps.messages import ModelSpec
from trueline.ps.server import snapshot
from trueline.ps.server.holding import expect_all_parts
from trueline.ps.tables.table import read_averages
from trueline.ps.worker import build
from trueline.recipe.load import load_recipe
from trueline.storage.location import parse_location
from trueline.train import settings as job_settings
from trueline.train.job_dir import JobDir
from trueline.train.step.checkpointer import Checkpointer
from trueline.train.worker.main import bind_columns

Array = Any


def main() -> int:
    """Makes the checkpoint that the environment names (TRUELINE_JOB, _PS_PARTS, _PS_STEP); returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    folder, step = Path(os.environ["TRUELINE_PS_PARTS"]), int(os.environ["TRUELINE_PS_STEP"])
    try:
        save(Path(os.environ["TRUELINE_JOB"]), folder, step)
        return 0
    except DiskFull as error:
        sys.stderr.write(f"{error.message}\n")
        return FULL_EXIT
    except TruelineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    except Exception:  # noqa: BLE001  the process boundary: the master reports the last line
        traceback.print_exc()
        return 1


def save(job_dir: Path, folder: Path, step: int) -> None:
    """Writes the checkpoint of `step` from the parts in `folder`, and where it is. Raises StorageError."""
    settings = job_settings.load(job_dir)
    recipe = bind_columns(load_recipe(settings.recipe), job_dir)
    served, source = build(recipe, settings, job_dir)
    joined = join_parts(sorted(folder.glob("*.part")))
    if joined.spec != served.spec:
        raise StorageError("the parts are of another model than the recipe makes", hint="restore the recipe")
    where = parse_location(settings.checkpoints) if settings.checkpoints else JobDir(job_dir).checkpoints
    facts = Checkpointer.of(settings, job_dir, {
        "recipe": {"name": recipe.name, "digest": recipe.digest}, "data": source.fingerprint(),
        **({"columns": msgspec.to_builtins(recipe.fitted)} if recipe.fitted is not None else {}),
        **({"weights": settings.started_from} if settings.weights else {}),
    }).facts  # fmt: skip
    model = served.state_dict(joined.dense, joined.tables)
    state = {"model": model, "optimizer": {}, "ledger": {"steps": step}}
    path = checkpoint.write(where, step=step, state=state, facts={**facts, **json.loads((folder / FACTS).read_bytes())})
    digest = checkpoint.read_manifest(path)["digest"]
    checkpoint.prune(where, newest=step, keep=settings.keep, best=None)
    model_files.write_model(where, served.model, model)
    files.write_atomic(folder / RESULT, json.dumps({"path": str(path), "digest": digest}).encode())


class JoinedParts(NamedTuple):
    spec: ModelSpec
    dense: dict[str, Array]
    """Flat values by name."""
    tables: dict[str, tuple[Array, Array]]
    """Ids and rows."""
    averages: dict[str, tuple[Array, Array]]
    """Ids and the moving averages of the rows, where the job has them."""


def join_parts(paths: Sequence[Path]) -> JoinedParts:
    """Raises StorageError for a torn part, and a missing one."""
    spec: ModelSpec | None = None
    pieces: dict[str, list[tuple[int, Array]]] = {}
    rows: dict[str, list[tuple[Array, Array]]] = {}
    averages: dict[str, list[tuple[Array, Array]]] = {}
    headers = list[snapshot.Header]()
    for path in paths:
        held, arrays = snapshot.read(path)
        headers.append(held)
        spec = msgspec.msgpack.decode(held["spec"], type=ModelSpec)
        at = 0
        for name, columns in held["columns"].items():
            rows.setdefault(name, []).append((arrays[at], arrays[at + 1]))
            if spec.ema:
                own = read_averages(spec, name, arrays[at : at + columns], held["steps"])
                averages.setdefault(name, []).append((arrays[at], own))
            at += columns
        for part in held["dense"]:
            pieces.setdefault(part["name"], []).append((part["start"], arrays[at].reshape(-1)))
            at += part["arrays"]
    expect_all_parts(headers, [str(path) for path in paths])
    if spec is None:
        raise StorageError("there are no parts of a checkpoint")
    ordered = {name: sorted(of, key=lambda one: one[0]) for name, of in pieces.items()}
    dense = {name: np.concatenate([one for _, one in of]) for name, of in ordered.items()}
    return JoinedParts(spec, dense, _concatenate(rows), _concatenate(averages))


def _concatenate(parts: Mapping[str, list[tuple[Array, Array]]]) -> dict[str, tuple[Array, Array]]:
    return {name: (np.concatenate([ids for ids, _ in of]), np.concatenate([rows for _, rows in of]))
            for name, of in parts.items()}  # fmt: skip
