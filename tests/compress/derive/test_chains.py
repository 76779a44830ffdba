"""Ways to derive a model follow one another, each from the weights of the one before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

import trueline
from trueline.bundle import open_bundle
from trueline.checkpoint.checkpoint import load_model
from trueline.compress.derive.bundles import Derived
from trueline.compress.derive.plan import DerivePlan
from trueline.compress.derive.qat import QatConv2d, QatLinear, measure_ranges
from trueline.compress.derive.training import Deadline
from trueline.compress.planning import _complete, _join, _plan_pruning
from trueline.errors import UsageError
from trueline.recipe.load import load_recipe
from trueline.runtime.open import open_program, replay
from worlds import compressible

BEGINS = DerivePlan(kind="qat", recipe="r.py", checkpoint="c")


def test_a_chain_begins_with_the_parent_and_trains_further_at_one_lower_rate(
    trained: compressible.Compressible,
) -> None:
    recipe = load_recipe(trained.recipe)
    qat = DerivePlan(kind="qat", recipe="")
    chain = _join([*_plan_pruning({"channels": 0.5}, 2, 4, recipe), qat], BEGINS)
    assert [plan.name for plan in chain] == [
        "prune:channels=0.5, 1 of 2", "prune:channels=0.5, 2 of 2", "prune:channels=0.5, 2 of 2 > qat",
    ]  # fmt: skip
    assert [plan.rate for plan in chain] == [0.1, 1.0, 1.0]
    assert [plan.checkpoint for plan in chain] == ["c", "", ""]
    assert 1 - (1 - chain[0].amounts["channels"]) ** 2 == pytest.approx(0.5, abs=0.001)
    assert [plan.epochs for plan in chain[:2]] == [2, 2]
    taught = DerivePlan(kind="taught", recipe="s.py", classes=1, temperature=2.0)
    after = _join([taught, DerivePlan(kind="masks", recipe="", amounts={"conv": 0.2})], taught)
    assert [(plan.name, plan.rate) for plan in after] == [("distill:2", 1.0), ("distill:2 > prune:conv=0.2", 0.1)]
    assert msgspec.json.decode(msgspec.json.encode(after[1]), type=DerivePlan) == after[1]


def test_what_follows_a_student_is_named_by_the_temperature_that_it_was_taught_at(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    student = DerivePlan(kind="taught", recipe="s.py")
    [first, second, third] = _join([student, *_plan_pruning({"conv": 0.2}, 1, 1, load_recipe(trained.recipe)),
                                    DerivePlan(kind="masks", recipe="", amounts={"linear": 0.1})], student)  # fmt: skip
    assert (first.name, third.name) == ("distill", "distill > prune:conv=0.2 > prune:linear=0.1")
    made = Derived("distill:5.3", trained.bundle, trained.recipe, "c")
    search: Any = None
    second = _complete(search, second, made, tmp_path, Deadline())
    assert (second.name, second.checkpoint) == ("distill:5.3 > prune:conv=0.2", "c")
    third = _complete(search, third, replace(made, name=second.name), tmp_path, Deadline())
    assert third.name == "distill:5.3 > prune:conv=0.2 > prune:linear=0.1"


def test_masks_in_rounds_are_one_training_of_known_length(trained: compressible.Compressible) -> None:
    [plan] = _plan_pruning({"conv": 0.5}, 4, 3, load_recipe(trained.recipe))
    assert (plan.rounds, plan.steps) == (4, -(-1000 * 3 // 64))
    assert plan.name == "prune:conv=0.5 in 4 rounds"


def test_rounds_without_anything_to_prune_are_refused(trained: compressible.Compressible) -> None:
    with pytest.raises(UsageError, match="rounds is 3"):
        trueline.compress(trained.bundle.path, rounds=3)


def derive_file(plan: DerivePlan, folder: Path) -> Path:
    folder.mkdir()
    (folder / "recipe.py").write_text(plan.text)
    return folder / "recipe.py"


def test_a_recipe_that_was_derived_is_derived_again(trained: compressible.Compressible, tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'trueline[prune]'")
    weights = str(trained.recipe.with_name("weights.safetensors"))
    plan = DerivePlan(kind="channels", recipe=str(trained.recipe), checkpoint=weights, amounts={"channels": 0.5})
    first = load_recipe(derive_file(plan, tmp_path / "0"))
    pruned = first.make_model()
    assert pruned[0].out_channels == 8
    save_file(pruned.state_dict(), tmp_path / "pruned.safetensors")
    recipe, checkpoint = str(tmp_path / "0" / "recipe.py"), str(tmp_path / "pruned.safetensors")
    ranges = measure_ranges(load_model(first, Path(checkpoint)), first.source("training"))
    plan = DerivePlan(kind="qat", recipe=recipe, checkpoint=checkpoint, ranges=ranges, rate=1.0)
    second = load_recipe(derive_file(plan, tmp_path / "1"))
    model = second.make_model()
    assert type(model[0]) is QatConv2d
    assert model[0].out_channels == 8
    torch.testing.assert_close(model[0].weight, pruned[0].weight)
    assert second.optimizer(model.parameters()).param_groups[0]["lr"] == pytest.approx(0.01)
    assert first.optimizer(pruned.parameters()).param_groups[0]["lr"] == pytest.approx(0.01 * plan.rate)


def test_layers_with_masks_learn_to_round_and_keep_their_zeros(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    weights = str(trained.recipe.with_name("weights.safetensors"))
    plan = DerivePlan(
        kind="masks", recipe=str(trained.recipe), checkpoint=weights, amounts={"linear": 0.5}, rounds=2, steps=9
    )
    first = load_recipe(derive_file(plan, tmp_path / "0"))
    masked = first.make_model()
    assert float((masked[6].weight == 0).float().mean()) == pytest.approx(0.5 * 7 / 8, abs=0.01)
    save_file({name: value.contiguous() for name, value in masked.state_dict().items()}, tmp_path / "m.safetensors")
    recipe, checkpoint = str(tmp_path / "0" / "recipe.py"), str(tmp_path / "m.safetensors")
    ranges = measure_ranges(load_model(first, Path(checkpoint)), first.source("training"))
    assert set(ranges) == {"0", "2", "6"}
    plan = DerivePlan(kind="qat", recipe=recipe, checkpoint=checkpoint, ranges=ranges)
    model = load_recipe(derive_file(plan, tmp_path / "1")).make_model()
    assert isinstance(model[6], QatLinear)
    images, labels = first.dataset("training").tensors
    before = model[6].weight == 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.nn.functional.cross_entropy(model.train()(images[:64]), labels[:64]).backward()
    optimizer.step()
    assert torch.equal(model[6].weight == 0, before)
    assert model.state_dict().keys() == masked.state_dict().keys()


@pytest.mark.slow
@pytest.mark.long
def test_pruned_twice_then_trained_for_int8_then_quantized(trained: compressible.Compressible, tmp_path: Path) -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed: pip install 'trueline[prune]'")
    found = trueline.compress(
        trained.bundle.path, prune="channels=0.5", rounds=2, qat=True, quantize=["static"],
        checkpoint=trained.recipe.with_name("weights.safetensors"), out=tmp_path / "small.bundle",
    )  # fmt: skip
    assert found.row.name == "prune:channels=0.5, 2 of 2 > qat + static:u8s8,minmax"
    assert found.row.quantized == 3
    derived = [open_bundle(tmp_path / "small.bundle.search" / "derived" / str(at) / "drawn.bundle") for at in range(3)]
    counts = [
        sum(numpy_helper.to_array(one).size for one in onnx.load(made.program_path()).graph.initializer)
        for made in (trained.bundle, *derived)
    ]
    assert counts[0] > counts[1] > counts[2] == pytest.approx(counts[3], abs=40)
    sealed = open_bundle(found.path)
    replay(sealed, open_program(sealed))
    again = trueline.compress(  # what was derived is found again
        trained.bundle.path, prune="channels=0.5", rounds=2, qat=True, quantize=["static"],
        checkpoint=trained.recipe.with_name("weights.safetensors"), out=tmp_path / "small.bundle", overwrite=True,
    )  # fmt: skip
    assert again.row.name == found.row.name


@pytest.mark.slow
@pytest.mark.long
def test_masks_stay_through_the_training_for_int8_that_follows(
    trained: compressible.Compressible, tmp_path: Path
) -> None:
    found = trueline.compress(
        trained.bundle.path, prune="linear=0.5", qat=True, quantize=["static:minmax"],
        checkpoint=trained.recipe.with_name("weights.safetensors"), out=tmp_path / "small.bundle",
    )  # fmt: skip
    assert found.row.name == "prune:linear=0.5 > qat + static:u8s8,minmax"
    weights = [
        numpy_helper.to_array(one) for one in onnx.load(open_bundle(found.path).program_path()).graph.initializer
    ]
    large = max((one for one in weights if one.dtype.itemsize == 1 and one.ndim == 2), key=lambda one: one.size)
    assert (large == 0).mean() >= 0.49
