"""Weights that are masked are zero and stay zero; amounts are by kind of layer, by name, or for all together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trueline.compress.derive import masks
from trueline.compress.derive.plan import parse_amounts
from trueline.errors import UsageError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def zeros(layer: nn.Module) -> float:
    return float((layer.weight == 0).float().mean())


def test_each_kind_of_layer_loses_its_share_of_the_smallest_weights() -> None:
    plain, masked = network(), masks.mask(network(), {"conv": 0.25, "linear": 0.5})
    assert zeros(masked[0]) == pytest.approx(0.25)
    assert zeros(masked[3]) == pytest.approx(0.5)
    kept = masked[3].weight != 0
    assert plain[3].weight[kept].abs().min() >= plain[3].weight[~kept].abs().max()


def test_a_masked_weight_stays_zero_through_training_and_when_it_is_made_permanent() -> None:
    masked = masks.mask(network(), {"linear": 0.5})
    gone = masked[3].weight == 0
    optimizer = torch.optim.Adam(masked.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        masked(torch.rand(2, 1, 8, 8)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(masked[3].weight, network()[3].weight)
    assert (masked[3].weight[gone] == 0).all()
    permanent = masks.make_permanent(masked)
    assert (permanent[3].weight[gone] == 0).all()
    assert permanent.state_dict().keys() == network().state_dict().keys()


def test_with_global_all_layers_compete() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(100)
    masked = masks.mask(model, {"global": 0.5})
    assert zeros(masked[0]) == 0
    assert zeros(masked[3]) > 0.5


def test_one_layer_is_chosen_by_its_name() -> None:
    masked = masks.mask(network(), {"3": 0.5})
    assert zeros(masked[0]) == 0
    assert zeros(masked[3]) == pytest.approx(0.5)


def test_a_layer_gets_the_share_of_the_name_that_says_most_about_it() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), "head": nn.Linear(20, 10)})
    model["first"] = nn.Conv1d(2, 20, 2)
    for names in (["linear", "body", "body.1", "global"], ["body.1", "global", "body", "linear"]):
        shares = {"linear": 0.2, "body": 0.4, "body.1": 0.6, "global": 0.8}
        masked = masks.mask(copy.deepcopy(model), {name: shares[name] for name in names})
        found = [zeros(masked.get_submodule(name)) for name in ("head", "body.0", "body.1", "first")]
        assert found == pytest.approx([0.2, 0.4, 0.6, 0.8], abs=0.01)
    with pytest.raises(UsageError, match="'linear', and each of its layers has a share by a more specific name"):
        masks.mask(copy.deepcopy(model), {"linear": 0.2, "body": 0.4, "head": 0.5})


def test_a_name_that_chooses_no_layer_is_an_error_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"'linaer'.*has: conv, linear") as refused:
        masks.mask(network(), {"linaer": 0.5})
    assert "linear" in refused.value.hint


@pytest.mark.parametrize(
    "text", ["conv", "conv=2", "conv=0", "=0.3", "conv=half", "channels=0.3,conv=0.2", "conv=0.2,conv=0.3"]
)
def test_amounts_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="prune is"):
        parse_amounts(text)


def train(model: nn.Module, schedule: masks.MaskSchedule, steps: int, state: dict | None = None) -> dict:
    optimizer = schedule.follow(torch.optim.Adam(model.parameters(), lr=0.01))
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=draw)).square().mean().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_schedule_raises_the_masks_fast_at_first_and_reaches_the_amount_before_the_end() -> None:
    torch.manual_seed(0)
    schedule = masks.MaskSchedule({"linear": 0.8}, rounds=4, steps=20)
    model = schedule.attach(nn.Sequential(nn.Linear(4, 100)))
    reached = [zeros(model[0])]
    optimizer = schedule.follow(torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(20):
        optimizer.step()
        reached.append(zeros(model[0]))
    rounds = sorted(set(reached))
    assert rounds == pytest.approx([0.8 * (1 - (1 - number / 4) ** 3) for number in (1, 2, 3, 4)], abs=0.003)
    assert reached.index(rounds[-1]) <= 0.6 * 20
    assert reached == sorted(reached)


def test_a_worker_that_takes_the_state_in_the_middle_continues_the_schedule() -> None:
    def fresh() -> tuple[nn.Module, masks.MaskSchedule]:
        torch.manual_seed(0)
        schedule = masks.MaskSchedule({"linear": 0.8}, rounds=4, steps=20)
        return schedule.attach(nn.Sequential(nn.Linear(4, 100))), schedule

    model, schedule = fresh()
    state = train(model, schedule, 7)
    middle = zeros(model[0])
    other, schedule = fresh()
    train(other, schedule, 8, state)
    assert 0.2 < middle < 0.8 - 0.01
    assert zeros(other[0]) == pytest.approx(0.8, abs=0.003)
