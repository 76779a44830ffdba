"""The one mode in which Trueline runs a recipe's eager model outside of training: as training runs it.

Evaluate, predict, capture, golden records and verify use it, so that what was measured is what is served.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

USES_FAST_PATH = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""The modules of torch that have a second implementation for calls without gradients."""


@contextmanager
def as_trained() -> Iterator[None]:
    """Switches torch's fused fast path of nn.TransformerEncoder off during the block.

    Without gradients torch takes a fused path that returns zeros where the padding mask is set, and fails when all is
    masked (https://github.com/pytorch/pytorch/issues/87013 and others); training never takes it, and no exporter
    follows it. The switch is torch's, for the whole process.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
