"""Makes a process look like one on another host, on another day: what a loss makes of time, entropy, names of hosts and
files that it has written shows there, and others' files stay what they are (`private_files.py`).

None of it follows from records and seeds, and much of it is the same for as long as a trial takes: a generator that is
seeded by the second, a branch that a rare byte of `os.urandom` takes, a limit of time.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from trueline.train.rehearsal import entropy, places, private_files
from trueline.train.rehearsal.entropy import Replacement
from trueline.train.rehearsal.pretence import ENTROPY, HOST, KINDS, PROCESS, TIME, Pretence
from trueline.train.rehearsal.steps.ranks import list_ranks

_NAMES = ("TRUELINE_REF", "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NODEID",
          "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES",
          "OMPI_COMM_WORLD_SIZE", "HOSTNAME")  # fmt: skip


@contextmanager
def pretend(spaces: Iterable[tuple[str, Any]], kinds: Sequence[str] = KINDS) -> Iterator[Pretence]:
    """In this block code of the user's, which has the namespaces `spaces`, gets what another process would."""
    held: list[tuple[Any, str, Any]] = []
    held_names: list[tuple[Any, Any, Any]] = []
    others: list[Replacement] = []
    pretence = Pretence()
    lists = {TIME: _list_clocks, ENTROPY: entropy.list_entropy, PROCESS: _list_numbers, HOST: _list_hosts}
    with ExitStack() as stack:
        files = stack.enter_context(private_files.keep_apart())
        for kind in kinds:
            others += lists[kind](pretence)
            if kind == HOST:
                stack.enter_context(_rename_worker(pretence))
        instead = {id(plain := getattr(room, name)): (plain, other) for room, name, other in others}
        for plain, other in files:
            instead[id(plain)] = plain, instead.get(id(other), (other, other))[1]
        rooms = [vars(module) for module in list(sys.modules.values()) if places.is_users_module(module)]
        rooms += [room for _, room in spaces if isinstance(room, dict)]
        for room, name, other in others:
            held.append((room, name, getattr(room, name)))
            setattr(room, name, other)
        for names in {id(one): one for one in rooms}.values():
            for name, value in list(names.items()):
                if id(value) in instead:
                    held_names.append((names, name, value))
                    names[name] = instead[id(value)][1]
                elif ENTROPY in kinds and entropy.is_open_device(value):
                    held_names.append((names, name, value))
                    names[name] = entropy.open_stream(pretence, "rb", 0)
        try:
            yield pretence
        finally:
            for names, name, value in reversed(held_names):
                names[name] = value
            for room, name, value in reversed(held):
                setattr(room, name, value)


def _list_clocks(pretence: Pretence) -> list[Replacement]:
    def away() -> float:
        pretence.note(TIME)
        return pretence.away_s

    def ahead(clock: Callable[..., Any], times: int = 0) -> Callable[..., Any]:
        return lambda *of: clock(*of) + (int(away() * times) if times else away())

    def at(convert: Callable[[float], Any]) -> Callable[..., Any]:
        return lambda seconds=None: convert(now() + away() if seconds is None else seconds)

    def write(form: str, when: Any = None) -> str:
        return formatted(form, local(now() + away()) if when is None else when)

    def measure_away() -> datetime.timedelta:
        return datetime.timedelta(seconds=away())

    now, local, formatted = time.time, time.localtime, time.strftime
    plain, date, unique = datetime.datetime, datetime.date, uuid.uuid1

    class _Moments(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, plain)

    class _Days(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, date)

    moments = _Moments("datetime", (plain,), {
        "now": classmethod(lambda _, tz=None: plain.now(tz) + measure_away()),
        "today": classmethod(lambda _: plain.today() + measure_away()),
        "utcnow": classmethod(lambda _: plain.now(datetime.UTC).replace(tzinfo=None) + measure_away()),
    })  # fmt: skip
    days = _Days("date", (date,), {"today": classmethod(lambda _: (plain.now() + measure_away()).date())})
    names = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
    clocks: list[Replacement] = [(time, name, ahead(getattr(time, name))) for name in names]
    clocks += [(time, f"{name}_ns", ahead(getattr(time, f"{name}_ns"), 10**9)) for name in names]
    clocks += [(time, name, at(getattr(time, name))) for name in ("localtime", "gmtime", "ctime")]
    clocks.append((uuid, "uuid1", lambda node=None, clock_seq=None: unique(node or uuid.getnode(), clock_seq or 0)))
    return [*clocks, (time, "strftime", write), (datetime, "datetime", moments), (datetime, "date", days)]


def _list_numbers(pretence: Pretence) -> list[Replacement]:
    def other(read: Callable[[], int]) -> Callable[[], int]:
        def read_other() -> int:
            pretence.note(PROCESS)
            return read() + 1 + pretence.number

        return read_other

    found = ((os, "getpid"), (os, "getppid"), (threading, "get_native_id"))
    return [(room, name, other(getattr(room, name))) for room, name in found]


def _list_hosts(pretence: Pretence) -> list[Replacement]:
    uname, find, number = os.uname, socket.gethostbyname, uuid.getnode

    def name() -> str:
        pretence.note(HOST)
        return pretence.name_host()

    def describe() -> os.uname_result:
        host = name()
        return os.uname_result([host if at == 1 else one for at, one in enumerate(uname())])

    def find_address(host: str) -> str:
        return f"127.0.0.{2 + pretence.number}" if host == pretence.name_host() else find(host)

    def number_host() -> int:
        pretence.note(HOST)
        return number() + 1 + pretence.number

    return [
        (socket, "gethostname", name),
        (socket, "getfqdn", lambda host="": host or name()),
        (socket, "gethostbyname", find_address),
        (platform, "node", name),
        (os, "uname", describe),
        (uuid, "getnode", number_host),
        *list_ranks(pretence),
    ]


class _WorkerNames(dict[Any, Any]):
    """The variables of the environment, of which those that name a worker are others."""

    def __init__(self, plain: dict[Any, Any], pretence: Pretence) -> None:
        super().__init__(plain)
        self._pretence, self._keys = pretence, {os.fsencode(name): name for name in _NAMES}

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if key not in self._keys:
            return value
        self._pretence.note(HOST)
        return os.fsencode(self._pretence.rename(self._keys[key], os.fsdecode(value)))


@contextmanager
def _rename_worker(pretence: Pretence) -> Iterator[None]:
    environment: Any = os.environ
    plain = environment._data
    environment._data = names = _WorkerNames(plain, pretence)
    try:
        yield
    finally:
        plain.clear()
        plain.update(names.items())
        environment._data = plain
