"""Cuts a request with more rows than a run may have into pieces, where rows are independent.

The pieces wait one after the other, each behind the requests that came meanwhile: a large request neither needs the
memory of one run nor holds up the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trueline.serve.batching.policy import Arrays, Outputs

    Submit = Callable[[Arrays, int, bool], asyncio.Future[Outputs]]

LONG_JOIN_BYTES = 2**20
"""Longer outputs are joined in a thread."""
PIECE_S = 2e-3
"""A piece takes about as long: runs in one thread without the loop between them."""


def cut(rows: int, most: int, step: int = 1) -> list[int]:
    """Sizes of pieces of at most `most` rows, all multiples of `step` and as equal as that allows.

    >>> cut(10, 4), cut(10, 4, step=2), cut(3, 8)
    ([4, 3, 3], [4, 4, 2], [3])
    """
    units, per_piece = rows // step, max(1, most // step)
    count = max(1, -(-units // per_piece))
    return [(units // count + (at < units % count)) * step for at in range(count)]


def slices(inputs: Arrays, sizes: Sequence[int]) -> Iterator[tuple[Arrays, int]]:
    """The pieces of `inputs` and their rows."""
    at = 0
    for rows in sizes:
        yield {name: array[at : at + rows] for name, array in inputs.items()}, rows
        at += rows


def join(answers: Sequence[Outputs]) -> Outputs:
    """The outputs of all pieces."""
    if len(answers) == 1:
        return answers[0]
    return {name: np.concatenate([one[name] for one in answers]) for name in answers[0]}


def submit_in_pieces(
    submit: Submit, pieces: Iterator[tuple[Arrays, int]], loop: asyncio.AbstractEventLoop
) -> asyncio.Future[Outputs]:
    """A future of the joined outputs. `submit(inputs, rows, first)` queues a piece; only for the first it may refuse.

    Raises what that raises. Cancelling the future withdraws the piece that waits.
    """
    answer: asyncio.Future[Outputs] = loop.create_future()
    answers: list[Outputs] = []
    waiting = submit(*next(pieces), True)

    def step(done: asyncio.Future[Outputs]) -> None:
        nonlocal waiting
        if answer.done():
            return
        failure = asyncio.CancelledError() if done.cancelled() else done.exception()
        if failure is not None:
            answer.set_exception(failure)
            return
        answers.append(done.result())
        try:
            following = next(pieces, None)
            if following is None:
                _finish(answer, answers, loop)
                return
            waiting = submit(*following, False)
        except Exception as error:  # noqa: BLE001 - blind on purpose: the request that caused it gets it
            answer.set_exception(error)
            return
        waiting.add_done_callback(step)

    waiting.add_done_callback(step)
    answer.add_done_callback(lambda _: waiting.cancel())
    return answer


def _finish(answer: asyncio.Future[Outputs], answers: Sequence[Outputs], loop: asyncio.AbstractEventLoop) -> None:
    if sum(array.nbytes for one in answers for array in one.values()) <= LONG_JOIN_BYTES:
        answer.set_result(join(answers))
        return

    def pass_on(joined: asyncio.Future[Outputs]) -> None:
        failure = asyncio.CancelledError() if joined.cancelled() else joined.exception()
        if answer.done():
            return
        if failure is None:
            answer.set_result(joined.result())
        else:
            answer.set_exception(failure)

    loop.run_in_executor(None, join, answers).add_done_callback(pass_on)
