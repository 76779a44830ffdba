"""Python's numbers beside doubles stay doubles; torch.onnx rounds many to single precision first, off by 1e-9 to 1e-7.

A number that stands alone (`CastLike(0.1, x)`, `Constant(value_float=0.1)`) becomes FP32, and what casts it to FP64
comes too late. Here such a cast gets the number itself. Those that are attributes, of an ONNX operator or of a compiled
function, are in `double_operators.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from onnxscript import ir
from torch.onnx._internal.exporter import _building

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13, onnxscript 0.7.2",
    cost="under 1 ms",
    helps=("full_like of doubles", "add with alpha, of doubles", "masked_fill of doubles"),
)
_RECORDER: Any = _building.OpRecorder
_CASTS = ("Cast", "CastLike")
_NUMBER = "trueline.number"
"""Key in what is known of a value while it is written: the Python number, or numbers, of which it is a constant."""


@contextmanager
def keep_exact() -> Iterator[None]:
    """In the block, the exporter casts Python's floats from double precision."""
    record = _RECORDER._call_op

    def record_exactly(
        self: Any, signature: Any, inputs: Mapping[str, Any], attributes: Mapping[str, Any], count: int
    ) -> Sequence[Any]:
        if signature.domain == "" and signature.name in _CASTS:
            first, *others = inputs
            inputs = {first: _widen(self, inputs[first]), **{name: inputs[name] for name in others}}
        outputs: Sequence[Any] = record(self, signature, inputs, attributes, count)
        if signature.domain == "" and signature.name == "Constant":
            numbers = attributes.get("value_float", attributes.get("value_floats"))
            outputs[0].meta[_NUMBER] = getattr(numbers, "value", numbers)
        return outputs

    _RECORDER._call_op = record_exactly
    try:
        yield
    finally:
        _RECORDER._call_op = record


def _widen(recorder: Any, given: Any) -> Any:
    """What a cast gets of `given`: the constant in double where it is, or holds, a Python number that needs it."""
    number = given
    if isinstance(given, ir.Value):
        made = (key for key, value in recorder.constant_farm.items() if value is given)
        number, _ = next(made, (given.meta.get(_NUMBER), None))
    numbers = number if isinstance(number, list | tuple) else [number]
    if not numbers or not all(isinstance(one, float) for one in numbers):
        return given
    exact = ir.tensor(number, dtype=ir.DataType.DOUBLE)
    return given if (exact.numpy() == exact.numpy().astype("float32")).all() else recorder.opset.Constant(value=exact)
