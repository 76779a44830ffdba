"""Functions of statistics in ONNX are as near to the exact answer as single precision lets be, over their whole range,
and infinite or NaN where torch's are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export.tracing import quiet
from trueline.capture.onnx import emit
from worlds.cases import few

pytestmark = pytest.mark.slow
INF, NAN = math.inf, math.nan
STEPS = torch.linspace(-1, 1, 4001, dtype=torch.float64)
SCALES = (1e-30, 1e-6, 0.1, 1, 3, 30, 300, 1e5, 1e30)
NEAR = torch.cat([one + 1e-6 * STEPS for one in (1.0, 2.0, 1.4616321, -2.4570247, -2.7476828, 0.5, -1.0)])
LINE = torch.cat([*(scale * STEPS for scale in SCALES), NEAR]).float()
"""All sizes, and what lies around zeros and poles."""
UNIT = torch.cat([STEPS, 1 - 10 ** (-3 * (STEPS + 1)), 10 ** (-20 * (STEPS + 1))]).float()
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "lgamma": (torch.lgamma, LINE),
    "digamma": (torch.digamma, LINE),
    "erfinv": (torch.erfinv, UNIT),
    "ndtri": (torch.special.ndtri, (UNIT + 1) / 2),
    "i0": (torch.special.i0, LINE.clamp(-88, 88)),
    "i0e": (torch.special.i0e, LINE),
    "i1": (torch.special.i1, LINE.clamp(-88, 88)),
    "i1e": (torch.special.i1e, LINE),
}
ENDS = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, -3.0, 89.0, -89.0, 1e38, -1e38, INF, -INF, NAN])


class Elementwise(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def answer(function: Callable[..., Any], *inputs: Tensor) -> list[np.ndarray[Any, Any]]:
    """What ONNX Runtime computes."""
    with torch.no_grad(), quiet():
        program = torch.export.export(Elementwise(function), inputs, strict=False)
        count = len(program.graph_signature.user_outputs)
        made = emit.translate(program, ["x"], [f"y{at}" for at in range(count)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        made.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: list[np.ndarray[Any, Any]] = session.run(None, {"x": inputs[0].numpy()})
    return found


@pytest.mark.parametrize("name", few(FUNCTIONS, 2))
def test_a_function_of_statistics_is_exact_to_single_precision_over_its_range(name: str) -> None:
    function, values = FUNCTIONS[name]
    (found,), exact, eager = answer(function, values), function(values.double()).numpy(), function(values).numpy()
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    plain = np.isfinite(rounded) & np.isfinite(eager) & (np.abs(exact) > np.finfo(np.float32).tiny)
    off = np.abs(found[plain] - exact[plain]) / np.abs(exact[plain])
    assert off.max() < 1.3e-7


@pytest.mark.parametrize("name", few(FUNCTIONS, 2))
def test_a_function_of_statistics_has_poles_and_ends_where_torch_has(name: str) -> None:
    function, _ = FUNCTIONS[name]
    (found,), expected = answer(function, ENDS), function(ENDS).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_number_is_taken_apart_exactly_and_put_together_again() -> None:
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    values = torch.cat([powers, -powers * 1.9999999, powers * 1.4142135, torch.zeros(1)]).float()
    part, power = answer(torch.frexp, values)
    expected = torch.frexp(values)
    assert np.array_equal(part, expected[0].numpy())
    assert np.array_equal(power, expected[1].numpy())
