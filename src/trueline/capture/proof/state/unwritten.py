"""Does a model read memory that nothing has written? `torch.empty` mostly returns zeros, and sometimes what was there.

Its tensors are filled with two numbers in two more calls: an answer that differs depends on them.
"""

from typing import Any

import torch

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import SourceLine
from trueline.capture.model.dispatch import OperatorMode

_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
FILLED = (1234.0, -77.0)
"""Two fillings. No large numbers: masked attention multiplies what it never wrote by 0."""


class FillEmpty(OperatorMode):  # type: ignore[no-untyped-call]
    """Fills the tensors that the user's lines create without values, and notes these lines."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value
        self.lines: list[SourceLine | None] = []

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            return result
        if func.overloadpacket.__name__ in _EMPTY and result.layout is torch.strided and not result.is_quantized:
            self.lines.append(code_paths.current_line())
            fraction = result.is_floating_point() or result.is_complex()
            result.fill_(self._value if fraction else int(self._value > 0))
        return result
