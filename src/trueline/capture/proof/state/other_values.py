"""Other values of a kind: what a count, a text, a collection or an iterator may be after many more calls."""

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from trueline.capture.model import opaque
from trueline.capture.model.python_state import state_of
from trueline.capture.model.streams import is_iterator
from trueline.capture.proof.state import picks
from trueline.capture.proof.state.tainted import Decisions, TaintedDraws

COUNTS = (9, 10, 99, 100, 999, 1000, 9999, 10_000, 1_000_000)
"""Values that a counter of calls is set to."""
LONGEST = 1_000_000
"""Elements of a list that is made longer."""
MANY_NUMBERS = 1 << 23
"""Numbers of a tensor or array that is replaced."""
AHEAD = 100_000
"""Values of an iterator that are looked at."""
COLLECTIONS = (list, deque, dict, set, frozenset)
_NUMBERS = (int, float, complex, np.number, Decimal, Fraction)


def make_others(value: Any, before: object, constants: Sequence[float]) -> Iterator[Any]:
    """Other values of that kind: usual counts first, then those around numbers in the code."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, _NUMBERS):
        yield from _other_values(value, before, constants)
    elif isinstance(value, timedelta):
        yield from (timedelta(seconds=one) for one in (*COUNTS, *constants) if abs(one) < 1e9)
    elif isinstance(value, str):
        yield from map(str, COUNTS)
        yield from ("", value + "0", *(f"{int(one)}" for one in constants))
    elif isinstance(value, bytes):
        yield from (b"." * int(one) for one in (*COUNTS, *constants) if abs(one) <= LONGEST)
    elif isinstance(value, bytearray):
        for count in (*COUNTS, *map(int, constants)):
            for order in ("big", "little"):
                yield bytearray(abs(count).to_bytes(max(len(value), 8), order))
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield from _other_numbers(value, constants)
    elif isinstance(value, COLLECTIONS):
        yield from _other_lengths(value, constants)
    elif state_of(value) is not None and not isinstance(value, torch.Generator):
        yield from (TaintedDraws(value, Decisions(), at) for at in range(picks.MOST))
    elif is_iterator(value) and not isinstance(value, GeneratorType):
        yield from _other_iterators(value)
    else:
        counts = (*COUNTS, *(int(one) - less for one in constants for less in (1, 0, -1)))
        yield from opaque.make_others(value, (one for one in counts if 0 <= one <= LONGEST))


def _other_values(value: Any, before: object, constants: Sequence[float]) -> Iterator[Any]:
    kind: Any = type(value)
    step = value - before if isinstance(before, kind) else 1
    around = [(count, (0,)) for count in COUNTS] + [(one, (step, 1, 0, -1)) for one in constants]
    for one, less in around:
        with suppress(OverflowError, ValueError):  # of np.int8
            yield from dict.fromkeys(kind(one) - by for by in less)


def _other_numbers(value: Any, constants: Sequence[float]) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.numel() > MANY_NUMBERS or value.is_quantized:
            return
        value, full = value.detach(), torch.full_like
    elif value.dtype.kind not in "iuf" or value.size > MANY_NUMBERS:
        return
    else:
        full = np.full_like  # type: ignore[assignment]
    for count in (*COUNTS, *(one - less for one in constants for less in (1, 0, -1))):
        try:
            yield full(value, count)
        except (OverflowError, RuntimeError, ValueError):
            continue
    yield value * 10 if str(value.dtype) not in ("torch.bool", "bool") else ~value


def _other_iterators(value: Any) -> Iterator[Any]:
    """Iterators whose next values are those that come later; of one that cannot be copied, numbers beside the next."""
    try:
        ahead = islice(copy.deepcopy(value), AHEAD)
        values = list({repr(one): one for one in ahead if isinstance(one, _NUMBERS)}.values())
    except Exception:  # noqa: BLE001 - an iterator that has no copy may raise anything
        after = next(value, None)
        values = [after + 1] if isinstance(after, int | float) else []
        if isinstance(after, str) and after.isdecimal():
            return iter([iter([f"{int(after) + 1}"] * len(COUNTS))])
    return (iter([one] * len(COUNTS)) for one in (*values[1 : len(COUNTS)], *values[-len(COUNTS) :]))


def _other_orders(value: dict[Any, Any], constants: Sequence[float]) -> Iterator[dict[Any, Any]]:
    """Its last key, and numbers in the code that are keys, in the first place and in the second."""
    keys = list(value)
    for one in (*keys[-1:], *(key for key in constants if key in value)) if type(value) in (dict, OrderedDict) else ():
        yield type(value)({one: value[one], **value})
        yield type(value)({keys[0]: value[keys[0]], one: value[one], **value})


def _other_lengths(value: Any, constants: Sequence[float]) -> Iterator[Any]:
    lengths = [0, *COUNTS, *(int(one) - less for one in constants for less in (1, 0, -1))]
    if isinstance(value, list | deque):
        content = list(value) or [0]
        limit = getattr(value, "maxlen", None) or LONGEST
        for length in lengths:
            if 0 <= length <= limit:
                longer = (content * (length // len(content) + 1))[-length:] if length else []
                yield deque(longer, limit) if isinstance(value, deque) else type(value)(longer)
        return
    if isinstance(value, dict):
        yield from _other_orders(value, constants)
    for length in (one for one in lengths if 0 <= one <= LONGEST):
        if not isinstance(value, dict):
            yield type(value)({*value, *range(10**12, 10**12 + length - len(value))})
        elif value:
            table = value.copy()
            table.update(dict.fromkeys(range(10**12, 10**12 + length - len(value)), next(reversed(value.values()))))
            yield table
