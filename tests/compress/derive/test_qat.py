"""A model trained for int8 rounds as the quantizer does, and its training is a job like any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.utils.data import TensorDataset

import trueline
from trueline.bundle import open_bundle
from trueline.checkpoint.checkpoint import load_model
from trueline.compress import search as searching
from trueline.compress.derive import qat
from trueline.data.sources.map_style import DatasetSource
from trueline.errors import CaptureError, UsageError
from trueline.recipe.load import load_recipe
from trueline.train.settings import Fault
from worlds import compressible

RECIPE = compressible.RECIPE.replace('name = "drawn"', 'name = "drawn"\nepochs = 1')


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> compressible.Compressible:
    made = compressible.make(tmp_path_factory.mktemp("trained"), recipe=RECIPE)
    torch.save(made.module.state_dict(), made.recipe.with_name("weights.pt"))
    return made


def weights_of(trained: compressible.Compressible) -> Path:
    return trained.recipe.with_name("weights.pt")


def ranges_of(model: nn.Module, inputs: torch.Tensor) -> dict[str, qat.Range]:
    return qat.measure_ranges(
        model.eval(), DatasetSource(TensorDataset(inputs, torch.zeros(len(inputs))), mode="training")
    )


def read_int8(program: Path) -> dict[tuple[int, ...], np.ndarray]:
    """The int8 weights of a program times their scales, by their shapes."""
    model = onnx.load(program)
    held = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and held.get(node.input[0], np.zeros(0)).ndim > 1:
            levels, scale = held[node.input[0]].astype(np.float32), held[node.input[1]]
            axis = next(one.i for one in node.attribute if one.name == "axis")
            found[levels.shape] = levels * scale.reshape([-1 if at == axis else 1 for at in range(levels.ndim)])
    return found


@pytest.mark.slow
@pytest.mark.long
def test_the_static_quantizer_changes_no_weight_of_a_model_that_was_trained_for_int8(
    trained: compressible.Compressible, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "QUICK_S", 0.02)
    monkeypatch.setattr(searching, "FULL_S", 0.05)
    out = tmp_path / "small.bundle"
    found = trueline.compress(
        trained.bundle.path, qat=True, checkpoint=weights_of(trained), quantize=["static"], out=out
    )
    assert found.row.name == "qat + static:u8s8,minmax"
    assert found.row.quantized == 3
    derived = tmp_path / "small.bundle.search" / "derived" / "0"
    step = next((derived / "job" / "checkpoints").glob("step-*"))
    model = load_model(load_recipe(derived / "recipe.py"), step)
    int8 = read_int8(open_bundle(out).program_path("onnx"))
    for layer in (model[0], model[2]):
        rounded = qat.round_weight(layer.weight.detach()).numpy()
        assert (
            np.abs(rounded - layer.weight.detach().numpy()).max() > 1e-5
        )  # what the optimizer steps is not on the grid
        np.testing.assert_allclose(int8[rounded.shape], rounded, atol=1e-6)


@pytest.mark.jobs
def test_a_job_that_trains_for_int8_survives_a_kill_and_its_checkpoint_fits_the_recipe(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.py"
    shutil.copy(trained.recipe, recipe)
    derived = qat.write_qat_recipe(recipe, weights_of(trained))
    assert derived == tmp_path / "recipe-qat.py"
    result = trueline.train(
        derived, workers="2", job_dir=tmp_path / "job", weights=str(weights_of(trained)), epochs=2,
        faults=[Fault(step=6, slot=1)],
    )  # fmt: skip
    assert result.summary.exactly_once
    assert result.summary.facts["workers_started"] == 3
    own = load_model(load_recipe(recipe), result.checkpoint)
    assert type(own[0]) is nn.Conv2d
    images, labels = load_recipe(recipe).dataset("evaluation").tensors
    rounding = load_model(load_recipe(derived), result.checkpoint).train()
    assert (rounding(images).argmax(dim=1) == labels).float().mean() > 0.95


def test_a_layer_rounds_as_the_static_quantizer_while_it_trains_and_its_gradient_passes() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    layer = qat.prepare_qat(nn.Sequential(plain), {"0": (-1.0, 1.0)}).train()
    assert layer[0] is plain
    given = torch.tensor([[0.1234, -0.5, 3.0]], requires_grad=True)
    scale = 2.0 / 255
    held = torch.tensor([[round(0.1234 / scale) * scale, round(-0.5 / scale) * scale, 127 * scale]])
    answer = layer(given)
    torch.testing.assert_close(answer, held @ qat.round_weight(plain.weight).T + plain.bias)
    answer.sum().backward()
    torch.testing.assert_close(plain.weight.grad, held.expand(2, 3))
    torch.testing.assert_close(given.grad[0, 2], torch.tensor(0.0))  # beyond the range nothing is learned
    assert (given.grad[0, :2] != 0).all()


def test_in_evaluation_inputs_are_clamped_and_no_longer_rounded() -> None:
    layer = qat.prepare_qat(nn.Sequential(nn.Linear(2, 2)), {"0": (0.0, 1.0)}).eval()
    plain = layer[0]
    expected = torch.tensor([[0.1234, 1.0]]) @ qat.round_weight(plain.weight).T + plain.bias
    torch.testing.assert_close(layer(torch.tensor([[0.1234, 7.0]])), expected)


def test_a_range_leaves_out_the_rarest_values_of_a_layers_input() -> None:
    inputs = torch.linspace(-1, 1, 100_000).reshape(1000, 100)
    inputs[500, 50] = 1e6
    [(low, high)] = ranges_of(nn.Sequential(nn.Linear(100, 1)), inputs).values()
    assert -1 <= low < -0.99
    assert 0.99 < high <= 1


def test_a_model_without_layers_that_compute_in_int8_is_refused() -> None:
    with pytest.raises(CaptureError, match="no linear or convolutional layer"):
        ranges_of(nn.Sequential(nn.ReLU()), torch.rand(4, 2))


def test_a_layer_that_gets_nan_from_training_records_is_named() -> None:
    with pytest.raises(CaptureError, match="layer '1' gets numbers that are not finite"):
        ranges_of(nn.Sequential(nn.ReLU(), nn.Linear(2, 1)), torch.tensor([[1.0, float("nan")]]))


def test_a_plan_of_another_model_names_the_layer() -> None:
    with pytest.raises(CaptureError, match="layer 'conv'"):
        qat.prepare_qat(nn.Sequential(nn.Linear(2, 2)), {"conv": (0.0, 1.0)})


def test_a_file_that_the_user_wrote_is_not_replaced(trained: compressible.Compressible, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    shutil.copy(trained.recipe, recipe)
    own = tmp_path / "recipe-qat.py"
    own.write_text("# mine\n")
    with pytest.raises(UsageError, match=r"recipe-qat\.py exists already"):
        qat.write_qat_recipe(recipe, weights_of(trained))
    assert own.read_text() == "# mine\n"
