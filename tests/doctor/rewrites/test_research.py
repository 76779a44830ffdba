"""Models as researchers write them: Python over values and sizes is rewritten, and answers as before at other sizes."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.zoo import fresh, research

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import Survey, survey
from worlds.cases import few

pytestmark = pytest.mark.slow
MODELS = {one.name: one for one in research.SHELF.found}
READY = ("NumpyPositions", "Rounded", "ScaleSizes", "Square", "Thirds")
"""torch.export follows them as they stand."""
BLOCKED = ("Halving",)
"""No rewrite is known."""


def look_at(model: torch.nn.Module, name: str) -> Survey:
    one = MODELS[name]
    example = one.arguments(fresh.example(one))
    eager = EagerSession(copy.deepcopy(model), example, dynamic_shapes=one.dynamic_shapes)
    return survey(model, calls_of(eager), onnx=None, base=Path.cwd())


def healed(name: str) -> str:
    """The diff of the rewrite, which was compared with the model on fresh inputs too."""
    one = MODELS[name]
    model = one.module()
    done = look_at(model, name)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    edited, original = patch_module(model, done.texts), copy.deepcopy(model)
    with torch.no_grad():
        for seed in range(12):
            random = np.random.default_rng(seed)
            sizes = fresh.sizes_inside(one, lambda inputs: True, random)
            assert sizes is not None
            asked = one.arguments(fresh.question(one, sizes, random)[0])
            asked = asked if isinstance(asked, tuple) else (asked,)
            torch.testing.assert_close(edited(*asked), original(*asked))
    return row.rewrite.diff


@pytest.mark.parametrize(
    ("name", "line"),
    few(
        [
            pytest.param("HashRows", "+        rows = (ids * 31 + 7) % 16", marks=pytest.mark.long),
            ("LastToken", "torch.arange(last.shape[0])"),
            pytest.param("CountsInDict", "(ids.flatten() == i).sum()", marks=pytest.mark.long),
            pytest.param(
                "SortedByScore", "torch.argsort(scores, stable=True, descending=True)", marks=pytest.mark.long
            ),
            pytest.param("SortedRows", "row.argmax()", marks=pytest.mark.long),
            ("Buckets", "torch.bucketize(x, torch.as_tensor(self.edges), right=True)"),
            ("FlagCount", "torch.where(on, 1, 0).sum()"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_numbers_that_python_takes_out_of_a_tensor_stay_in_it(name: str, line: str) -> None:
    assert line in healed(name)


def test_a_loop_over_the_places_of_a_mask_is_a_masked_assignment() -> None:
    assert "out[x[..., 0] > 0.5] = x[x[..., 0] > 0.5] * 2" in healed("NonzeroPairs")


@pytest.mark.long
def test_a_loop_of_log2_steps_is_unrolled_up_to_a_size_that_the_model_checks() -> None:
    assert "torch._check(n <= 1024)" in healed("Doubling")
    assert "torch._check(n >= 1)" in healed("LogSteps")  # of none there is no logarithm


@pytest.mark.parametrize("name", READY)
def test_what_torch_export_follows_as_it_stands_needs_no_rewrite(name: str) -> None:
    row = look_at(MODELS[name].module(), name).rows["(model)"]
    assert (row.status, row.rewrite) == ("ready", None)


@pytest.mark.long
def test_a_list_of_pairs_that_may_be_empty_is_a_tensor_that_may_be() -> None:
    written = [line for line in healed("PairProducts").splitlines() if line.startswith("+")]
    assert not any("if rows else" in line for line in written)
    assert "+        return rows.movedim(0, 1).sum(1)" in written


def test_a_cached_method_is_computed_at_every_call() -> None:
    assert "-    @functools.lru_cache" in healed("KeptPositions")


@pytest.mark.long
def test_padding_that_no_answer_shows_is_a_mask() -> None:
    assert "(torch.arange(x.shape[1]) < lengths[:, None])[..., None]" in healed("Padded")


def test_an_element_of_a_list_is_a_buffer_of_its_own() -> None:
    assert "self.register_buffer('ema_0', torch.zeros(4), persistent=False)" in healed("MovingAverage")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if name not in BLOCKED])
def test_a_model_that_no_exporter_follows_is_rewritten(name: str) -> None:
    assert name in READY or healed(name)
