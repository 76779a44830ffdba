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
        self._steps = 0  # of the cut that is being reached

    def give_way(self, steps: int = 0) -> None:
        """Ends a cut that cannot be reached: workers have made `steps` steps, wait for something else, and make no
        further one until they have it."""
        if self._reaching is not None and self._steps > steps:
            self._reaching.cancel()

    async def move(self, spec: ModelSpec, before: Routing, after: Routing, step_s: float, until: int = 0) -> None:
        """Returns when the servers have the routing `after`. `step_s`: about how long a step takes. `until`: the steps
        after which workers will wait for something else; a cut that is due later would not be reached. Raises
        CutBroken; then servers may have rows of a move that came to nothing, until they are given the routing that
        counts."""
        links = {ref: self._link(ref) for ref in dict.fromkeys((*before.servers, *after.servers))}
        own = {ref: links[ref] for ref in before.servers}
        ahead = max(AHEAD, math.ceil(AHEAD_S / step_s)) if step_s > 0 else AHEAD
        try:
            made = max([(await link.stats()).steps for link in own.values()])
        except (OSError, TimeoutError) as error:
            raise CutBroken(f"a server is away: {error}") from error
        self._number += 1
        steps = self._steps = until if made < until < made + ahead else made + ahead
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
