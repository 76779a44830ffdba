"""Ranges of a program's tensors, of its answers to training records. They are collected once, as histograms; each
method derives its ranges from them.

minmax       the smallest and largest value
percentile   the middle 99.99 %
entropy      the range whose quantized histogram is closest to the histogram itself (Kullback-Leibler)
mse          the range whose rounding and clipping together lose least, squared

Masks of attention add infinity, which no range holds: ranges are of the finite values, and operators that met others
are named, since in int8 what is masked would count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, save_tensors_data
from onnxruntime.quantization.calibrate import HistogramCollector, TensorsData, create_calibrator

from trueline import files
from trueline.compress.apply.contract import ParentProgram
from trueline.compress.apply.equalize import equalize
from trueline.compress.apply.graph import is_large, quiet
from trueline.errors import CaptureError, DataError, first_line

Floats = npt.NDArray[np.float64]
BINS = 2048
_ENTROPY_BINS = 512
"""The library's search for the least entropy takes seconds a tensor with more."""
_PERCENTILE = 99.99
_SHARES = np.linspace(0.3, 1.0, 15)
_LEVELS = 255
_UNBOUNDED = "unbounded.json"
Histogram = tuple[Any, Any, Any, Any]
"""Counts, edges, smallest, largest."""


def ranges(program: ParentProgram, how: str) -> Path:
    """The file of ranges by the method `how`, for quantize_static; made once. Raises CaptureError, DataError."""
    out = program.work / f"ranges-{how}.json"
    if not out.is_file():
        found = {name: _range(one, how) for name, one in _histograms(program).items()}
        data = {name: tuple(np.array(end, np.float32) for end in one) for name, one in found.items()}
        partial = out.with_suffix(".partial")
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, data), partial)
        partial.replace(out)
    return out


def _histograms(program: ParentProgram) -> dict[str, Histogram]:
    kept = program.work / "histograms.json"
    if kept.is_file():
        read = json.loads(kept.read_text())
        return {name: (np.array(one[0]), np.array(one[1]), one[2], one[3]) for name, one in read.items()}
    batches = program.calibration()
    _check_finite(batches)
    try:
        with quiet():
            collector = _FiniteCollector()
            calibrator = create_calibrator(
                equalize(program), augmented_model_path=str(program.work / "watched.onnx"),
                calibrate_method=CalibrationMethod.Percentile, extra_options={"num_bins": BINS, "symmetric": False},
                use_external_data_format=is_large(program.path),
            )  # fmt: skip
            calibrator.collector = collector
            for batch in batches:
                calibrator.collect_data(_OneBatch(batch))
    except Exception as error:
        raise CaptureError(f"ranges cannot be collected: {first_line(error)}") from error
    found: dict[str, Histogram] = {
        name: (one[0], one[1], float(one[2]), float(one[3])) for name, one in collector.histogram_dict.items()
    }
    files.write_atomic(program.work / _UNBOUNDED, json.dumps(sorted(collector.unbounded)).encode())
    rows = {name: [one[0].tolist(), one[1].tolist(), one[2], one[3]] for name, one in found.items()}
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps(rows))
    partial.replace(kept)
    return found


def find_unbounded(program: ParentProgram) -> set[str]:
    """Tensors that had infinity or NaN in training records. Raises CaptureError, DataError."""
    _histograms(program)
    return set(json.loads((program.work / _UNBOUNDED).read_text()))


class _FiniteCollector(HistogramCollector):  # type: ignore[misc]  # the library has no types
    """Histograms of finite values; `unbounded` had others."""

    def __init__(self) -> None:
        super().__init__("percentile", False, BINS, 128, _PERCENTILE, "same")
        self.unbounded: set[str] = set()

    def collect(self, name_to_arr: dict[str, list[Any]]) -> None:
        found: dict[str, list[Any]] = {}
        for name, arrays in name_to_arr.items():
            whole = np.concatenate([array.reshape(-1) for array in arrays])
            finite = whole[np.isfinite(whole)]
            if len(finite) < len(whole):
                self.unbounded.add(name)
            found[name] = [finite.astype(np.float32) if len(finite) else np.zeros(1, np.float32)]
        super().collect(found)


def _check_finite(batches: Any) -> None:
    for batch in batches:
        for name, array in batch.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise DataError(
                    f"input '{name}' of the training records has values that are not finite",
                    hint="`trueline data check` finds the records",
                )


class _OneBatch(CalibrationDataReader):  # type: ignore[misc]  # the library has no types
    def __init__(self, inputs: dict[str, Any]) -> None:
        self._left: list[dict[str, Any]] = [inputs]

    def get_next(self) -> dict[str, Any] | None:
        return self._left.pop() if self._left else None


def _range(histogram: Histogram, how: str) -> tuple[float, float]:
    counts, edges, low, high = histogram
    if how == "minmax" or low == high or not counts.sum():
        return low, high
    if how == "mse":
        return _least_error(histogram)
    if how == "entropy":
        counts, edges = _merge(np.asarray(counts), np.asarray(edges))
    collector = HistogramCollector(how, False, len(counts), 128, _PERCENTILE, "same")
    kept = (counts, edges.astype(np.float32), np.float32(low), np.float32(high))
    if how == "entropy":
        ends = collector.get_entropy_threshold(kept, 128)
    else:
        collector.histogram_dict = {"x": kept}
        with quiet():
            ends = collector.compute_percentile()["x"][:2]
    return float(ends[0]), float(ends[1])


def _merge(counts: Any, edges: Any) -> tuple[Any, Any]:
    """The histogram with at most _ENTROPY_BINS bins of equal width, zero in the middle."""
    size = -(-len(counts) // _ENTROPY_BINS)
    if size == 1:
        return counts, edges
    short = -len(counts) % (2 * size)
    width = edges[1] - edges[0]
    counts = np.pad(counts, (short // 2, short - short // 2))
    first = edges[0] - width * (short // 2)
    merged = counts.reshape(-1, size).sum(axis=1)
    return merged, first + width * size * np.arange(len(merged) + 1)


def _least_error(histogram: Histogram) -> tuple[float, float]:
    """The shares of [smallest, largest] for which the squares of what quantization changes add up to the least."""
    counts, edges, low, high = histogram
    middles, weights = (edges[:-1] + edges[1:]) / 2, np.asarray(counts, np.float64)
    low, high = min(low, 0.0), max(high, 0.0)  # zero has to be exact: it pads
    best, least = (low, high), np.inf
    for down in _SHARES if low < 0 else _SHARES[-1:]:
        for up in _SHARES if high > 0 else _SHARES[-1:]:
            scale = (high * up - low * down) / _LEVELS
            clipped = np.clip(middles, low * down, high * up)
            error = float((weights * (np.round(clipped / scale) * scale - middles) ** 2).sum())
            if error < least:
                best, least = (low * down, high * up), error
    return best
