"""nn.Transformer looks whether a mask is causal, to leave it out of the sum; no tracer can follow a look at values.

What it finds is a hint and changes no answer: `is_causal=False` uses the mask as it was given. Source: torch's
documentation of nn.TransformerEncoder.forward.
"""

from __future__ import annotations

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
def masks_as_given() -> Iterator[None]:
    """While a model is traced in the block, masks are used without a look at them, unless the caller says causal."""
    before = transformer._detect_is_causal_mask

    def unseen(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = unseen
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before
