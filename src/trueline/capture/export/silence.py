"""torch's exporters talk: log lines, dumps of graphs on stderr, warnings about themselves. Not to our user.

What they have to say that matters arrives as an exception, and goes into the attempt's reason.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_LOUD = ("torch.onnx", "torch.export", "torch.fx", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporters in this process while the block runs; not for several threads at once."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            # torch.onnx deep-copies torch's own LeafSpec, whose class warns on every copy (torch 2.13)
            warnings.filterwarnings("ignore", message=r".*LeafSpec.*is deprecated", category=FutureWarning)
            # onnxscript and torch.onnx call deprecated parts of each other
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnxscript|onnx_ir)\b")
            # nn.LSTM and nn.GRU rebuild their list of weights while they are traced; the weights are parameters
            warnings.filterwarnings("ignore", message=r".*_flat_weights.* assigned during export", category=UserWarning)
            # what a model keeps for others to look at; that no answer depends on it is proven by the probes
            warnings.filterwarnings(
                "ignore", message=r"The tensor attribute.* assigned during export", category=UserWarning
            )
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
