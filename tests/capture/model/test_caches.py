"""A decoder that keeps keys and values is captured as a graph, and ends where its positions end."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.capture.api import capture
from trueline.capture.model import explicit_state
from trueline.capture.model.arguments import Arguments
from trueline.errors import CaptureError, RequestError
from trueline.runtime.open import open_program
from worlds import caches, recipes
from worlds.cases import few

GRAPHS = ["onnx", "torch_export"]


def captured(model: nn.Module, example: Any, out: Path, **blanks: Any) -> Bundle:
    recipe = recipes.untrained(lambda: model, examples=lambda: example, **blanks)
    capture(recipe, None, out, formats=GRAPHS, state="explicit")
    return open_bundle(out)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[nn.Module], tuple[int, ...]], Any]:
    """A model of a kind, and its bundle, which is captured once for all tests."""

    @functools.cache
    def make(kind: type[nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Bundle]:
        torch.manual_seed(0)
        model = kind().eval()
        return model, captured(copy.deepcopy(model), torch.randn(shape), tmp_path_factory.mktemp("caches") / "b")

    return make


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "calls"),
    few([(caches.Copies, (1, 8), 16), (caches.Slices, (1, 5, 8), 12), (caches.Steps, (3, 8), 20)], 1),
)
def test_a_cache_that_is_written_at_a_position_is_a_graph_that_follows_the_model_to_its_end(
    kind: type[nn.Module], shape: tuple[int, ...], calls: int, cached: Callable[..., Any]
) -> None:
    model, bundle = cached(kind, shape)
    for format in GRAPHS:
        session, users = open_program(bundle, format), copy.deepcopy(model)
        state = {name: bundle.golden()[0].inputs[name] for name in bundle.signature.state}
        for _ in range(calls):
            x = torch.randn(shape)
            answer = session.run({"x": x.numpy(), **state})
            with torch.no_grad():
                np.testing.assert_allclose(answer["output"], users(x).numpy(), atol=1e-5)
            state = {given: answer[left] for given, left in bundle.signature.state.items()}


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.parametrize("position", few([60, 70, -1], 1, pytest.mark.jobs))
def test_a_slice_that_the_model_cannot_write_is_refused_by_the_program_too(
    position: int, cached: Callable[..., Any]
) -> None:
    _, bundle = cached(caches.Slices, (1, 5, 8))
    inputs = {**bundle.golden()[0].inputs, "state.pos": np.array(position)}
    for format in GRAPHS:
        with pytest.raises(RequestError):
            open_program(bundle, format).run(inputs)


@pytest.mark.jobs
def test_past_and_new_tokens_end_together_where_the_positions_end(tmp_path: Path) -> None:
    example = tuple(torch.randn(2, size, 8) for size in (4, 7, 7))
    free = {"x": {1: "new"}, "past_k": {1: "past"}, "past_v": {1: "past"}}
    bundle = captured(caches.Given().eval(), example, tmp_path / "b", dynamic_shapes=lambda: free)
    assert [guard.text for guard in bundle.signature.guards] == ["new + past <= 64"]
    dims = bundle.signature.dims
    assert (dims["new"].max, dims["past"].max) == (63, 63)

    def inputs(new: int, past: int) -> dict[str, Any]:
        sizes = {"x": new, "past_k": past, "past_v": past}
        return {name: np.ones((1, size, 8), np.float32) for name, size in sizes.items()}

    for format in GRAPHS:
        session = open_program(bundle, format)
        for new in (1, 20, 63):
            assert session.run(inputs(new, 64 - new))["output_0"].shape == (1, new, 8)
        for new in (2, 20, 62):
            with pytest.raises(RequestError, match=r"new \+ past is at most 64"):
                session.run(inputs(new, 65 - new))


class Either(nn.Module):
    """Positions that end at 16, and a branch on values, which torch.export does not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 4)

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        start = past.shape[1]
        y = torch.cat([past, x + self.positions(torch.arange(start, start + x.shape[1]))], 1)
        return y * 2 if y.mean() > 0 else y


@pytest.mark.slow
def test_a_script_takes_past_and_new_tokens_up_to_where_the_positions_end_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = (torch.randn(2, 3, 4), torch.randn(2, 5, 4))
    free = {"x": {1: "new"}, "past": {1: "past"}}
    recipe = recipes.untrained(lambda: Either().eval(), examples=lambda: example, dynamic_shapes=lambda: free)
    capture(recipe, None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert [entry.format for entry in bundle.manifest.programs] == ["torchscript"]
    assert [guard.text for guard in bundle.signature.guards] == ["new + past <= 16"]


def test_a_state_that_is_none_before_the_first_call_is_refused_with_what_to_register() -> None:
    model, call = caches.BeginsWithNone().eval(), Arguments((torch.randn(3, 8),))
    with pytest.raises(CaptureError, match=r"None before the first call \(cache\)") as refused:
        explicit_state.lift_state(model, [call])
    assert "torch.zeros(0, 8)" in refused.value.hint
    assert model.cache is None


def test_a_table_that_the_first_call_makes_is_no_state() -> None:
    model = caches.LazyTable().eval()
    assert explicit_state.lift_state(model, [Arguments((torch.randn(3, 8),))]) is None
    assert model.table is None


def test_keys_and_values_follow_the_streams_and_a_position_of_one_element_does_not() -> None:
    lifted = explicit_state.lift_state(caches.Copies().eval(), [Arguments((torch.randn(1, 8),))])
    assert lifted is not None
    assert lifted.records == {"k": 0, "v": 0}
