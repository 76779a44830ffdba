"""Cuts: moments at which all servers have applied the same minibatches, in which they save or hand over what they hold.

    begin    every server applies what is under way, then queues pushes of anything else; pulls are answered
    act      fork and write a checkpoint's part, or copy buckets to their next owner and take the next routing
    end      the queues are worked off

A death in the middle ends the cut on all servers, and it is tried again later. The next routing is in the journal
before a server takes it; those that receive take it before those that give, so that after any death the rows that a
push reached, and the minibatches that its server says it has, belong together.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trueline.errors import TruelineError
from trueline.ps.link import ServerLink
from trueline.ps.messages import BUCKETS, ModelSpec, Routing, Runs, ServerReport
from trueline.ps.partition import move_buckets, owners_of

REACH_S = 10.0
"""How long servers may at least take to apply what is under way; then the cut is given up, and tried again later."""
STAGE_BYTES, STAGE_BUCKETS = 160 << 20, 160
"""About how much of what servers hold moves in one cut, and the most buckets; training waits meanwhile."""
FRAME_BYTES = 16 << 20
"""The same of one frame: its memory is used again for the next, which of a whole stage would be new."""


class CutBroken(Exception):
    """A server went away, or what is under way was not applied in time; nothing has changed."""


@contextlib.asynccontextmanager
async def cut(
    links: Mapping[str, ServerLink], number: int, keys: Mapping[int, Runs], reach_s: float = REACH_S
) -> AsyncIterator[list[ServerReport]]:
    """Within the block all servers of `links` have applied the same: all of `keys`. Servers are in one cut at a time.
    Gives what they say. Raises CutBroken."""
    try:
        try:
            async with asyncio.timeout(reach_s):
                await asyncio.gather(*(link.begin_cut(number, keys, reach_s) for link in links.values()))
        except TimeoutError:
            raise CutBroken(f"what is under way was not applied within {reach_s:.0f} s") from None
        reports = await asyncio.gather(*(link.stats() for link in links.values()))
        if any(one.applied != reports[0].applied for one in reports):  # of a lease of an earlier master
            raise CutBroken("the servers do not have the same minibatches yet")
        yield reports
    except (OSError, TimeoutError, TruelineError) as error:
        raise CutBroken(f"{type(error).__name__}: {error}") from error
    finally:
        await asyncio.gather(*(_end(link, number) for link in links.values()))


async def _end(link: ServerLink, number: int) -> None:
    with contextlib.suppress(OSError, TimeoutError, TruelineError):  # a server that is gone has left the cut
        await link.end_cut(number)


async def save(links: Mapping[str, ServerLink], folder: Path) -> dict[str, str]:
    """In a cut: has every server write its part of a checkpoint; returns their files, by server."""
    paths = {ref: str(folder / f"{ref}.part") for ref in links}
    await asyncio.gather(*(link.save(paths[ref]) for ref, link in links.items()))
    return paths


def count_bytes(reports: Iterable[ServerReport]) -> int:
    """What servers hold in tables."""
    return sum(table.bytes for one in reports for table in one.tables)


def count_buckets(wanted: int, held: int) -> int:
    """How many of the buckets, which hold `held` bytes together, have about the `wanted` bytes; 1 or more.

    >>> count_buckets(1 << 20, 1 << 30), count_buckets(1 << 20, 1 << 40), count_buckets(1 << 20, 0)
    (1, 1, 1024)
    """
    return max(1, min(BUCKETS, wanted * BUCKETS // max(1, held)))


def plan_stages(routing: Routing, servers: Sequence[str], spec: ModelSpec, held: int) -> list[Routing]:
    """The routings that lead to `servers`, each of which moves about STAGE_BYTES of the bytes `held`, and all of them
    the same number of buckets; the last has dense parts in their new places, unless servers are added: then the first
    has."""
    final = move_buckets(routing, servers, spec.dense)
    union = list(routing.servers) + [ref for ref in servers if ref not in routing.servers]
    number = {ref: index for index, ref in enumerate(union)}
    old, new = (np.array([number[one.servers[owner]] for owner in owners_of(one)]) for one in (routing, final))
    moving = np.flatnonzero(old != new)
    most = min(STAGE_BUCKETS, count_buckets(STAGE_BYTES, held))
    pieces = np.array_split(moving, max(1, -(-len(moving) // most)))
    stages, version = list[Routing](), routing.version
    for piece in pieces:
        version += 1
        old[piece] = new[piece]
        last = len(stages) == len(pieces) - 1
        names = list(servers) if last else union
        places = np.array([names.index(union[owner]) for owner in old], dtype="<u2")
        grown = len(union) > len(routing.servers)
        dense = final.dense if last or grown else routing.dense
        stages.append(Routing(version=version, servers=tuple(names), owners=places.tobytes(), dense=dense))
    return stages


async def move(
    links: Mapping[str, ServerLink], before: Routing, after: Routing, spec: ModelSpec, keep: Callable[[Routing], None]
) -> None:
    """In a cut: hands over what `after` gives to other servers than `before`. `keep` writes the routing to the journal.
    `links` has the servers of both."""
    for ref in after.servers:
        if ref not in before.servers:
            await links[ref].configure(spec, after, fresh=True)
    gaining = await _copy(links, before, after)
    keep(after)
    await spread(links, after, first=gaining)
    for ref in before.servers:
        if ref not in after.servers:
            with contextlib.suppress(OSError, TruelineError):  # it refuses clients that have the old routing
                await links[ref].route(after)


async def _copy(links: Mapping[str, ServerLink], before: Routing, after: Routing) -> list[str]:
    """Copies rows and dense parts to their next owners; returns the refs of these."""
    owners, later = owners_of(before), owners_of(after)
    gaining: dict[str, None] = {}
    takings = list[asyncio.Future[None]]()
    reports = await asyncio.gather(*(links[ref].stats() for ref in before.servers))
    few = count_buckets(FRAME_BYTES, count_bytes(reports))

    async def give(giver: int, ref: str) -> None:
        taking = None
        for taker in np.roll(np.arange(len(after.servers)), -giver):  # no two givers begin with the same taker
            other = after.servers[taker]
            buckets = [b for b in range(BUCKETS) if owners[b] == giver and later[b] == taker]
            for at in range(0, len(buckets) if ref != other else 0, few):
                header, arrays = await links[ref].export(buckets[at : at + few])
                if taking is not None:
                    await taking
                taking = asyncio.ensure_future(links[other].take(header, arrays))
                takings.append(taking)
                gaining[other] = None

    try:
        await _finish_all(give(*one) for one in enumerate(before.servers))
    finally:
        await _finish_all(takings)
    added = [ref for ref in after.servers if ref not in before.servers and ref not in gaining]
    if before.dense == after.dense and added:  # they take at least what is applied
        header, arrays = await links[before.servers[0]].export(())
        for ref in added:
            await links[ref].take(header, arrays)
            gaining[ref] = None
    if before.dense != after.dense:
        for ref in before.servers:
            header, arrays = await links[ref].export(())
            for other in after.servers:
                if other != ref:
                    await links[other].take(header, arrays)
                    gaining[other] = None
    return list(gaining)


async def spread(links: Mapping[str, ServerLink], routing: Routing, *, first: Sequence[str] = ()) -> None:
    """Gives all servers the routing, to those in `first` before the others. May be repeated."""
    others = [ref for ref in routing.servers if ref not in first]
    for refs in ([ref for ref in first if ref in routing.servers], others):
        await _finish_all(links[ref].route(routing) for ref in refs)


async def _finish_all(calls: Iterable[Awaitable[None]]) -> None:
    """At the same time; all of them have ended, also when one fails, as the cut ends next."""
    for end in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end
