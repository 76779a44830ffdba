"""What servers are told of a model and its optimizer, and what a worker reads and writes."""

import numpy as np
import pytest
import torch
from torch import nn

import trueline
from trueline.errors import RecipeError, UsageError
from trueline.ps.messages import OptimizerSpec
from trueline.ps.model.embedding import Embedding
from trueline.ps.model.strategy import RowwiseAdagrad, ServedModel


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(4, init="normal", scale=0.5, max_rows=100, evict="lru", admit_after=2)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)))


def pull(wanted):
    return {table: np.float32(0.5) * np.repeat(ids[:, None], 4, 1).astype(np.float32) for table, ids in wanted.items()}


def test_the_spec_has_tables_parameters_buffers_and_groups():
    model = Clicks()
    tables = trueline.RowwiseAdagrad(model.table.parameters(), lr=0.1)
    rest = torch.optim.Adam([*model.norm.parameters(), *model.head.parameters()], lr=0.01, betas=(0.8, 0.9))
    served = ServedModel(model, trueline.JointOptimizer(rest, tables), seed=7)
    spec = served.spec
    assert spec.seed == 7
    assert [group.kind for group in spec.groups] == ["adam", "rowwise_adagrad"]
    assert spec.groups[0].betas == (0.8, 0.9)
    assert [(one.name, one.dim, one.group, one.init, one.scale, one.max_rows, one.evict, one.admit_after)
            for one in spec.tables] == [("table", 4, 1, "normal", 0.5, 100, "lru", 2)]  # fmt: skip
    assert {one.name: (one.shape, one.group) for one in spec.dense} == {
        "norm.weight": ((4,), 0), "norm.bias": ((4,), 0), "head.weight": ((1, 4), 0), "head.bias": ((1,), 0),
        "norm.running_mean": ((4,), -1), "norm.running_var": ((4,), -1), "norm.num_batches_tracked": ((), -1),
    }  # fmt: skip
    assert served.lrs(0) == (0.01, 0.1)


def test_values_are_loaded_in_place_and_gradients_read_and_dropped():
    model = Clicks()
    served = ServedModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight, before = model.head.weight, served.initial()
    assert set(before) == {one.name for one in served.spec.dense}
    served.load({"head.weight": np.arange(4, dtype=np.float32), "norm.num_batches_tracked": np.array([3], np.float32)})
    assert model.head.weight is weight
    assert weight.tolist() == [[0, 1, 2, 3]]
    assert before["head.weight"].tolist() != [0, 1, 2, 3]  # a copy
    with served.tables.minibatch(pull) as minibatch:
        model(torch.tensor([1, 2, 2])).square().mean().backward()
    expected = weight.grad.clone().reshape(-1)
    rows, dense, norm = served.gradients(minibatch)
    assert rows["table"][0].tolist() == [1, 2]
    np.testing.assert_array_equal(dense["head.weight"], expected)
    assert dense["norm.num_batches_tracked"].tolist() == [4]
    np.testing.assert_allclose(dense["norm.running_mean"], model.norm.running_mean)
    parts = [rows["table"][1], *(dense[one.name] for one in served.spec.dense if one.group == 0)]
    assert norm == pytest.approx(np.sqrt(sum((part**2).sum() for part in parts)), rel=1e-5)
    assert weight.grad is None
    assert not served.gradients(minibatch)[1]["head.weight"].any()  # took no part


def test_gradients_are_clipped_together():
    model = Clicks()
    served = ServedModel(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.25)
    with served.tables.minibatch(pull) as minibatch:
        (100 * model(torch.tensor([1, 2, 2]))).square().mean().backward()
    rows, dense, norm = served.gradients(minibatch)
    assert norm > 0.25
    parts = [rows["table"][1], *(dense[one.name] for one in served.spec.dense if one.group == 0)]
    assert np.sqrt(sum((part**2).sum() for part in parts)) == pytest.approx(0.25, rel=1e-4)


def test_learning_rates_are_those_of_the_global_step():
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
    served = ServedModel(model, optimizer, scheduler)
    assert [round(served.lrs(step)[0], 5) for step in (0, 9, 10, 25, 24)] == [1.0, 1.0, 0.1, 0.01, 0.01]


def test_a_scheduler_that_changes_more_than_the_learning_rate_is_refused():
    model = Clicks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    served = ServedModel(model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=9))
    with pytest.raises(UsageError, match="OneCycleLR changes more of the optimizer than its learning rate"):
        served.lrs(3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match="follows evaluations"):
        ServedModel(model, optimizer, plateau)


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, nesterov=True, weight_decay=0.1),
         OptimizerSpec(kind="sgd", momentum=0.9, nesterov=True, weight_decay=0.1)),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.2),
         OptimizerSpec(kind="adagrad", lr_decay=0.1, initial_accumulator=0.2, eps=1e-10)),
        (lambda p: torch.optim.AdamW(p), OptimizerSpec(kind="adamw", weight_decay=0.01)),
        (lambda p: torch.optim.SparseAdam(p, betas=(0.5, 0.9)), OptimizerSpec(kind="adam", betas=(0.5, 0.9))),
        (lambda p: RowwiseAdagrad(p, eps=1e-6), OptimizerSpec(kind="rowwise_adagrad", eps=1e-6)),
    ],
)  # fmt: skip
def test_torchs_optimizers_are_described(make, spec):
    model = Clicks()
    assert ServedModel(model, make(list(model.parameters()))).spec.groups == (spec,)


def test_other_optimizers_are_refused_by_name():
    model = Clicks()
    with pytest.raises(UsageError, match="RMSprop is not one that parameter servers step"):
        ServedModel(model, torch.optim.RMSprop(model.parameters()))
    with pytest.raises(UsageError, match="amsgrad"):
        ServedModel(model, torch.optim.Adam(model.parameters(), amsgrad=True))


def test_a_table_that_no_optimizer_has_and_float64_are_refused():
    model = Clicks()
    with pytest.raises(RecipeError, match="the optimizer was not given table 'table'"):
        ServedModel(model, torch.optim.SGD(model.head.parameters()))
    with pytest.raises(RecipeError, match=r"parameter 'norm.weight' is float64"):
        ServedModel(model, torch.optim.SGD(model.double().parameters()))


def test_frozen_parameters_stay_the_recipes():
    model = Clicks()
    model.head.requires_grad_(False)
    served = ServedModel(model, torch.optim.SGD(one for one in model.parameters() if one.requires_grad))
    assert not any(one.name.startswith("head") for one in served.spec.dense)


def test_the_state_for_a_checkpoint_loads_into_a_new_model():
    model = Clicks()
    served = ServedModel(model, torch.optim.SGD(model.parameters()))
    tables = {"table": (np.array([5, -3]), np.arange(8, dtype=np.float32).reshape(2, 4))}
    state = served.state_dict({"head.bias": np.array([9.0], np.float32)}, tables)
    fresh = Clicks()
    fresh.load_state_dict({name: value.clone() for name, value in state.items()})
    assert fresh.head.bias.item() == 9.0
    assert fresh.eval().table(torch.tensor([-3])).tolist() == [[4, 5, 6, 7]]


def test_rowwise_adagrad_divides_by_the_root_of_the_mean_square_of_each_row():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = RowwiseAdagrad([weight], lr=0.5)
    sums = np.zeros(2)
    expected = weight.detach().numpy().astype(np.float64).copy()
    for step in range(20):
        gradient = np.array([[1.0 + step, 2.0], [0.5, -1.0]])
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        sums += (gradient**2).mean(axis=1)
        expected -= 0.5 * gradient / (np.sqrt(sums) + 1e-10)[:, None]
    np.testing.assert_allclose(weight.detach(), expected, rtol=1e-5)
