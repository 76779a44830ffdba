"""Explanations: what each input adds to an answer, by the program that was proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle.signature import Signature
from trueline.capture.export import torch_export
from trueline.capture.model.signature import learn
from trueline.errors import RequestError, UsageError
from trueline.runtime.attribution import Explainer

captum = pytest.importorskip("captum", reason="Captum is not installed: pip install 'trueline[explain]'")
pytestmark = pytest.mark.slow


class Weighs(nn.Module):
    """Scores that are linear in x, chosen by a table of ids: the attributions are known."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([[1.0, -2.0, 3.0], [0.0, 5.0, -1.0]]))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        weights = self.table[ids]  # a row for each record
        score = (x * weights).sum(dim=1, keepdim=True)
        return torch.cat([score, -2 * score], dim=1)


def made(folder: Path, module: nn.Module, *example: Tensor) -> tuple[Path, Signature]:
    calling = learn(module.eval(), example)
    exported = torch_export.export(module, calling)
    return torch_export.emit(exported, folder), exported.signature


def test_attributions_of_a_linear_score_are_its_terms(tmp_path: Path) -> None:
    path, signature = made(tmp_path, Weighs(), torch.ones(2, 3), torch.tensor([0, 1]))
    explainer = Explainer(path, signature)
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    names = [spec.name for spec in signature.inputs]
    inputs = dict(zip(names, [x, np.array([0, 1])], strict=True))
    found = explainer.explain(inputs, 0)
    assert (found.output, found.target) == (signature.outputs[0].name, 0)
    assert list(found.attributions) == [names[0]], "ids are no numbers to add up"
    np.testing.assert_allclose(found.attributions[names[0]], x * [[1, -2, 3], [0, 5, -1]], rtol=1e-4)
    assert found.convergence_delta < 1e-3
    chosen = explainer.explain(inputs)
    assert chosen.target == 0, "the larger of 6 and -12"
    np.testing.assert_allclose(explainer.explain(inputs, 1).attributions[names[0]], -2 * found.attributions[names[0]])
    with pytest.raises(RequestError, match="target 2 is outside the output's 2 classes, 0 to 1"):
        explainer.explain(inputs, 2)
    with pytest.raises(RequestError, match="datatype"):
        explainer.explain(inputs | {names[0]: x.astype(np.float64)})


def test_a_model_of_ids_alone_says_that_it_cannot_be_explained_so(tmp_path: Path) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            found: Tensor = self.table(ids)
            return found

    path, signature = made(tmp_path, Looks(), torch.tensor([0, 1, 2]))
    with pytest.raises(UsageError, match="need a float input and a float output; this model takes INT64"):
        Explainer(path, signature)
