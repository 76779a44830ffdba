"""The context in which torch.export follows a model: no gradients, no output, and the patches of torch switched on."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from trueline.capture.export import attention
from trueline.capture.model.code_paths import SourceLine, current_line
from trueline.capture.patches import (
    Patch,
    causal_mask,
    decomposition_cache,
    distribution_checks,
    einsum_order,
    fake_quantization,
    inverse_stft,
    module_to,
    packed_sequence,
    recurrent,
    symbolic_sizes,
    value_checks,
)
from trueline.capture.patches.stand_ins import size_functions, size_multiples
from trueline.recipe.eager_mode import as_trained

PATCH = Patch(issue="none found", versions="torch 2.13", cost="under 0.1 ms", helps=("all",))

_LOGGERS = (
    "torch.onnx",
    "torch.export",
    "torch._export",
    "torch.fx",
    "torch.fx.experimental.symbolic_shapes",
    "onnxscript",
    "onnx_ir",
)
_WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # torch.onnx deep-copies torch's own LeafSpec, whose class warns on every copy (torch 2.13)
    (r".*LeafSpec.*is deprecated", FutureWarning, ""),
    # onnxscript and torch.onnx call deprecated parts of each other
    ("", DeprecationWarning, r"(torch|onnxscript|onnx_ir)\b"),
    # nn.LSTM and nn.GRU rebuild their list of weights while they are traced; the weights are parameters
    (r".*_flat_weights.* assigned during export", UserWarning, ""),
    # what a model keeps for inspection; the probes prove that no output depends on it
    (r"The tensor attribute.* assigned during export", UserWarning, ""),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporters' logs, warnings and dumps on stderr in this process; not for several threads at once.

    What matters arrives as an exception, and its message goes into the attempt's reason.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            for message, category, module in _WARNINGS:
                warnings.filterwarnings("ignore", message, category, module)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def apply_patches() -> Iterator[None]:
    """Parts of torch that its own exporter specializes or refuses are replaced by ones that it can follow."""
    # scan compiles its body: guards of what is in the cache already would run on the free sizes, and fix them
    torch._dynamo.reset()
    with _drop_left_modes(), ExitStack() as stack:
        for patch in (
            recurrent.keep_layers_whole,
            packed_sequence.keep_padded,
            causal_mask.skip_causal_check,
            attention.keep_layout,
            symbolic_sizes.keep_sizes_free,
            module_to.skip_conversions,
            einsum_order.order_by_example,
            inverse_stft.keep_lengths,
            distribution_checks.keep_checks,
            value_checks.keep_checks,
            fake_quantization.keep_steps,
            size_functions.add_operators,
            size_multiples.keep_multiples,
        ):
            stack.enter_context(patch())
        yield


@contextmanager
def _drop_left_modes() -> Iterator[None]:
    """torch.export leaves its own mode behind when it fails while another is on, and everything that is traced in this
    process afterwards would pass through it."""
    before = len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        while len(_get_current_function_mode_stack()) > before:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]


@contextmanager
def tracing() -> Iterator[None]:
    """What holds while torch.export follows a model."""
    with torch.no_grad(), as_trained(), quiet(), decomposition_cache.cache_operators(), apply_patches():
        yield


@contextmanager
def watch_specialization() -> Iterator[dict[int, SourceLine]]:
    """Size -> the user's line that made a constant of a free dimension, which torch's own message does not name."""
    lines: dict[int, SourceLine] = {}
    original = ShapeEnv._set_replacement

    def set_replacement(env: ShapeEnv, symbol: Any, target: Any, why: str) -> None:
        if target.is_Integer and int(target) not in lines:
            place = current_line()
            if place is not None:
                lines[int(target)] = place
        original(env, symbol, target, why)

    ShapeEnv._set_replacement = set_replacement  # type: ignore[method-assign, assignment]
    try:
        yield lines
    finally:
        ShapeEnv._set_replacement = original  # type: ignore[method-assign]
