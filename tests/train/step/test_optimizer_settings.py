"""A learning rate that a loop sets by itself is that of every member and every repetition of a step, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.ledger import StepAccount
from trueline.train.step.optimizer_settings import OptimizerSettings
from trueline.train.step.plan import JobPlan
from worlds.cases import few
from worlds.groups import together

RECORDS, BATCH = 24, 4


def rate(step: int) -> float:
    return 0.03 / (1 + step % 5)


def world() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    inputs = torch.randn(RECORDS, 3, dtype=torch.float64)
    return model, torch.optim.SGD(groups, lr=1.0, momentum=0.5), inputs, inputs.sum(dim=1, keepdim=True)


def set_all(advance: torch.optim.Optimizer, step: int) -> None:
    for number, group in enumerate(advance.param_groups):
        group["lr"] = rate(step + number)
        group["momentum"] = 0.5 + rate(step)


def loop(by: Any = lambda job, batch, seen: batch.step) -> list[Any]:
    """The weights and the counts that a loop has that sets rates and momentum for each step, as nanoGPT's does."""
    model, advance, inputs, labels = world()
    seen: list[int] = []
    job = Elastic(model, advance, TensorDataset(inputs, labels), global_batch=BATCH, epochs=2)
    for batch in job:
        set_all(advance, by(job, batch, seen))
        job.step(((model(batch.inputs) - batch.labels) ** 2).mean())
        seen.append(batch.step)
    return [[value.tolist() for value in model.parameters()], seen]


def plain() -> list[Any]:
    model, advance, inputs, labels = world()
    plan = JobPlan(num_records=RECORDS, global_batch=BATCH, epochs=2, seed=0)
    for step in range(plan.total_steps):
        at = torch.from_numpy(plan.records(step))
        set_all(advance, step)
        advance.zero_grad()
        ((model(inputs[at]) - labels[at]) ** 2).mean().backward()
        advance.step()
    return [value.tolist() for value in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("size", few([1, pytest.param(3, marks=pytest.mark.jobs), 6], 1, pytest.mark.jobs))
def test_rates_that_a_loop_sets_for_each_step_hold_for_members_without_records_too(size):
    expected = plain()
    for weights, _ in together(size, loop) if size > 1 else [loop()]:  # of six members two have no records
        for mine, its in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-6, atol=1e-9)


@pytest.mark.jobs
def test_a_loop_sees_no_batch_that_is_only_tried():
    _, seen = loop()
    assert seen == list(range(12))


def test_a_rate_by_a_counter_of_the_loop_is_refused_since_a_worker_that_joins_counts_from_the_start():
    with pytest.raises(UsageError, match="by what it counts or keeps itself") as refused:
        loop(lambda job, batch, seen: len(seen))
    assert "compute them from batch.step" in refused.value.hint


def test_a_pair_of_numbers_travels_as_its_parts():
    made = [torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], betas=(0.9, beta)) for beta in (0.99, 0.999)]
    setter, other = (OptimizerSettings(optimizer, shared=True) for optimizer in made)
    other.take(sums(setter.pack(own=True), other.pack(own=False)), step=0)
    assert made[1].param_groups[0]["betas"] == (0.9, 0.99)


def settings_of(**values: Any) -> tuple[OptimizerSettings, dict[str, Any]]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, "momentum": 0.5, **values})
    return OptimizerSettings(optimizer, shared=True), optimizer.param_groups[0]


def sums(*rows: list[float]) -> list[float]:
    """As they come from an all-reduce in float32."""
    words = [StepAccount(settings=row).pack() for row in rows]
    summed = torch.tensor(words, dtype=torch.float32).sum(dim=0).tolist()
    return list(StepAccount.unpack(summed, settings=len(rows[0])).settings)


def test_what_members_with_records_have_set_is_taken_to_the_last_bit_by_those_without():
    for value in (1 / 3, 6.25e-5, -1e-300, 3e300, 0.0):
        setters = [settings_of() for _ in range(3)]
        for _, group in setters:
            group["lr"] = value
        other, group = settings_of()
        rows = [settings.pack(own=True) for settings, _ in setters]
        other.take(sums(*rows, other.pack(own=False)), step=4)
        assert (group["lr"], group["momentum"], group["nesterov"]) == (value, 0.5, False)
        setters[0][0].take(sums(*rows), step=4)


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.1, 0.1, 0.2), (0.1, 0.3, 0.2)])
def test_different_rates_of_members_are_refused_by_name_and_change_nothing(rates):
    setters = [settings_of(lr=value) for value in rates]
    given = sums(*(settings.pack(own=True) for settings, _ in setters))
    for (settings, group), value in zip(setters, rates, strict=True):
        with pytest.raises(UsageError, match="set 'lr' of the optimizer's group 0 to different values in step 7"):
            settings.take(given, step=7)
        assert group["lr"] == value


def test_a_step_that_is_not_applied_takes_back_what_its_code_has_set():
    settings, group = settings_of()
    settings.mark()
    group["lr"] *= 0.1
    settings.rewind()
    assert group["lr"] == 0.1
    settings.mark()
    group["lr"] *= 0.1
    settings.keep()
    settings.rewind()
    assert group["lr"] == 0.1 * 0.1


def test_a_rate_that_is_a_tensor_keeps_its_memory():
    rate = torch.tensor(0.5)
    settings, group = settings_of(lr=rate)
    setter, others = settings_of(lr=torch.tensor(0.5))
    others["lr"].fill_(0.25)
    settings.take(sums(setter.pack(own=True), settings.pack(own=False)), step=0)
    assert group["lr"] is rate
    assert rate.item() == 0.25


def test_the_built_in_loop_sends_no_settings():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert OptimizerSettings(optimizer, shared=False).pack(own=True) == []
