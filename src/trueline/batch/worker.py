"""A process of a pool: it computes the chunks that it is sent; `batch/pool.py` has the messages.

A chunk that fails is tried record by record, to name the record at fault. Each process has one thread, so that numbers
do not depend on how many share a machine.
"""

import importlib
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from trueline.batch.pool import FOLDER, SOCKET, WORK, ChunkOrder, Compute, Work
from trueline.errors import RecipeError
from trueline.train.worker import failure


def main() -> int:
    folder = Path(os.environ[FOLDER])
    work = msgspec.json.decode((folder / WORK).read_bytes(), type=Work)
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(folder / SOCKET))
        with line.makefile("rwb") as stream:
            try:
                records, compute = _open(work)
            except Exception as error:  # noqa: BLE001  the process boundary: every worker would meet this error
                _send(stream, op="failed", fatal=True, **_describe(error))
                return 1
            _send(stream, op="ready", ref=os.environ["TRUELINE_REF"], records=records)
            for text in stream:
                _send(stream, **_compute(stream, compute, msgspec.json.decode(text, type=ChunkOrder)))
    return 0


def _open(work: Work) -> tuple[int, Compute]:
    from trueline.recipe.load import load_recipe

    if load_recipe(work.recipe).digest != work.recipe_digest:
        raise RecipeError(f"the recipe {work.recipe} was changed meanwhile", hint="try again")
    module, _, function = work.entry.partition(":")
    count, compute = getattr(importlib.import_module(module), function)(work)
    return count, compute


def _send(stream: BinaryIO | Any, **message: Any) -> None:
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def _compute(stream: Any, compute: Compute, order: ChunkOrder) -> dict[str, Any]:
    if order.careful:
        _find_failing(compute, order, report=lambda record: _send(stream, op="trying", record=record))
    try:
        return {"op": "done", "reply": compute(order.start, order.stop)}
    except Exception as error:  # noqa: BLE001  the process boundary: this chunk fails, the worker continues
        traceback.print_exc()
        return {"op": "failed", **_describe(error, _name_records(compute, order))}


def _find_failing(compute: Compute, order: ChunkOrder, *, report: Callable[[int], None]) -> list[int]:
    """The records that fail alone; calls `report` with each record first."""
    failing = []
    for record in range(order.start, order.stop):
        report(record)
        try:
            compute(record, record + 1)
        except Exception:  # noqa: BLE001  any error: only which record raises matters
            failing.append(record)
    return failing


def _name_records(compute: Compute, order: ChunkOrder) -> str:
    """The record at fault, or the whole chunk if it fails only together."""
    failing = _find_failing(compute, order, report=lambda record: None)
    if failing and len(failing) < order.stop - order.start:
        return f"record {failing[0]}"
    one = order.stop - order.start == 1
    return f"record {order.start}" if one else f"records {order.start} to {order.stop - 1}"


def _describe(error: Exception, which: str = "") -> dict[str, Any]:
    code, what, hint = failure.describe(error, RecipeError.code)
    prefix = f"{which}: " if which and which not in what else ""
    return {"code": code, "why": (prefix + what)[:4000], "hint": hint[:4000]}
