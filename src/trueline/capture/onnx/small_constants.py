"""The exporter's optimizer takes 1e-9 for 0 and 1.000009 for 1, and drops `+ 1e-12` from `log(p + 1e-12)`.

onnxscript's rules compare constants with a tolerance of 1e-8 and 1e-5. Here 0 and 1 match only themselves. Source: the
defaults of `onnxscript.rewriter._pattern_ir.Constant`, as `onnxscript.rewriter._matcher` uses them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnxscript.rewriter import _matcher

from trueline.capture.patches import Patch

PATCH = Patch(issue="none found", versions="onnxscript 0.7.2", cost="under 0.1 ms", helps=("nerf", "log(p + 1e-12)"))


@contextmanager
def compare_exactly() -> Iterator[None]:
    """In the block, where a program is optimized, a rule's constant matches its own value only."""
    names: dict[str, Any] = vars(_matcher)
    original = names["math"]
    names["math"] = SimpleNamespace(**vars(math) | {"isclose": _is_same})
    try:
        yield
    finally:
        names["math"] = original


def _is_same(value: float, expected: float, **_: float) -> bool:
    """In float32: 1 / 6 there is not Python's 1 / 6, while 0 and 1 are the same in both."""
    if expected in (0, 1):
        return value == expected
    with np.errstate(over="ignore"):
        return bool(np.float32(value) == np.float32(expected))
