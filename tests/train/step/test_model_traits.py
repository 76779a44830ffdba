"""What is found out about a model: what it draws, and which of its layers look at their neighbours."""

import pytest
import torch

from trueline import events
from trueline.train.step import model_traits


def frozen_and_live() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].eval()
    return model


def test_a_frozen_normalization_layer_neither_needs_shards_nor_counts_batches():
    model = frozen_and_live()
    assert model_traits.running_statistics(model)[0] is model[2].running_mean
    assert len(model_traits.batch_counters(model)) == 1
    model[2].eval()
    assert not model_traits.read_traits(model).needs_shards


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_not_taken_for_frozen():
    assert model_traits.read_traits(frozen_and_live().eval()).neighbours


def test_after_an_evaluation_each_module_is_in_the_mode_that_it_was_in():
    model = frozen_and_live()
    before = [module.training for module in model.modules()]
    with model_traits.evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(("took_s", "rate"), [([9.0, 0.04, 0.02, 0.05], 400.0), ([9.0, 0.4], 20.0)])
def test_the_speed_before_the_first_step_is_that_of_the_fastest_of_a_few_short_tries(took_s, rate, monkeypatch):
    clock, left = [0.0], list(took_s)
    monkeypatch.setattr("trueline.train.step.model_traits.time.perf_counter", lambda: clock[0])

    def forward():
        clock[0] += left.pop(0)

    assert model_traits.try_forward(torch.nn.Linear(2, 2), forward, 8).rate == pytest.approx(rate)
    assert not left


def test_a_sync_batch_norm_becomes_one_that_looks_at_its_shard_and_keeps_parameters_and_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.SyncBatchNorm(3, eps=0.01, momentum=0.3))
    plain = torch.nn.BatchNorm1d(3, eps=0.01, momentum=0.3)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    heard = []
    with events.listening(lambda name, fields: heard.append((name, fields["layers"]))):
        model_traits.replace_sync_batchnorm(model)
    assert heard == [("normalization.by_shard", "1")]
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert not isinstance(model[1], torch.nn.SyncBatchNorm)  # DDP would refuse it on a CPU
    assert model_traits.read_traits(model).neighbours
    x = torch.randn(5, 3)
    assert torch.equal(model[1](x), plain(x))
    assert torch.equal(model[1].running_var, plain.running_var)
    with pytest.raises(ValueError, match="2 dimensions"):
        model[1](x[0])


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (torch.nn.Dropout(0.5), True), (torch.nn.Dropout(0.0), False), (torch.nn.Dropout2d(0.1), True),
        (torch.nn.LSTM(2, 2, num_layers=2, dropout=0.5), True), (torch.nn.LSTM(2, 2), False), (torch.nn.RReLU(), True),
        (torch.nn.MultiheadAttention(2, 1, dropout=0.5), True), (torch.nn.MultiheadAttention(2, 1), False),
        (torch.nn.Linear(2, 2), False),
    ],
    ids=lambda value: str(value).partition("\n")[0],
)  # fmt: skip
def test_modules_that_draw_need_shards(module, draws):
    found = model_traits.read_traits(torch.nn.Sequential(module))
    assert (found.draws, found.neighbours, found.needs_shards) == (draws, False, draws)


class Secret(torch.nn.Module):
    """Draws, and counts its forwards in a buffer."""

    def __init__(self, draws=True):
        super().__init__()
        self.line, self.draws = torch.nn.Linear(2, 2), draws
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.calls += 1
        return self.line(inputs) + (torch.rand(2) if self.draws else 0.0)


@pytest.mark.parametrize("draws", [True, False])
def test_what_a_forward_draws_in_secret_is_found_out_without_a_trace(draws):
    model = Secret(draws)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = model_traits.try_forward(model, lambda: model(torch.ones(4, 2)), 4)
    assert (found.draws, found.rate > 0) == (draws, True)
    assert (torch.equal(torch.get_rng_state(), before), model.calls.item()) == (True, 0.0)
