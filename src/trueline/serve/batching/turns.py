"""Samples how many short requests come in one turn of the event loop: several are better run together."""

import asyncio

_SAMPLE_EVERY = 16
"""One of this many requests starts a sample of the following turn."""
_LONE_TURNS = 8
"""After this many turns in a row with one request each, turns are no longer crowded."""


class TurnSampler:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.crowded = False
        self._lone = _LONE_TURNS
        self._sampling = False
        self._sampled = 0
        self._until_sample = _SAMPLE_EVERY

    def count_request(self) -> None:
        """A request that runs at once."""
        if self._sampling:
            self._sampled += 1
            if self._sampled == 1:
                self._loop.call_soon(self._end)
            return
        self._until_sample -= 1
        if self._until_sample == 0:
            self._loop.call_soon(self._start)  # with the next turn: this request may be the last of its turn

    def _start(self) -> None:
        self._sampling, self._sampled = True, 0

    def _end(self) -> None:
        self._sampling, self._until_sample = False, _SAMPLE_EVERY
        self.count_turn(self._sampled)

    def count_turn(self, requests: int) -> None:
        self._lone = 0 if requests > 1 else self._lone + 1
        self.crowded = self._lone < _LONE_TURNS
