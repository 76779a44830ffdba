"""The master's side of `hook.py`: process groups of a generation, and the store of each."""

import asyncio
import collections
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trueline.errors import UsageError
from trueline.train.learners.messages import pack_frame, read_frame
from trueline.train.learners.ranks import UNRANKED, AskedRank, assign_ranks

SLOW_S = 15.0
"""A group that waits for longer for its members is named in the log."""


class MemberFault(NamedTuple):
    """A member that left its group without an end (`code` 0), or failed."""

    learner: int
    pid: int
    code: int


@dataclass(slots=True)
class _Table:
    values: dict[str, str] = field(default_factory=dict)
    change: asyncio.Condition = field(default_factory=asyncio.Condition)


@dataclass(slots=True)
class _Member:
    asked: AskedRank
    rank: int = UNRANKED


@dataclass(slots=True)
class _Forming:
    """A group whose members come one after another."""

    key: str
    world: int
    members: list[_Member] = field(default_factory=list)
    formed: asyncio.Event = field(default_factory=asyncio.Event)
    slow: bool = False


class Rendezvous:
    """Groups and stores of one generation. `emit` reports what the user should know, `report` a member's fault."""

    def __init__(self, learners: int, emit: Callable[..., None], report: Callable[[MemberFault], None]) -> None:
        self._learners, self._emit, self._report = learners, emit, report
        self._groups: dict[str, _Forming] = {}
        self._tables: dict[str, _Table] = {}
        self._connections: collections.Counter[int] = collections.Counter()
        self._parted = asyncio.Condition()
        self.closed = False

    async def serve(self, learner: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the frames of one connection until it ends."""
        self._connections[learner] += 1
        try:
            await self._answer(learner, reader, writer)
        finally:
            self._connections[learner] -= 1
            async with self._parted:
                self._parted.notify_all()

    async def wait_parted(self, learner: int, limit_s: float) -> None:
        """Returns once no process of a learner's script has a connection: what they had to say is known then."""
        async with self._parted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._parted.wait_for(lambda: not self._connections[learner]), limit_s)

    async def _answer(self, learner: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        table, joined, parted, pid = _Table(), False, False, 0
        with contextlib.suppress(EOFError, OSError, ValueError, LookupError):
            while True:
                request = json.loads(await read_frame(reader))
                match request["op"]:
                    case "join":
                        pid = int(request["pid"])
                        answer = await self._join(learner, request, reader)
                        joined = "value" in answer
                    case "attach":
                        table, answer = self._tables[request["group"]], {"value": True}
                    case "bye":
                        parted = True
                        continue
                    case "failed":
                        parted = True
                        self._tell(MemberFault(learner, pid, int(request["code"])))
                        continue
                    case _:
                        answer = {"value": await _operate(table, request)}
                writer.write(pack_frame(json.dumps(answer).encode()))
        if joined and not parted:
            self._tell(MemberFault(learner, pid, 0))

    def count_waiting(self) -> int:
        """Members of groups that have not formed."""
        return sum(len(group.members) for group in self._groups.values() if not group.formed.is_set())

    def _tell(self, fault: MemberFault) -> None:
        if not self.closed:
            self._report(fault)

    async def _join(self, learner: int, request: dict[str, Any], reader: asyncio.StreamReader) -> dict[str, Any]:
        key, world = f"{request['key']}#{int(request['round'])}", int(request["world"])
        world = world if world > 0 else self._learners
        group = self._groups.setdefault(key, _Forming(str(request["key"]), world))
        if group.world != world:
            return _refuse(
                f"learner {learner} asks for a group of {world} processes under {group.key}, "
                f"the one before it for {group.world}"
            )
        if group.formed.is_set():
            return _refuse(f"the group under {group.key} has its {world} processes: learner {learner} has one too many")
        order = sum(one.asked.learner == learner for one in group.members)
        own = _Member(AskedRank(learner, order, int(request["rank"])))
        group.members.append(own)
        if len(group.members) == world:
            self._form(key, group)
        elif not await self._wait(group, reader, float(request["wait_s"])):
            group.members.remove(own)
            raise EOFError("the member has left")
        return {"value": {"rank": own.rank, "world": world, "group": key}}

    def _form(self, key: str, group: _Forming) -> None:
        ranks, note = assign_ranks([one.asked for one in group.members])
        for one, rank in zip(group.members, ranks, strict=True):
            one.rank = rank
        self._tables[key] = _Table()
        group.formed.set()
        self._emit("group.formed", key=group.key, size=group.world)
        if note:
            self._emit("group.corrected", key=group.key, why=note)

    async def _wait(self, group: _Forming, reader: asyncio.StreamReader, wait_s: float) -> bool:
        """Until the group is formed; False: its member is gone, or has waited for as long as it wanted to."""
        formed = asyncio.ensure_future(group.formed.wait())
        gone = asyncio.ensure_future(reader.read(1))  # it sends nothing before the answer
        try:
            for limit_s in (SLOW_S, max(0.0, wait_s - SLOW_S)):
                await asyncio.wait((formed, gone), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if formed.done() or gone.done():
                    break
                self._name_missing(group)
        finally:
            if not gone.done():
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await gone
            formed.cancel()
        return group.formed.is_set() and not (gone.done() and not gone.cancelled())

    def _name_missing(self, group: _Forming) -> None:
        if not group.slow:
            group.slow = True
            here = sorted({one.asked.learner for one in group.members})
            self._emit(
                "group.waits", key=group.key, has=len(group.members), size=group.world,
                learners=", ".join(map(str, here)),
            )  # fmt: skip


def _refuse(why: str) -> dict[str, str]:
    return {"error": why}


async def _operate(table: _Table, request: dict[str, Any]) -> Any:
    """One operation of a store."""
    values, change = table.values, table.change
    async with change:
        match request:
            case {"op": "set", "key": str(key), "value": str(value)}:
                values[key] = value
            case {"op": "get", "key": str(key)}:
                return values[key]
            case {"op": "add", "key": str(key), "amount": int(amount)}:
                values[key] = str(int(values.get(key, "0")) + amount)
                change.notify_all()
                return int(values[key])
            case {"op": "compare", "key": str(key), "expected": str(expected), "desired": str(desired)}:
                if values.get(key, "") == expected:
                    values[key] = desired
                change.notify_all()
                return values.get(key, expected)
            case {"op": "delete", "key": str(key)}:
                return values.pop(key, None) is not None
            case {"op": "keys"}:
                return list(values)
            case {"op": "wait", "keys": list(keys), "wait_s": float() | int() as wait_s}:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(change.wait_for(lambda: values.keys() >= set(keys)), wait_s or 1e-3)
                return values.keys() >= set(keys)
            case _:
                raise UsageError(f"an unknown request: {request.get('op')}")
        change.notify_all()
        return None
