"""A process of a pool: it is told which records to compute, and answers; see `batch/pool.py` for the words.

A failing chunk is tried record by record, to name the one at fault. One thread each, so that the numbers do not depend
on how many processes share a machine.
"""

from __future__ import annotations

import importlib
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from trueline.batch.pool import FOLDER, SOCKET, WORK, Compute, Work
from trueline.errors import RecipeError
from trueline.train.worker import failure


class Order(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    stop: int
    careful: bool


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
                _say(stream, op="failed", fatal=True, **_words(error))
                return 1
            _say(stream, op="ready", ref=os.environ["TRUELINE_REF"], records=records)
            for text in stream:
                _say(stream, **_answered(stream, compute, msgspec.json.decode(text, type=Order)))
    return 0


def _open(work: Work) -> tuple[int, Compute]:
    from trueline.recipe.load import load_recipe

    if load_recipe(work.recipe).digest != work.recipe_digest:
        raise RecipeError(f"the recipe {work.recipe} was changed meanwhile", hint="try again")
    module, _, function = work.entry.partition(":")
    opened: tuple[int, Compute] = getattr(importlib.import_module(module), function)(work)
    return opened


def _say(stream: BinaryIO | Any, **message: Any) -> None:
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def _answered(stream: Any, compute: Compute, order: Order) -> dict[str, Any]:
    if order.careful:
        _failing(compute, order, trying=lambda record: _say(stream, op="trying", record=record))
    try:
        return {"op": "done", "reply": compute(order.start, order.stop)}
    except Exception as error:  # noqa: BLE001  the process boundary: this chunk fails, the worker goes on
        traceback.print_exc()
        return {"op": "failed", **_words(error, _named(compute, order))}


def _failing(compute: Compute, order: Order, *, trying: Callable[[int], None]) -> list[int]:
    """The records that fail alone."""
    found = []
    for record in range(order.start, order.stop):
        trying(record)
        try:
            compute(record, record + 1)
        except Exception:  # noqa: BLE001  whatever it is: which record raises is what is asked
            found.append(record)
    return found


def _named(compute: Compute, order: Order) -> str:
    """Which record is at fault, as far as one is: a chunk may fail as a whole."""
    failing = _failing(compute, order, trying=lambda record: None)
    if failing and len(failing) < order.stop - order.start:
        return f"record {failing[0]}"
    one = order.stop - order.start == 1
    return f"record {order.start}" if one else f"records {order.start} to {order.stop - 1}"


def _words(error: Exception, which: str = "") -> dict[str, Any]:
    code, what, hint = failure.describe(error, RecipeError.code)
    prefix = f"{which}: " if which and which not in what else ""
    return {"code": code, "why": (prefix + what)[:4000], "hint": hint[:4000]}
