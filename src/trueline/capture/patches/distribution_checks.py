"""The checks of torch.distributions are kept in a trace, as operators that fail.

`Normal(mean, scale)` and `log_prob` read whether all values are valid, and torch.export stops at a branch on values. In
the block the check is `torch._assert_async`, which every format keeps: the program refuses what the model refuses.
Source: torch.distributions.Distribution, `validate_args`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.distributions import Distribution

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms; an operator for each check",
    helps=("mixture density network", "normalizing flow", "nn.Module with Categorical(...).entropy()"),
)

_HOME = "torch.distributions"
_CHECKING = frozenset({Distribution.__init__.__code__, Distribution._validate_sample.__code__})


def is_check(code: CodeType) -> bool:
    """Whether this is torch's code that raises for invalid values, of which the exported program has the check."""
    return code in _CHECKING


@contextmanager
def keep_checks() -> Iterator[None]:
    """In the block, torch.distributions does not branch on whether values are valid."""
    original = torch._is_all_true

    def is_all_true(valid: torch.Tensor) -> Any:
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_HOME):
            return original(valid)
        torch._assert_async(valid.all(), "values of a distribution are invalid")
        return True

    torch._is_all_true = is_all_true  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._is_all_true = original
