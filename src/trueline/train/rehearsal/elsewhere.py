"""Makes a process look like one on another host, on another day: what a loss makes of time, entropy, names of hosts and
files that it has written shows there.

None of it follows from records and seeds, and much of it is the same for as long as a trial takes: a generator that is
seeded by the second, a branch that a rare byte of `os.urandom` takes, a limit of time.
"""

from __future__ import annotations

import builtins
import datetime
import io
import os
import platform
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trueline.train.rehearsal import places

AWAY_S = 1_000_003
"""How far the clocks go ahead, in seconds: another hour, minute and second."""
TIME, HOST = "the time", "the name of its host or worker (a rank, TRUELINE_REF)"
ENTROPY = "os.urandom (or secrets, uuid, a generator without a seed)"
KINDS = (TIME, ENTROPY, HOST)
_NAMES = ("TRUELINE_REF", "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NODEID",
          "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "HOSTNAME")  # fmt: skip
Replacement = tuple[Any, str, Any]
"""A module, a name in it, and what is there instead."""


@contextmanager
def pretend(spaces: Iterable[tuple[str, Any]], kinds: Iterable[str] = KINDS) -> Iterator[None]:
    """In this block code of the user's, which has the namespaces `spaces`, gets what another process would."""
    held: list[tuple[Any, Any, Any]] = []
    others: list[Replacement] = []
    with ExitStack() as stack:
        for kind in kinds:
            others += {TIME: _list_clocks, ENTROPY: _list_entropy, HOST: _list_hosts}[kind]()
            if kind == HOST:
                stack.enter_context(_rename_worker())
        instead = {id(getattr(room, name)): (getattr(room, name), other) for room, name, other in others}
        rooms = [vars(module) for module in list(sys.modules.values()) if places.is_users_module(module)]
        rooms += [room for _, room in spaces if isinstance(room, dict)]
        for room, name, other in others:
            held.append((vars(room), name, getattr(room, name)))
            setattr(room, name, other)
        for names in {id(one): one for one in rooms}.values():
            for name, value in list(names.items()):
                if id(value) in instead:
                    held.append((names, name, value))
                    names[name] = instead[id(value)][1]
        try:
            yield
        finally:
            for names, name, value in reversed(held):
                names[name] = value


def _list_clocks() -> list[Replacement]:
    def ahead(clock: Callable[[], Any], by: int) -> Callable[[], Any]:
        return lambda: clock() + by

    def at(convert: Callable[[float], Any], now: Callable[[], float]) -> Callable[..., Any]:
        return lambda seconds=None: convert(now() + AWAY_S if seconds is None else seconds)

    def write(form: str, when: Any = None) -> str:
        return formatted(form, local(now() + AWAY_S) if when is None else when)

    now, local, formatted, day = time.time, time.localtime, time.strftime, datetime.timedelta(seconds=AWAY_S)
    plain, date = datetime.datetime, datetime.date

    class _Moments(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, plain)

    class _Days(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, date)

    moments = _Moments("datetime", (plain,), {
        "now": classmethod(lambda _, tz=None: plain.now(tz) + day),
        "today": classmethod(lambda _: plain.today() + day),
        "utcnow": classmethod(lambda _: plain.now(datetime.UTC).replace(tzinfo=None) + day),
    })  # fmt: skip
    days = _Days("date", (date,), {"today": classmethod(lambda _: date.today() + day)})
    clocks: list[Replacement] = [
        (time, name, ahead(getattr(time, name), AWAY_S)) for name in ("time", "monotonic", "perf_counter")
    ]
    clocks += [(time, f"{name}_ns", ahead(getattr(time, f"{name}_ns"), AWAY_S * 10**9))
               for name in ("time", "monotonic", "perf_counter")]  # fmt: skip
    clocks += [(time, name, at(getattr(time, name), now)) for name in ("localtime", "gmtime", "ctime")]
    read = time.clock_gettime
    clocks.append((time, "clock_gettime", lambda clock: read(clock) + AWAY_S))
    return [*clocks, (time, "strftime", write), (datetime, "datetime", moments), (datetime, "date", days)]


def _list_entropy() -> list[Replacement]:
    return [(os, "urandom", bytes), (random, "_urandom", bytes), (uuid, "uuid4", lambda: uuid.UUID(int=4))]


def _list_hosts() -> list[Replacement]:
    def name() -> str:
        return "elsewhere"

    return [
        (socket, "gethostname", name),
        (socket, "getfqdn", lambda host="": host or name()),
        (platform, "node", name),
    ]


@contextmanager
def _rename_worker() -> Iterator[None]:
    held = {name: os.environ[name] for name in _NAMES if name in os.environ}
    for name, value in held.items():
        os.environ[name] = "7" if value.isdigit() else "worker-7.7" if name == "TRUELINE_REF" else "elsewhere"
    try:
        yield
    finally:
        os.environ.update(held)


@contextmanager
def take_files_back() -> Iterator[None]:
    """Removes the files that are new after the block, as far as Python wrote them: `open`, `torch.save`, a rename."""
    plain, save, made = builtins.open, torch.save, set[str]()
    moves = {name: getattr(os, name) for name in ("replace", "rename")}

    def note(path: Any) -> None:
        if isinstance(path, str | os.PathLike) and not os.path.exists(path):
            made.add(os.path.abspath(os.fspath(path)))

    def open_and_note(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if any(letter in mode for letter in "wax"):
            note(file)
        return plain(file, mode, *given, **named)

    def save_and_note(value: Any, f: Any, *given: Any, **named: Any) -> None:
        note(f)
        save(value, f, *given, **named)

    def move(name: str) -> Callable[..., None]:
        def move_and_note(source: Any, target: Any, **named: Any) -> None:
            note(target)
            moves[name](source, target, **named)

        return move_and_note

    builtins.open = io.open = open_and_note
    torch.save = save_and_note  # type: ignore[assignment]
    for name in moves:
        setattr(os, name, move(name))
    try:
        yield
    finally:
        builtins.open = io.open = plain
        torch.save = save
        for name, kept in moves.items():
            setattr(os, name, kept)
        for path in made:
            if os.path.isfile(path):
                os.remove(path)
