"""Cases of a parametrized test: a few in each run of the suite, all in `make test-long`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def few(cases: Collection[Any], kept: int) -> list[Any]:
    """`cases`, of which all but `kept`, evenly spread from the first to the last, are marked `long`.

    >>> [case for case in few("abcde", 2) if isinstance(case, str)]
    ['a', 'e']
    """
    last = len(cases) - 1
    chosen = {round(one * last / max(1, kept - 1)) for one in range(kept)}
    return [case if at in chosen else _mark_long(case) for at, case in enumerate(cases)]


def _mark_long(case: Any) -> ParameterSet:
    if isinstance(case, ParameterSet):
        return ParameterSet(case.values, [*case.marks, pytest.mark.long], case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
