"""The one mode in which Trueline runs a recipe's eager model outside of training: as training runs it, with structured
control flow step by step.

Evaluate, predict, capture, golden records and verify use it, so that what was measured is what is served.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops import utils
from torch._higher_order_ops.while_loop import while_loop_dense
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

USES_FAST_PATH = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""The modules of torch that have a second implementation for calls without gradients."""

_Compile = Callable[..., Any]
_compile: _Compile = utils._hop_compile_and_call


@contextmanager
def as_trained() -> Iterator[None]:
    """Switches torch's fused fast path of nn.TransformerEncoder off during the block, and the compiler of structured
    control flow.

    Without gradients torch takes a fused path that returns zeros where the padding mask is set, and fails when all is
    masked (https://github.com/pytorch/pytorch/issues/87013 and others); training never takes it, and no exporter
    follows it. `torch.cond`, `while_loop` and `scan` compile their functions at each new shape, for seconds, outside
    of every dispatch mode; here they call them. torch's compiler, once used, switches the checks of torch.distributions
    off: here they are as in a process that has not used it. The switches are torch's, for the whole process.
    """
    before, compiles, checks = torch.backends.mha.get_fastpath_enabled(), utils._hop_compile_and_call, _checks_values()
    torch.backends.mha.set_fastpath_enabled(False)
    utils._hop_compile_and_call = _run
    if _has_compiled():
        Distribution.set_default_validate_args(__debug__)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        utils._hop_compile_and_call = compiles
        Distribution.set_default_validate_args(checks)


def _checks_values() -> bool:
    return bool(Distribution._validate_args)


def _has_compiled() -> bool:
    """Whether torch's compiler was used here; source: TorchPatcher.patch in torch/_dynamo/eval_frame.py."""
    used = sys.modules.get("torch._dynamo.eval_frame")
    return used is not None and used.TorchPatcher.patch.cache_info().currsize > 0


@contextmanager
def as_called() -> Iterator[None]:
    """Within `as_trained`, structured control flow as torch runs it by itself: compiled."""
    before = utils._hop_compile_and_call
    utils._hop_compile_and_call = _compile
    try:
        yield
    finally:
        utils._hop_compile_and_call = before


def _run(operator: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
    """What torch compiles for one eager call of an operator, run as it is; compiled while a tracer follows it.

    The steps are the operator's, not lines of the user's: a tracer that has a function `inside` is replaced by that.
    """
    steps = _STEPS.get(getattr(operator, "__name__", ""))
    if steps is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return _compile(operator, args, kwargs)
    tracer = sys.gettrace()
    sys.settrace(getattr(tracer, "inside", tracer))
    try:
        return steps(*args)
    finally:
        sys.settrace(tracer)


def _cond(pred: Any, one: Callable[..., Any], other: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return (one if pred else other)(*operands)


def _scan(step: Callable[..., Any], init: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """The last carried values, and the outputs of all steps, stacked."""
    carry: Any = init
    rows = []
    for at in range(len(inputs[0])):
        carry, row = step(*tree_leaves(carry), *(one[at] for one in inputs))
        rows.append(row)
    return carry, tree_map(lambda *each: torch.stack(each), *rows)


_STEPS: dict[str, Callable[..., Any]] = {
    "_cond_op_wrapper": _cond,
    "_while_loop_op_wrapper": while_loop_dense,
    "run_flattened_scan": _scan,
}
"""By the names that torch gives the functions which it compiles."""
