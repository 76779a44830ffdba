"""Requests to a store in parallel: each takes some hundredths of a second, however many are under way.

The threads end with the call that started them, so a process may be forked between two calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AT_ONCE = 64


def start_all(
    call: Callable[[Item], Result], items: Iterable[Item], *, at_once: int = AT_ONCE
) -> Iterator[Callable[[], Result]]:
    """For each of `items`, in order, a function that returns `call(item)` or raises its error.

    At most `4 * at_once` items are taken ahead, so there may be any number of them.
    """
    threads = ThreadPoolExecutor(at_once, thread_name_prefix="store")
    try:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(threads.submit(call, item))
            if len(waiting) == 4 * at_once:
                yield waiting.popleft().result
        while waiting:
            yield waiting.popleft().result
    except BaseException:  # the caller stops early
        threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def map_concurrently(call: Callable[[Item], Result], items: Iterable[Item], *, at_once: int = AT_ONCE) -> list[Result]:
    """`call` of each of `items`, in order. Raises the first item's error that failed."""
    return [result() for result in start_all(call, items, at_once=at_once)]
