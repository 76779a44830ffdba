"""nn.Transformer compares a mask with the causal one, and torch.export cannot follow a comparison of values.

The result is only a hint: `is_causal=False` uses the mask as it is. Source: torch's documentation of
nn.TransformerEncoder.forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules import transformer

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("torch_transformer", "nn.TransformerEncoder(mask=...)"),
)


@contextmanager
def skip_causal_check() -> Iterator[None]:
    """In the block, masks are not compared; the caller's own `is_causal=True` counts."""
    original = transformer._detect_is_causal_mask

    def detect(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = detect
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original
