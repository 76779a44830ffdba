"""Where torch.export makes a constant of a size that was to stay free: the line of the user's that was being run.

torch's own message names the dimension and the number, and no line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from trueline.capture.model.code_paths import SourceLine, current_line


@contextmanager
def watched() -> Iterator[dict[int, SourceLine]]:
    """Size -> the first line that fixed a dimension to it, of what is exported in the block."""
    found: dict[int, SourceLine] = {}
    original = ShapeEnv._set_replacement

    def noting(env: ShapeEnv, symbol: Any, target: Any, why: str) -> None:
        if target.is_Integer and int(target) not in found:
            place = current_line()
            if place is not None:
                found[int(target)] = place
        original(env, symbol, target, why)

    ShapeEnv._set_replacement = noting  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]
