"""What TensorBoard reads of a job's folder."""

from __future__ import annotations

from pathlib import Path

import pytest


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard's own reader has them; it verifies every checksum."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
