"""Cases of a parametrized test: a few in `make test`, the others in `make test-long` or `make test-jobs`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from _pytest.mark import MarkDecorator, ParameterSet


def few(cases: Collection[Any], kept: int, mark: MarkDecorator = pytest.mark.long) -> list[Any]:
    """`cases`, of which all but `kept`, evenly spread from the first to the last, have the mark.

    >>> [case for case in few("abcde", 2) if isinstance(case, str)]
    ['a', 'e']
    """
    last = len(cases) - 1
    chosen = {round(one * last / max(1, kept - 1)) for one in range(kept)}
    return [case if at in chosen else _add_mark(case, mark) for at, case in enumerate(cases)]


def _add_mark(case: Any, mark: MarkDecorator) -> ParameterSet:
    if isinstance(case, ParameterSet):
        return ParameterSet(case.values, [*case.marks, mark], case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
