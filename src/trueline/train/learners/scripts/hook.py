"""Process groups of a learner's script through the job's master. A copy of this file is the `sitecustomize` of every
Python process of a learner, so it imports nothing of Trueline, and torch only where a script does.

`torch.distributed.init_process_group(init_method="file:///job/...")` made a file that a second start met again, and
hung on. Here the members meet at the master, under the generation of the group: it checks and corrects their ranks, and
its store takes the place of the file. So does `env://` where no MASTER_ADDR is set. The socket of this learner
(TRUELINE_LEARNER) passes the frames on: a length, then JSON with bytes as latin-1.

    join ──▶ ◀── {rank, world, group}        once all members are there; the connection stays open
    bye ──▶                                  an orderly end; a connection that ends without it is a death
    attach ──▶, then set, get, add, ...      of a store; a connection for each call that waits
"""

from __future__ import annotations  # a learner's Python may be of 3.7

import atexit
import collections
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

SOCKET = "TRUELINE_LEARNER"
SHARED = ("/job/",)
"""Paths of files that all learners of FfDL saw; a group in another file is one of a single learner."""
WAIT = timedelta(minutes=30)
_LENGTH = struct.Struct("!I")
_rounds: collections.Counter[str] = collections.Counter()
_joined: list[_Connection] = []
"""Of this process: the groups that it is in, or wants to be in."""
_stores: list[Any] = []
"""torch's C++ does not keep the Python part of a store."""


class _Connection:
    def __init__(self, timeout_s: float, path: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        self._socket.connect(path or os.environ[SOCKET])
        self.pid = os.getpid()

    def ask(self, limit_s: float, **request: Any) -> Any:
        self._socket.settimeout(limit_s + 10.0)
        self.send(**request)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        answer = json.loads(self._read(length))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def send(self, **request: Any) -> None:
        data = json.dumps(request).encode()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the master of the learners is gone")
            data += more
        return data


def _join(key: str, rank: int, world: int, timeout: timedelta) -> tuple[Any, int, int]:
    """Store, rank and size of the group under `key`, once all members are there."""
    _rounds[key] += 1
    wait_s = timeout.total_seconds()
    connection = _Connection(wait_s)
    _joined.append(connection)
    found = connection.ask(
        wait_s, op="join", key=key, round=_rounds[key], rank=rank, world=world, pid=os.getpid(), wait_s=wait_s
    )
    _call_at_exit(_leave)
    return _make_store(found["group"], timeout), found["rank"], found["world"]


def _leave() -> None:
    for connection in _joined:
        if connection.pid == os.getpid():
            with contextlib.suppress(OSError):
                connection.send(op="bye")


def _call_at_exit(function: Any) -> None:
    """A process of multiprocessing ends without atexit."""
    atexit.register(function)
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util.Finalize(None, function, exitpriority=0)


def _make_store(group: str, timeout: timedelta) -> Any:
    base = importlib.import_module("torch.distributed").Store
    store = type("MasterStore", (_MasterStoreCalls, base), {})()
    store.set_timeout(timeout)
    store.prepare(group)
    _stores.append(store)
    return store


class _MasterStoreCalls:
    """The methods of torch's Store, which its C++ calls by these names."""

    timeout: timedelta
    """Store's own."""

    def prepare(self, group: str) -> None:
        self._group = group
        self._idle: collections.deque[_Connection] = collections.deque()

    def _call(self, limit_s: float, **request: Any) -> Any:
        connection = self._take(limit_s)
        answer = connection.ask(limit_s, **request)
        self._idle.append(connection)
        return answer

    def _take(self, limit_s: float) -> _Connection:
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.pid == os.getpid():
                    return connection
        connection = _Connection(limit_s + 10.0)
        connection.ask(10.0, op="attach", group=self._group)
        return connection

    def set(self, key: str, value: str | bytes) -> None:
        self._call(0.0, op="set", key=key, value=_encode(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _decode(self._call(0.0, op="get", key=key))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(0.0, op="add", key=key, amount=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        pair = {"expected": _encode(expected), "desired": _encode(desired)}
        return _decode(self._call(0.0, op="compare", key=key, **pair))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(0.0, op="delete", key=key))

    def list_keys(self) -> list[str]:
        return [str(key) for key in self._call(0.0, op="keys")]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def check(self, keys: list[str]) -> bool:
        return bool(self._call(0.0, op="wait", keys=keys, wait_s=0.0))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wait_s = (timeout or self.timeout).total_seconds()
        if not self._call(wait_s, op="wait", keys=keys, wait_s=wait_s):
            import torch.distributed as dist

            raise dist.DistStoreError(f"wait timeout: the store got no {keys} within {wait_s:g} s")

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> Any:
        return self  # each call has a connection of its own

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # torch's C++ calls these by other names


def _encode(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _decode(value: str) -> bytes:
    return value.encode("latin-1")


def _meet_by_file(url: str, timeout: timedelta = WAIT, **_: Any) -> Any:
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    folders = [os.environ.get(name, "") for name in ("JOB_STATE_DIR", "RESULT_BUCKET_DIR")]
    shared = parts.path.startswith((*SHARED, *(f"{folder}/" for folder in folders if folder)))
    key = parts.path if shared else f"learner {os.environ.get('LEARNER_ID')}: {parts.path}"
    yield _join(key, int(query.get("rank", -1)), int(query.get("world_size", -1)), timeout)
    raise RuntimeError("a group of file:// does not form a second time")


def _make_env_handler(usual: Any) -> Any:
    def meet_by_env(url: str, timeout: timedelta = WAIT, **rest: Any) -> Any:
        if os.environ.get("MASTER_ADDR"):
            yield from usual(url, timeout=timeout, **rest)
            return
        query = dict(parse_qsl(urlsplit(url).query))
        rank = query.get("rank", os.environ.get("RANK", "-1"))
        world = query.get("world_size", os.environ.get("WORLD_SIZE", os.environ.get("NUM_LEARNERS", "-1")))
        yield _join("env://", int(rank), int(world), timeout)

    return meet_by_env


def _patch(module: Any) -> None:
    """Changes torch.distributed after its import."""
    if not module.is_available():
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers = rendezvous._rendezvous_handlers
    handlers["file"], handlers["env"] = _meet_by_file, _make_env_handler(handlers["env"])
    if "torch.distributed.c10d" not in sys.modules:  # as it was called in torch 0.5, for `import ... as dist`
        sys.modules["torch.distributed.c10d"] = module.c10d = module
    _patch_init(module)
    _patch_processes()
    if any(word.startswith("torch.distributed.") for word in getattr(sys, "orig_argv", ())):
        _hasten_launch()
    _spell_local_rank()


def _hasten_launch() -> None:
    """The launcher of learner 1 waits five minutes at its end for those whose scripts sleep; the master ends them."""
    api = importlib.import_module("torch.distributed.elastic.agent.server.api")
    usual = api.SimpleElasticAgent._exit_barrier

    def exit_barrier(self: Any) -> None:
        self._exit_barrier_timeout = min(self._exit_barrier_timeout, 3.0)
        usual(self)

    api.SimpleElasticAgent._exit_barrier = exit_barrier


def _spell_local_rank() -> None:
    """torch.distributed.launch passes --local-rank since torch 2.0, and --local_rank before."""
    with contextlib.suppress(OSError, IndexError), open(sys.argv[0], errors="replace") as file:
        if "--local_rank" in file.read():
            sys.argv[1:] = [word.replace("--local-rank=", "--local_rank=", 1) for word in sys.argv[1:]]


def _patch_init(module: Any) -> None:
    """gloo in place of MPI, which torch's packages have not."""
    usual = module.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **rest: Any) -> Any:
        if backend == "mpi" and not module.is_mpi_available():
            print("trueline: this torch has no MPI: the process group uses gloo", file=sys.stderr)  # noqa: T201
            backend = "gloo"
        return usual(backend, *args, **rest)

    init_process_group.__doc__ = usual.__doc__
    module.init_process_group = init_process_group


def _patch_processes() -> None:
    """Tells the master of a member in a process of multiprocessing that fails: its parent may end with exit code 0."""
    from multiprocessing.process import BaseProcess

    usual = BaseProcess._bootstrap  # type: ignore[attr-defined]  # CPython's own

    def bootstrap(self: Any, *args: Any, **rest: Any) -> int:
        code = int(usual(self, *args, **rest) or 0)
        for connection in _joined if code else ():
            with contextlib.suppress(OSError):
                connection.send(op="failed", code=code)
        return code

    BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch.distributed as the other finders do, and patches it once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader if spec is not None else None
        if spec is None or loader is None:
            return spec
        usual = loader.exec_module

        def exec_module(module: Any) -> None:
            usual(module)
            try:
                _patch(module)
            except (ImportError, AttributeError) as error:  # a torch without what is replaced
                print(f"trueline: torch.distributed is as it was: {error}", file=sys.stderr)  # noqa: T201

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _chain(paths: Iterable[str]) -> None:
    """Imports the sitecustomize that this one hides, if there is one."""
    own = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in paths if path != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize" and SOCKET in os.environ:
    import importlib.util

    sys.meta_path.insert(0, _TorchFinder())
    _chain(sys.path)
