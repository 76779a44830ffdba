"""Questions asked at the same time: each answer of a store takes some hundredths of a second, however many wait.

The threads live as long as the questions, so a process may be forked between two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

Asked = TypeVar("Asked")
Told = TypeVar("Told")

AT_ONCE = 64


def start_all(
    ask: Callable[[Asked], Told], asked: Iterable[Asked], *, at_once: int = AT_ONCE
) -> Iterator[Callable[[], Told]]:
    """For each of `asked`, in their order, what gives its answer or raises what `ask` raised. No more than four times
    as many are taken as are under way, so any number may be asked."""
    rest = iter(asked)
    first = list(islice(rest, 2))
    if len(first) < 2:
        yield from (lambda one=one: ask(one) for one in first)
        return
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="ask")  # which starts them as they are needed
    try:
        waiting: deque[Future[Told]] = deque()
        for one in chain(first, rest):
            waiting.append(threads.submit(ask, one))
            if len(waiting) == 4 * at_once:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result
    finally:
        threads.shutdown(cancel_futures=True)


def map_concurrently(ask: Callable[[Asked], Told], asked: Iterable[Asked], *, at_once: int = AT_ONCE) -> list[Told]:
    """`ask` of each, in their order. Raises what the first that failed raised."""
    return [answer() for answer in start_all(ask, asked, at_once=at_once)]
