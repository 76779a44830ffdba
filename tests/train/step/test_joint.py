"""Several optimizers take a step as one, and their state is one."""

from __future__ import annotations

import pytest
import torch

from trueline.checkpoint import tree
from trueline.errors import UsageError
from trueline.train.step.joint import JointOptimizer
from trueline.train.step.optimizer_step import check_optimizer


def pair() -> tuple[torch.nn.ModuleList, JointOptimizer, torch.optim.Adam]:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)])
    adam = torch.optim.Adam(model[0].parameters(), lr=0.1)
    return model, JointOptimizer(adam, torch.optim.SGD(model[1].parameters(), lr=0.01, momentum=0.9)), adam


def take_steps(model: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        model[1](model[0](torch.ones(2, 3))).pow(2).sum().backward()
        optimizer.step()


def test_each_optimizer_changes_its_own_parameters_as_it_does_alone() -> None:
    model, joint, _ = pair()
    take_steps(model, joint, 3)
    other, _, _ = pair()
    apart = [torch.optim.Adam(other[0].parameters(), lr=0.1),
             torch.optim.SGD(other[1].parameters(), lr=0.01, momentum=0.9)]  # fmt: skip
    for _ in range(3):
        other.zero_grad()
        other[1](other[0](torch.ones(2, 3))).pow(2).sum().backward()
        for one in apart:
            one.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_the_whole_state_goes_into_a_checkpoint_and_back_and_a_schedule_of_one_part_is_seen() -> None:
    model, joint, _ = pair()
    take_steps(model, joint, 2)
    skeleton, tensors = tree.encode({"model": model.state_dict(), "optimizer": joint.state_dict()})
    saved = tree.decode(skeleton, [one.clone() for one in tensors])
    take_steps(model, joint, 2)
    again, restored, adam = pair()
    again.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    take_steps(again, restored, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    adam.param_groups[0]["lr"] = 0.5
    assert restored.param_groups[0]["lr"] == 0.5


def test_lbfgs_takes_part_with_one_evaluation_a_step_and_is_refused_with_more() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)])
    joint = JointOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1))
    check_optimizer(model, joint)
    before = model[1](model[0](torch.ones(2, 3))).pow(2).sum().item()
    take_steps(model, joint, 20)
    assert model[1](model[0](torch.ones(2, 3))).pow(2).sum().item() < before / 10
    tree.encode(joint.state_dict())
    for refused in (
        lambda: check_optimizer(model, torch.optim.LBFGS(model.parameters())),
        lambda: JointOptimizer(torch.optim.LBFGS(model.parameters())),
        lambda: JointOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=1, line_search_fn="strong_wolfe")),
    ):
        with pytest.raises(UsageError, match="LBFGS computes the loss again"):
            refused()


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="cannot be joined"):
        JointOptimizer(torch.optim.SGD(model.parameters(), lr=1), torch.optim.SGD(model.parameters(), lr=1))
