"""A worker whose loss reads other values than the first worker's does not train; what no loss reads may differ."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import time
import types
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trueline.errors import DataError, UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import alike, contents, fork
from trueline.train.rehearsal.contents import CollectionItems
from trueline.train.step.model_traits import ModelTraits
from worlds.cases import few

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))
Loss = Callable[[Any], Tensor]


def plain_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def train(model: nn.Module, loss: Loss, data: Dataset[Any] = DATA) -> ModelTraits:
    """Trains as the only worker of a job, or as one that joins; returns what the job knows of the loss."""
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), data, global_batch=8, epochs=3)
    for batch in job:
        job.step(loss(batch))
    return job._traits


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[bool]]:
    """Trains as a worker of a job whose first worker has found `first`; returns whether a fork could compare them."""

    def train_later(first: ModelTraits, model: nn.Module, loss: Loss, data: Dataset[Any] = DATA) -> list[bool]:
        written = json.dumps(dataclasses.asdict(first))
        monkeypatch.setattr(fork, "load_traits", lambda shown: ModelTraits(**json.loads(written)))
        heard: list[dict[str, Any]] = []
        monkeypatch.setattr(fork.events, "emit", lambda name, **fields: heard.append({"name": name, **fields}))
        train(model, loss, data)
        return [fields["forked"] for fields in heard if fields["name"] == "loss.compared"]

    return train_later


def error(model: nn.Module, batch: Any, labels: Tensor | None = None) -> Tensor:
    return ((model(batch.inputs) - (batch.labels if labels is None else labels)) ** 2).mean()


def with_teacher(seed: int) -> tuple[nn.Module, Loss]:
    teacher = plain_model(seed + 1).requires_grad_(False)
    model = plain_model()
    return model, lambda batch: error(model, batch, teacher(batch.inputs))


def with_array(seed: int) -> tuple[nn.Module, Loss]:
    model, features = plain_model(), np.random.default_rng(seed).normal(size=4).astype(np.float32)
    return model, lambda batch: error(model, batch, (batch.inputs * torch.from_numpy(features)).sum(1, keepdim=True))


def with_list(seed: int) -> tuple[nn.Module, Loss]:
    model, scales = plain_model(), [0.5, 1.0 + seed]
    return model, lambda batch: error(model, batch) * scales[1]


def with_class(seed: int) -> tuple[nn.Module, Loss]:
    class Config:
        scale = 1.0 + seed

    model, config = plain_model(), Config
    return model, lambda batch: error(model, batch) * config.scale


def with_default(seed: int) -> tuple[nn.Module, Loss]:
    model = plain_model()

    def loss(batch: Any, scale: Tensor = torch.tensor(1.0 + seed)) -> Tensor:  # noqa: B008  which is the point
        return error(model, batch) * scale

    return model, loss


class Featured(nn.Module):
    """Features of another kind in each worker, as an attribute or as a buffer that is in no state."""

    def __init__(self, seed: int, *, as_buffer: bool) -> None:
        super().__init__()
        self.net, made = plain_model(), torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        if as_buffer:
            self.register_buffer("features", made, persistent=False)
        else:
            self.features = made

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x @ self.features)
        return out


def with_clock(number: int) -> tuple[nn.Module, Loss]:
    """By a clock that no trial sets."""
    model, began = plain_model(), os.times().elapsed + number
    return model, lambda batch: error(model, batch) * (2.0 if os.times().elapsed - began > 100 else 1.0)


def with_date(number: int) -> tuple[nn.Module, Loss]:
    model, until = plain_model(), datetime.now() + timedelta(hours=1, seconds=number)
    ahead = datetime.now() - datetime.fromtimestamp(os.times().elapsed)

    def loss(batch: Any) -> Tensor:
        return error(model, batch) * (2.0 if datetime.fromtimestamp(os.times().elapsed) + ahead > until else 1.0)

    return model, loss


def with_attribute(seed: int) -> tuple[nn.Module, Loss]:
    model = Featured(seed, as_buffer=False)
    return model, lambda batch: error(model, batch)


def with_buffer(seed: int) -> tuple[nn.Module, Loss]:
    model = Featured(seed, as_buffer=True)
    return model, lambda batch: error(model, batch)


def later(seed: int) -> tuple[nn.Module, Loss]:
    model, scale = plain_model(), 1.0 + seed
    return model, lambda batch: error(model, batch) * (scale if batch.step > 7 else 1.0)


def hidden(seed: int) -> tuple[nn.Module, Loss]:
    """What no look at names shows."""
    model, scale = plain_model(), ctypes.c_double(1.0 + seed)
    return model, lambda batch: error(model, batch) * scale.value


KINDS = [
    (with_teacher, "teacher"), (with_array, "features"), (with_list, "scales"), (with_class, "config"),
    (with_default, "default 0"), (with_attribute, "the model's features"), (with_buffer, "buffer 'features'"),
    (later, "scale"), (hidden, "instead of"),
]  # fmt: skip


@pytest.mark.jobs
@pytest.mark.parametrize(("make", "name"), few(KINDS, 1, pytest.mark.jobs))
def test_a_worker_whose_loss_reads_other_values_than_the_first_ones_does_not_begin(make, name, join):
    first = train(*make(0))
    assert join(first, *make(0)) == [True]
    with pytest.raises(UsageError, match=name):
        join(first, *make(1))


@pytest.mark.jobs
@pytest.mark.parametrize(("make", "name"), [(with_clock, "began"), (with_date, "until")])
def test_a_loss_that_changes_with_the_time_since_a_worker_began_is_refused_in_the_second_one(make, name, join):
    """Long before that time: each worker has a clock of its own."""
    first = train(*make(0))
    with pytest.raises(UsageError, match=f"uses .*{name}"):
        join(first, *make(1))


@pytest.mark.jobs
@pytest.mark.parametrize("make", [with_teacher, with_buffer, hidden])
def test_where_the_model_begins_otherwise_its_loss_is_compared_at_parameters_made_up(make, join):
    first = train(*make(0))

    def begin_otherwise(seed: int) -> tuple[nn.Module, Loss]:
        model, loss = make(seed)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.1 * torch.rand_like(value))
        return model, loss

    join(first, *begin_otherwise(0))
    with pytest.raises(UsageError, match="instead of"):
        join(first, *begin_otherwise(1))


def test_records_that_each_worker_makes_for_itself_end_the_job(join):
    def standardize(seed: int) -> TensorDataset:
        at = np.random.default_rng(seed).choice(40, 5)
        return TensorDataset(INPUTS / INPUTS[at].std(), DATA.tensors[1])

    model = plain_model()
    first = train(model, lambda batch: error(model, batch), standardize(0))
    model = plain_model()
    with pytest.raises(DataError, match="is another one than when the job began") as refused:
        join(first, model, lambda batch: error(model, batch), standardize(1))
    assert "alike in all workers" in refused.value.hint


@pytest.mark.jobs
def test_a_weight_that_few_records_have_is_compared_by_name(join):
    def make(seed: int) -> tuple[nn.Module, Loss]:
        model, weights = plain_model(), torch.ones(2000)
        weights[1999] = 1.0 + seed

        def loss(batch: Any) -> Tensor:
            outputs: Tensor = (
                weights[torch.from_numpy(batch.records)][:, None] * (model(batch.inputs) - batch.labels) ** 2
            )
            return outputs

        return model, loss

    first = train(*make(0))
    with pytest.raises(UsageError, match=r"uses .*weights, which is not that of the first worker"):
        join(first, *make(1))


def make_weights(kind: str, number: int) -> Any:
    weights = [1.0] * 2000
    weights[1990] += number
    made = {"list": weights, "dict": dict(enumerate(weights)), "few": {at for at in range(9) if at != 5 + number}}
    return {"words": {f"{at}" for at in range(2000) if at != 1990 + number}, **made}[kind]


@pytest.mark.jobs
@pytest.mark.parametrize("kind", few(["list", "dict", "words", "few"], 1, pytest.mark.jobs))
def test_items_of_long_collections_and_of_sets_are_compared_though_the_records_do_not_read_them(kind, join):
    def make(number: int) -> tuple[nn.Module, Loss]:
        model, table = plain_model(), make_weights(kind, number)

        def weigh(record: int) -> float:
            if isinstance(table, set):
                return 2.0 if record in table or f"{record}" in table else 1.0
            return float(table[record])

        def loss(batch: Any) -> Tensor:
            weights = torch.tensor([weigh(int(one)) for one in batch.records])
            out: Tensor = weights[:, None] * (model(batch.inputs) - batch.labels) ** 2
            return out

        return model, loss

    first = train(*make(0))
    assert join(first, *make(0)) == [True]
    with pytest.raises(UsageError, match=r"uses .*table"):
        join(first, *make(1))


def test_what_one_worker_had_no_time_for_is_not_compared():
    whole, other = CollectionItems([1.0] * 1000), CollectionItems([1.0] * 1000 + [2.0])
    none, all_of_it = contents.digest(whole, 0.0), contents.digest(whole, time.monotonic() + 60)
    assert none == "list 1000: "
    assert contents.is_same(none, all_of_it)
    assert not contents.is_same(all_of_it, contents.digest(other, time.monotonic() + 60))


@pytest.mark.jobs
def test_long_collections_that_differ_and_are_not_used_end_nothing(join):
    def make(number: int) -> tuple[nn.Module, Loss]:
        model, names = plain_model(), {f"/tmp/{number}/{at}": number for at in range(1000)}
        return model, lambda batch: error(model, batch) * min(1, len(names))

    assert join(train(*make(0)), *make(1)) == [True]


@pytest.mark.jobs
def test_what_no_loss_reads_may_differ(join):
    def make(number: int) -> tuple[nn.Module, Loss]:
        model, began, worker, history = plain_model(), time.time(), os.getpid() + number, [float(number)]

        def loss(batch: Any) -> Tensor:
            history.append(time.time() - began + worker)
            return error(model, batch)

        return model, loss

    assert join(train(*make(0)), *make(1)) == [True]


@pytest.mark.jobs
def test_a_global_of_a_file_that_the_loops_file_imports_is_compared(join, monkeypatch):
    helper = types.ModuleType("users_helper")
    helper.__file__ = "/home/user/users_helper.py"
    exec("SCALE = 1.0\ndef scale(loss):\n    return loss * SCALE\n", vars(helper))
    model = plain_model()
    first = train(model, lambda batch: helper.scale(error(model, batch)))
    monkeypatch.setattr(helper, "SCALE", 1.5)
    model = plain_model()
    with pytest.raises(UsageError, match="SCALE"):
        join(first, model, lambda batch: helper.scale(error(model, batch)))


@pytest.mark.jobs
def test_a_number_that_differs_and_may_have_no_other_value_ends_nothing(join):
    def make(number: int) -> tuple[nn.Module, Loss]:
        model, place, scale = plain_model(), number, ctypes.c_double(1.0 + number // 2)
        return model, lambda batch: error(model, batch) * [1.0, 1.0, 1.0][place] * scale.value

    first = train(*make(0))
    assert join(first, *make(1)) == [False]  # the fork raised
    with pytest.raises(UsageError, match=r"not that of the first worker.* differs by name: the loop's loss.place"):
        join(first, *make(2))


def test_large_tensors_are_hashed_by_a_part_of_their_elements():
    large = torch.zeros((alike.WHOLE_BYTES // 4) + 4)
    before = alike.describe(large)
    large += 1
    assert alike.describe(large) != before
    assert alike.describe(torch.zeros(3, dtype=torch.bfloat16)) != alike.describe(torch.zeros(3))
