"""A program of torch.distributions refuses the values that the model refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.patches import distribution_checks
from trueline.errors import RequestError
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.open import open_program
from worlds import recipes

pytestmark = pytest.mark.slow


class Spread(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return Normal(x, scale).log_prob(torch.zeros_like(x)).sum(-1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weigh, self.place = nn.Linear(5, 3), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(x).view(-1, 3, 2)
        parts = Independent(Normal(places, torch.sigmoid(places) + 1e-3), 1)
        return MixtureSameFamily(Categorical(self.weigh(x).softmax(-1)), parts).mean


def spreads() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(4, 5), torch.rand(4, 5) + 0.1


@pytest.mark.jobs
def test_a_scale_that_the_model_refuses_is_outside_of_the_claim(tmp_path: Path) -> None:
    capture(recipes.untrained(lambda: Spread().eval(), examples=spreads), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    for format in ("onnx", "torch_export"):
        session = open_program(bundle, format)
        for scale in (np.full_like(x, 0.3), np.abs(x) + 1):
            expected = Spread()(torch.from_numpy(x), torch.from_numpy(scale)).numpy()
            np.testing.assert_allclose(session.run({"x": x, "scale": scale})["output"], expected, rtol=1e-5)
        for scale in (np.zeros_like(x), np.full_like(x, -1)):
            with pytest.raises(RequestError):
                session.run({"x": x, "scale": scale})


@pytest.mark.jobs
def test_a_mixture_is_a_graph_without_a_rewrite(tmp_path: Path) -> None:
    model = Mixture().eval()
    capture(recipes.untrained(lambda: model, examples=lambda: iter([torch.randn(4, 5)])), None, tmp_path / "b")
    session = open_program(open_bundle(tmp_path / "b"), "onnx")
    for batch in (1, 2, 33):
        x = torch.randn(batch, 5)
        np.testing.assert_allclose(session.run({"x": x.numpy()})["output"], model(x).detach(), rtol=1e-4, atol=1e-5)


def test_only_torchs_own_checks_are_kept_in_the_block() -> None:
    before = torch._is_all_true
    with as_trained(), distribution_checks.keep_checks():
        assert not torch._is_all_true(torch.tensor([True, False]))
        with pytest.raises(RuntimeError, match="values of a distribution are invalid"):
            Normal(torch.zeros(2), torch.zeros(2))
    assert torch._is_all_true is before
