"""Moves buckets between the servers of a hybrid job while it trains: in a cut, between two steps of the workers.

A cut names a step a little ahead. Servers apply all steps before it, and queue the parts of it until the cut ends; by
then their routing has changed, so they refuse what was queued, and workers split it again.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack

from trueline.ps.link import ServerLink
from trueline.ps.master import cuts
from trueline.ps.master.cuts import CutBroken
from trueline.ps.messages import ModelSpec, Routing, ServerReport

AHEAD, AHEAD_S = 3, 0.25
"""Steps until a cut, at least, and until all servers know of it: one of them may be under way, at some servers only."""


class BucketMover:
    """`keep` writes a routing to the disk before a server takes it. One `move` at a time."""

    def __init__(self, link: Callable[[str], ServerLink], keep: Callable[[Routing], None]) -> None:
        self._link, self._keep = link, keep
        self._number = 0
        self._reaching: asyncio.Future[list[ServerReport]] | None = None

    def give_way(self) -> None:
        """Ends a cut that is not reached yet: workers wait for something else, and make no step until they have it."""
        if self._reaching is not None:
            self._reaching.cancel()

    async def move(self, spec: ModelSpec, before: Routing, after: Routing, step_s: float) -> None:
        """Returns when the servers have the routing `after`. `step_s`: about how long a step takes. Raises CutBroken;
        then servers may have rows of a move that came to nothing, until they are given the routing that counts."""
        links = {ref: self._link(ref) for ref in dict.fromkeys((*before.servers, *after.servers))}
        own = {ref: links[ref] for ref in before.servers}
        ahead = max(AHEAD, math.ceil(AHEAD_S / step_s)) if step_s > 0 else AHEAD
        try:
            steps = max([(await link.stats()).steps for link in own.values()]) + ahead
        except (OSError, TimeoutError) as error:
            raise CutBroken(f"a server is away: {error}") from error
        self._number += 1
        async with AsyncExitStack() as stack:
            cut = cuts.cut(own, self._number, {0: ((0, steps),)}, max(cuts.REACH_S, 3 * (ahead + 1) * step_s))
            reaching = self._reaching = asyncio.ensure_future(stack.enter_async_context(cut))
            await asyncio.wait([reaching])
            self._reaching = None
            if reaching.cancelled():
                raise CutBroken("the workers have something else to do first")
            if any(one.parts for one in reaching.result()):
                found = ", ".join(f"{one.ref} has {one.steps} steps and {one.parts} parts" for one in reaching.result())
                raise CutBroken(f"the cut at step {steps} came late: {found}")
            await cuts.move(links, before, after, spec, self._keep)
