"""What is found out about a model: what it draws, and which of its layers look at their neighbours."""

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
