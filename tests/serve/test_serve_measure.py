"""`bench-serve`: the curve is the model's, and the settings are the rehearsal's best."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueline.errors import UsageError
from trueline.serve.batching import benchmark
from trueline.serve.batching.simulator import Load
from worlds import bundles


def test_the_curve_is_measured_up_to_the_bound_and_a_setting_is_named(tmp_path: Path) -> None:
    source = bundles.double_plus(tmp_path / "b", max_rows=8).path
    found = benchmark.bench_serve(source, load=Load(clients=4, think_s=1e-4), requests=200)
    assert list(found.seconds) == [1, 2, 4, 8]
    assert all(took_s > 0 for took_s in found.seconds.values())
    rates = [one.outcome.per_second for one in found.settings]
    assert rates == sorted(rates, reverse=True)
    said = benchmark.as_text(found)
    assert f"--max-batch {found.settings[0].max_batch}" in said
    assert benchmark.as_dict(found)["best"]["max_batch"] == found.settings[0].max_batch


def test_a_load_of_nobody_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="clients"):
        benchmark.bench_serve(tmp_path, load=Load())
