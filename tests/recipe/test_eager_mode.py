"""An encoder has one mode: it is measured, captured and replayed as it was trained, and capture says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, utils, while_loop
from torch.distributions import Distribution, Normal

from trueline.batch.evaluate import evaluate
from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.capture.api import capture
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.open import open_program
from worlds import models
from worlds.recipes import untrained

SRC = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.arange(6)[None] >= torch.tensor([6, 3, 4, 6, 1])[:, None]


class Pooled(nn.Module):
    """Takes the mean over all positions, hidden ones too: torch's fast path returns zeros there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)

    def forward(self, src: Tensor, hidden: Tensor) -> Tensor:
        found: Tensor = self.encoder(src, src_key_padding_mask=hidden)
        return found.mean(1)


def trained_answer() -> Any:
    """With gradients torch never takes the fast path."""
    return Pooled().eval()(SRC, HIDDEN).detach().numpy()


RECORDS = [({"src": SRC[row], "hidden": HIDDEN[row]}, torch.zeros(())) for row in range(5)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_default_mode_of_torch_answers_otherwise_which_is_why_there_is_one_mode() -> None:
    with torch.no_grad():
        plain = Pooled().eval()(SRC, HIDDEN).numpy()
        with as_trained():
            ours = Pooled().eval()(SRC, HIDDEN).numpy()
    np.testing.assert_allclose(ours, trained_answer(), atol=1e-5)
    assert np.abs(plain - ours).max() > 0.1
    assert torch.backends.mha.get_fastpath_enabled()  # what the caller had is restored


@pytest.mark.parametrize("each", [False, True])
def test_evaluate_measures_what_is_served(each: bool, tmp_path: Path) -> None:
    recipe = untrained(
        Pooled, name="encoder", dataset=lambda mode: RECORDS, loss=lambda outputs, labels: outputs.mean(1)
    )
    found = evaluate(recipe, None, **({"out": tmp_path / "values"} if each else {}))  # type: ignore[arg-type]
    assert found.loss == pytest.approx(float(trained_answer().mean()), abs=1e-5)


@pytest.mark.jobs
@pytest.mark.slow
def test_capture_says_where_a_plain_call_answers_otherwise_and_replays_the_trained_mode(tmp_path: Path) -> None:
    recipe = untrained(Pooled, name="encoder", examples=lambda: {"src": SRC, "hidden": HIDDEN})
    bundle = open_bundle(capture(recipe, None, tmp_path / "b").path)
    said = bundle.lineage()["eager_mode"]
    assert said.startswith("TransformerEncoder runs as in training, without torch's fast path")
    assert "answers" in said
    assert said in describe(bundle)
    asked = {"src": SRC.numpy(), "hidden": HIDDEN.numpy()}
    for program in bundle.manifest.programs:
        (answer,) = open_program(bundle, program.format).run(asked).values()
        np.testing.assert_allclose(answer, trained_answer(), atol=1e-5)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_model_without_such_a_module_is_not_called_again_and_nothing_is_said(tmp_path: Path) -> None:
    recipe = untrained(models.Mlp, name="mlp", examples=lambda: torch.randn(4, 8))
    assert "eager_mode" not in open_bundle(capture(recipe, None, tmp_path / "b", formats=["onnx"]).path).lineage()


class Structured(nn.Module):
    """Each kind of structured control flow, with values that are carried and stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def step(carry: tuple[Tensor, Tensor], rows: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
            total, count = carry
            total = self.layer(total + rows).tanh()
            return (total, count + 1), (total.clone(), total.amax(1))

        start = x.new_zeros(len(x), 4), torch.zeros((), dtype=torch.int64)
        (last, count), (each, most) = scan(step, start, x.movedim(1, 0))
        y = torch.cond(last.sum() > 0, lambda y: y * 2, lambda y: y - 1, (last,))
        z, steps = while_loop(
            lambda z, n: (z.abs().max() > 0.1) & (n < 9), lambda z, n: (z / 2, n + 1), (y, count.clone())
        )
        return last, count, each, most, y, z, steps


@pytest.mark.slow
def test_structured_control_flow_is_run_step_by_step_and_answers_as_the_compiled_one() -> None:
    torch.manual_seed(0)
    model, x = Structured().eval(), torch.randn(3, 5, 4)
    compile_before = utils._hop_compile_and_call
    with torch.no_grad():
        with as_trained():
            torch._dynamo.reset()
            counted = torch._dynamo.utils.counters["frames"]["total"]
            answers = [model(part) for part in (x, x[:1], -x[:, :2])]
            assert torch._dynamo.utils.counters["frames"]["total"] == counted  # nothing was compiled
        assert utils._hop_compile_and_call is compile_before
        for part, answer in zip((x, -x[:, :2]), (answers[0], answers[2]), strict=True):
            for ours, theirs in zip(answer, model(part), strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_distributions_check_their_values_though_the_compiler_was_used_before() -> None:
    """torch's compiler switches the checks off for the rest of the process."""
    torch._dynamo.eval_frame.TorchPatcher.patch()
    before = Distribution._validate_args
    try:
        for checks in (False, True):
            Distribution.set_default_validate_args(checks)
            with as_trained(), pytest.raises(ValueError, match="constraint"):
                Normal(torch.zeros(2), -torch.ones(2))
            assert Distribution._validate_args is checks
    finally:
        Distribution.set_default_validate_args(before)
