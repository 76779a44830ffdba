"""Windows and frequencies of a length that code fixes: the numbers that torch computes.

The exporter has no frequencies and no triangular or Kaiser windows, and its Hamming window is another function
(0.543478 in place of 0.54). Those of a free length are written in other operators (`patches/symbolic_sizes`).
"""

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset18

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="onnxscript 0.7.2",
    cost="a constant in place of an operator",
    helps=("torch.fft.rfftfreq(512)", "torch.hamming_window(400)"),
)
_ATEN = torch.ops.aten
op: Any = opset18


_KINDS = {ir.DataType.DOUBLE: torch.float64, ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}


def _hold(operator: Callable[..., torch.Tensor], numbers: tuple[Any, ...], dtype: int | None) -> Any:
    kind = ir.DataType.FLOAT if dtype in (None, -1) else ir.DataType(dtype)
    computed = operator(*numbers, dtype=_KINDS.get(kind, torch.float32))
    return op.Constant(value=ir.tensor(computed.double().numpy().astype(kind.numpy())))


def _frequencies(operator: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def translate_frequencies(
        n: int, d: float = 1.0, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False
    ) -> Any:
        return _hold(operator, (n, d), dtype)

    return translate_frequencies


def _window(operator: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def translate_window(
        window_length: int,
        periodic: bool = True,
        dtype: int = -1,
        layout: str = "",
        device: str = "",
        pin_memory: bool = False,
    ) -> Any:
        return _hold(operator, (window_length, periodic), dtype)

    return translate_window


def _kaiser(
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
) -> Any:
    return _hold(torch.kaiser_window, (window_length, periodic, beta), dtype)


def _hamming(
    window_length: int,
    periodic: bool = True,
    alpha: float = 0.54,
    beta: float = 0.46,
    dtype: int = -1,
    layout: str = "",
    device: str = "",
    pin_memory: bool = False,
) -> Any:
    return _hold(torch.hamming_window, (window_length, periodic, alpha, beta), dtype)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.fft_fftfreq.default: _frequencies(torch.fft.fftfreq),
    _ATEN.fft_rfftfreq.default: _frequencies(torch.fft.rfftfreq),
    _ATEN.bartlett_window.default: _window(torch.bartlett_window),
    _ATEN.bartlett_window.periodic: _window(torch.bartlett_window),
    _ATEN.kaiser_window.default: _kaiser,
    _ATEN.kaiser_window.periodic: _kaiser,
    _ATEN.kaiser_window.beta: _kaiser,
    _ATEN.hamming_window.default: _hamming,
    _ATEN.hamming_window.periodic: _hamming,
    _ATEN.hamming_window.periodic_alpha: _hamming,
    _ATEN.hamming_window.periodic_alpha_beta: _hamming,
}
