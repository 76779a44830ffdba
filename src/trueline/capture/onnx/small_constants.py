"""The exporter's optimizer takes 1e-9 for 0 and 1.000009 for 1; here a constant is what it is.

onnxscript leaves out what is added to a value or multiplied with it if it is 0 or 1, and compares with a tolerance of
1e-8 and 1e-5: `log(p + 1e-12)` becomes `log(p)`, which is infinite where p is 0. Source: the defaults of
`onnxscript.rewriter._pattern_ir.Constant` (0.7), as `onnxscript.rewriter._matcher` asks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnxscript.rewriter import _matcher

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2",
    cost="under 0.1 ms",
    helps=("nerf", "models that compute log(p + 1e-12)"),
)


@contextmanager
def exact() -> Iterator[None]:
    """While a program is optimized in the block, a constant of a rule is met by its own value alone."""
    names: dict[str, Any] = vars(_matcher)
    before = names["math"]
    names["math"] = SimpleNamespace(**vars(math) | {"isclose": _equal})
    try:
        yield
    finally:
        names["math"] = before


def _equal(found: float, wanted: float, **_: float) -> bool:
    """1 / 6 in float32 is not what Python calls 1 / 6; 0 and 1 are the same in both."""
    if wanted in (0, 1):
        return found == wanted
    with np.errstate(over="ignore"):
        return bool(np.float32(found) == np.float32(wanted))
