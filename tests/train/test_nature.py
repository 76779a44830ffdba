"""What is found out about a model: what it draws, and which of its layers look at their neighbours."""

import pytest
import torch

from trueline.train import nature


def frozen_and_live() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].eval()
    return model


def test_a_frozen_normalization_layer_neither_needs_shards_nor_counts_batches():
    model = frozen_and_live()
    assert nature.running_statistics(model)[0] is model[2].running_mean
    assert len(nature.batch_counters(model)) == 1
    model[2].eval()
    assert not nature.known(model).needs_shards


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_not_taken_for_frozen():
    assert nature.known(frozen_and_live().eval()).neighbours


def test_after_an_evaluation_each_module_is_in_the_mode_that_it_was_in():
    model = frozen_and_live()
    before = [module.training for module in model.modules()]
    with nature.evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(("took_s", "rate"), [([9.0, 0.04, 0.02, 0.05], 400.0), ([9.0, 0.4], 20.0)])
def test_the_speed_before_the_first_step_is_that_of_the_fastest_of_a_few_short_tries(took_s, rate, monkeypatch):
    clock, left = [0.0], list(took_s)
    monkeypatch.setattr("trueline.train.nature.time.perf_counter", lambda: clock[0])

    def forward():
        clock[0] += left.pop(0)

    assert nature.tried(torch.nn.Linear(2, 2), forward, 8).rate == pytest.approx(rate)
    assert not left
