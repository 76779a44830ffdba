"""Rules of the exporter's optimizer that change answers: constants near 0 or 1, limits of limits, sums at indices.

onnxscript's rules compare constants with a tolerance of 1e-8 and 1e-5: 1e-9 is 0, 1.000009 is 1, and `+ 1e-12` is
dropped from `log(p + 1e-12)`. Here 0 and 1 match only themselves. Those that join two limits
(`x.clamp(0, 1).clamp(5, 9)`, `x.clamp(-5, -1).relu()`, a minimum of a maximum) give the wrong one the last word where
the limits do not overlap, and call the limits of two such pairs by one name. One takes what is added at all rows
(`table.index_put((torch.arange(6),), x, accumulate=True)`) for the sum. They are left out.

So is the translation that `torch.hstack`, `vstack`, `dstack` and `column_stack` come to: a map over a sequence, which
holds tensors of one dtype alone, where torch joins those of several. Without it torch takes these functions apart.
Sources: the defaults of `onnxscript.rewriter._pattern_ir.Constant`, as `onnxscript.rewriter._matcher` uses them; the
modules of these rules.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnxscript import rewriter
from onnxscript.rewriter import _matcher
from onnxscript.rewriter.rules.common import _fuse_relus_clips, _min_max_to_clip, _redundant_scatter_nd
from torch.onnx._internal import _lazy_import

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2",
    cost="under 0.1 ms; an operator more for two limits",
    helps=("nerf", "log(p + 1e-12)", "x.clamp(max=4).clamp(min=-3)"),
)
_WRONG = [*_fuse_relus_clips.rules, *_min_max_to_clip.rules, _redundant_scatter_nd.no_op_static_scatter_nd_rule]

_APIS: Any = vars(_lazy_import)["onnxscript_apis"]
_LIST = _APIS.get_torchlib_ops
_OF_SEQUENCES = {f"aten::atleast_{rank}d.Sequence" for rank in (1, 2, 3)}


@contextmanager
def take_stacks_apart() -> Iterator[None]:
    """In the block torch.onnx has no translation of what torch can take apart better."""
    before = _APIS.get_torchlib_ops
    _APIS.get_torchlib_ops = _list_translations
    try:
        yield
    finally:
        _APIS.get_torchlib_ops = before


def _list_translations() -> list[Any]:
    return [one for one in _LIST() if one.qualified_name not in _OF_SEQUENCES]


@contextmanager
def keep_answers() -> Iterator[None]:
    """In the block, a rule's constant matches its own value only, and rules that are wrong are left out."""
    names: dict[str, Any] = vars(_matcher)
    rules: dict[str, Any] = vars(rewriter)
    original, every = names["math"], rules["_DEFAULT_REWRITE_RULES"]
    names["math"] = SimpleNamespace(**vars(math) | {"isclose": _is_same})
    rules["_DEFAULT_REWRITE_RULES"] = tuple(one for one in every if one not in _WRONG)
    try:
        yield
    finally:
        names["math"], rules["_DEFAULT_REWRITE_RULES"] = original, every


def _is_same(value: float, expected: float, **_: float) -> bool:
    """In float32: 1 / 6 there is not Python's 1 / 6, while 0 and 1 are the same in both."""
    if expected in (0, 1):
        return value == expected
    with np.errstate(over="ignore"):
        return bool(np.float32(value) == np.float32(expected))
