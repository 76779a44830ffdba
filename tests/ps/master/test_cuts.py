"""Buckets move in pieces of like size, between all pairs at once, and a move that fails leaves nothing under way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trueline.ps.master import cuts
from trueline.ps.messages import BUCKETS, ModelSpec, OptimizerSpec, Routing, ServerReport, TableSpec, TableStats
from trueline.ps.partition import make_routing, move_buckets, owners_of

SPEC = ModelSpec(seed=0, groups=(OptimizerSpec(kind="sgd"),), tables=(TableSpec(name="items", dim=4, group=0),))
GB = 1 << 30


def name_servers(count: int) -> list[str]:
    return [f"server-{number}" for number in range(count)]


def list_moves(before: Routing, stages: Sequence[Routing]) -> list[int]:
    """How many buckets change their owner in each stage."""
    owners = [[one.servers[owner] for owner in owners_of(one)] for one in (before, *stages)]
    return [sum(a != b for a, b in zip(old, new, strict=True)) for old, new in itertools.pairwise(owners)]


@pytest.mark.parametrize(("counts", "held", "stages"), [
    ((3, 5), 0, 3), ((3, 5), GB, 3), ((3, 5), 10 * GB, 26), ((5, 2), GB, 4), ((2, 3), 10**15, 342),
])  # fmt: skip
def test_the_more_servers_hold_the_more_stages_of_like_size_lead_to_the_same_routing(
    counts: tuple[int, int], held: int, stages: int
) -> None:
    before, wanted = make_routing(name_servers(counts[0]), ()), name_servers(counts[1])
    planned = cuts.plan_stages(before, wanted, SPEC, held)
    moves = list_moves(before, planned)
    assert len(planned) == stages
    assert max(moves) - min(moves) <= 1
    assert max(moves) * held / BUCKETS <= max(cuts.STAGE_BYTES, held / BUCKETS)
    assert max(moves) <= cuts.STAGE_BUCKETS
    final = move_buckets(before, wanted, ())
    assert (planned[-1].servers, planned[-1].owners) == (final.servers, final.owners)
    assert [one.version for one in planned] == list(range(2, stages + 2))


class FakeLink:
    """A server that holds `held` bytes, and is away when it shall do what `fails` names."""

    def __init__(self, ref: str, said: list[tuple[str, ...]], held: int, *, fails: str = "") -> None:
        self.ref, self._said, self._held, self._fails = ref, said, held, fails

    async def configure(self, *_: Any, **__: Any) -> None:
        self._said.append(("configured", self.ref))

    async def stats(self) -> ServerReport:
        table = TableStats(name="items", rows=1, bytes=self._held, lookups=0, evicted=0, refused=0)
        return ServerReport(ref=self.ref, pid=1, routing=1, initialized=True, steps=0, tables=(table,))

    async def export(self, buckets: Sequence[int]) -> tuple[Any, list[Any]]:
        if self._fails == "export" and ("gave", self.ref) in {one[:2] for one in self._said}:
            raise ConnectionError(f"{self.ref} is away")
        self._said.append(("gave", self.ref, *map(str, buckets)))
        await asyncio.sleep(0)
        return {"of": buckets}, []

    async def take(self, header: Any, _: Any) -> None:
        if self._fails == "take":
            raise ConnectionError(f"{self.ref} is away")
        for _ in range(20):
            await asyncio.sleep(0)
        self._said.append(("took", self.ref, *map(str, header["of"])))

    async def route(self, _: Routing) -> None:
        self._said.append(("routed", self.ref))


def move(held: int, ref: str = "", fails: str = "") -> tuple[list[tuple[str, ...]], Routing, Routing]:
    before, wanted = make_routing(name_servers(3), ()), name_servers(5)
    after = move_buckets(before, wanted, ())
    said: list[tuple[str, ...]] = []
    links: Any = {one: FakeLink(one, said, held // 3, fails=fails if one == ref else "") for one in wanted}

    async def run() -> None:
        try:
            await cuts.move(links, before, after, SPEC, lambda routing: said.append(("kept", str(routing.version))))
        except ConnectionError:
            said.append(("failed",))
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(run())
    return said, before, after


@pytest.mark.parametrize(("held", "most"), [(0, BUCKETS), (GB, 16), (100 * GB, 1)])
def test_each_bucket_that_moves_is_taken_once_in_frames_of_few_bytes_before_the_routing_is_kept(
    held: int, most: int
) -> None:
    said, before, after = move(held)
    moving = np.flatnonzero(owners_of(before) != owners_of(after)).tolist()
    taken = [one for one in said if one[0] == "took"]
    assert sorted(int(bucket) for _, _, *buckets in taken for bucket in buckets) == moving
    assert max(len(buckets) for _, _, *buckets in taken) <= most
    for _, ref, *buckets in taken:
        assert {after.servers[owners_of(after)[int(bucket)]] for bucket in buckets} == {ref}
    assert said.index(("kept", "2")) > max(said.index(one) for one in taken)
    routed = [ref for what, *(ref, *_) in said if what == "routed"]
    assert set(routed[:2]) == {"server-3", "server-4"}  # those that gain go first
    assert set(routed) == set(after.servers)


def test_all_servers_give_at_the_same_time_and_begin_with_different_takers() -> None:
    said, *_ = move(GB)
    first = said[2:5]
    assert {what for what, *_ in first} == {"gave"}
    assert {ref for _, ref, *_ in first} == set(name_servers(3))


@pytest.mark.parametrize(("ref", "fails"), [("server-4", "take"), ("server-1", "export")])
def test_when_a_server_dies_nothing_is_under_way_once_the_move_has_failed(ref: str, fails: str) -> None:
    said, *_ = move(GB, ref, fails)
    assert [one for one in said if one[0] == "took"]
    assert said[-1] == ("failed",)
    assert "kept" not in {what for what, *_ in said}
