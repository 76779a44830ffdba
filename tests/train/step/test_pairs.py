"""Loops of all kinds: two workers arrive where one does, whatever the model, the optimizer and the loop are like."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from trueline.data.open import as_source
from trueline.errors import TrainError, UsageError
from trueline.train.elastic import Elastic
from trueline.train.step import ledger as books
from trueline.train.step.model_traits import read_traits
from trueline.train.step.options import Options
from trueline.train.step.replica import Reduced
from trueline.train.step.validation import Rule, Validation
from worlds.cases import few
from worlds.groups import together
from worlds.states import read_all

pytestmark = pytest.mark.slow

RECORDS = 25


@pytest.fixture(autouse=True)
def _no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def line() -> torch.nn.Linear:
    return torch.nn.Linear(4, 1)


class Spare(torch.nn.Module):
    """A part of it takes no part in any step."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = line(), line()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def loop(model: Callable[[], Any], forward: Any = None, optimizer: Any = None, batch: int = 8, **options: Any) -> Any:
    """A loop of one's own, to be run in each worker; it returns the parameters."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs, labels, mine = torch.randn(RECORDS, 4), torch.randn(RECORDS, 1), model()
        advance = optimizer(mine) if optimizer else torch.optim.SGD(mine.parameters(), lr=0.1)
        chosen = Options(**options)
        job = Elastic(mine, advance, TensorDataset(inputs, labels), global_batch=batch, epochs=3, options=chosen)
        for step in job:
            outputs = forward(mine, step.inputs) if forward else mine(step.inputs)
            job.step(((outputs - step.labels) ** 2).mean())
        return [value.tolist() for value in mine.parameters()]

    return run


def expect_the_same(run: Callable[[], Any], members: int = 2) -> None:
    (alone,), (one, *others) = together(1, run), together(members, run)
    assert others == [one] * len(others)
    for mine, its in zip(alone, one, strict=True):
        torch.testing.assert_close(torch.tensor(its), torch.tensor(mine), rtol=1e-4, atol=1e-5)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(loop(lambda: line().eval()), id="in evaluation mode", marks=pytest.mark.jobs),
        pytest.param(
            loop(line, lambda model, inputs: torch.nn.functional.linear(inputs, model.weight, model.bias)),
            id="not as model(...)",
            marks=pytest.mark.jobs,
        ),
        pytest.param(loop(line, lambda model, inputs: model(inputs) + model(2 * inputs)), id="twice"),
    ],
)
def test_however_the_loop_calls_its_model_the_gradients_of_all_workers_count(run):
    expect_the_same(run)


@pytest.mark.jobs
def test_a_parameter_without_a_gradient_is_left_alone_though_a_worker_has_no_records():
    def decaying(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)

    expect_the_same(loop(Spare, optimizer=decaying, find_unused_parameters=True))


def test_a_parameter_without_a_gradient_is_left_alone_where_the_loop_calls_parts_of_its_model():
    """Weight decay, or Adam's momentum, would move it with a gradient of zeros."""

    def decaying(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)

    run = loop(Spare, lambda model, inputs: model.used(inputs), optimizer=decaying, find_unused_parameters=True)
    trained = run()
    torch.manual_seed(0)
    torch.randn(RECORDS, 4), torch.randn(RECORDS, 1)
    untrained = [value.tolist() for value in Spare().parameters()]
    assert trained[2:] == untrained[2:]
    assert trained[:2] != untrained[:2]


@pytest.mark.jobs
def test_a_worker_without_records_in_its_first_step_trains_in_half_precision():
    expect_the_same(loop(line, batch=1, precision="fp16"))


@pytest.mark.jobs
def test_gradients_of_parameters_that_the_optimizer_does_not_have_do_not_pile_up_in_the_norm():
    def head(model):
        return torch.optim.SGD(model[1].parameters(), lr=0.1)

    expect_the_same(loop(lambda: torch.nn.Sequential(line(), torch.nn.Linear(1, 1)), optimizer=head, clip_norm=0.1))


def test_who_catches_up_leaves_out_a_step_whose_loss_is_no_number():
    model = line()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(torch.ones(8, 4), torch.ones(8, 1)),
                  global_batch=4, epochs=2, traits=read_traits(model))  # fmt: skip
    for step in job:
        if step.step == 1:
            break
        job.step(((model(step.inputs) - step.labels) ** 2).mean())
    count, digest = len(step.records), books.digest(step.records)
    account = books.StepAccount.of_holder(
        count=count, digest=digest, generation=1, step=job.steps, wish=False, loss_sum=math.nan, rates=(1.0,)
    )
    gradients = [torch.full_like(value, math.nan) for value in model.parameters()]
    job._recovery._fetch = SimpleNamespace(state=read_all(job._replica.snapshot()), trouble="", over=True)
    job._recovery._kept = [Reduced(account, torch.zeros(8), gradients)]
    assert job._catch_up()
    assert job.steps == 1
    assert all(value.isfinite().all() for value in model.parameters())


@pytest.mark.jobs
def test_workers_of_which_some_have_halved_their_scale_agree_on_one_when_they_regroup():
    def run() -> tuple[list[Any], float]:
        torch.manual_seed(0)
        model, inputs, labels = line(), torch.randn(8, 4), torch.randn(8, 1)
        chosen = Options(precision="fp16")
        advance = torch.optim.SGD(model.parameters(), lr=0.1)
        job = Elastic(model, advance, TensorDataset(inputs, labels), global_batch=4, options=chosen)
        if job._link.ref == "worker-1.0":
            job._replica.optimizer_step.scaler.update(new_scale=128.0)
        for step in job:
            job.step(((model(step.inputs) - step.labels) ** 2).mean())
        return [value.tolist() for value in model.parameters()], job._replica.optimizer_step.scaler.get_scale()

    one, other = together(2, run, steps=0)
    assert one == other


def test_a_schedule_that_waits_for_plateaus_hears_of_an_evaluation_once_though_it_is_made_again():
    model = line()
    advance = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(advance, factor=0.5, patience=1)
    rule = Validation(rule=Rule(every=2, monitor="loss"), num_records=1, names=(), measure=lambda start, stop: [1.0])
    data = TensorDataset(torch.zeros(24, 4), torch.zeros(24, 1))
    job = Elastic(model, advance, data, global_batch=4, scheduler=plateau, validation=rule, traits=read_traits(model))
    rates = []
    for step in job:
        if step.step in (2, 4) and len(job.evaluations) * 2 == step.step:
            job._recovery._forget_evaluation()  # as a regroup does
            job._validate()
        job.step(((model(step.inputs) - step.labels) ** 2).mean())
        rates.append(advance.param_groups[0]["lr"])
    assert len(job.evaluations) == 3
    assert rates == [1.0] * 6, "the first value is the best; one without improvement is within the patience"


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_step_of_which_every_record_is_set_aside_is_a_step_without_records(bitwise):
    class Broken(TensorDataset):
        def __getitem__(self, index):
            if index == 5:
                raise ValueError("torn")
            return super().__getitem__(index)

    model = torch.nn.Sequential(line(), torch.nn.Dropout(0.5))
    data = Broken(torch.ones(8, 4), torch.ones(8, 1))
    advance = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Elastic(model, advance, data, global_batch=1, seed=-1, options=Options(bitwise=bitwise),
                  traits=read_traits(model))  # fmt: skip
    trained = [index for step in job for index in step.records if job.step(model(step.inputs).mean()) is not None]
    assert job.steps == 8
    assert sorted(trained) == [0, 1, 2, 3, 4, 6, 7]
    assert job.certificates[0]["set_aside"] == [5]


@pytest.mark.jobs
def test_masks_that_a_model_draws_in_secret_are_of_their_shards_when_micro_batch_is_set():
    class Secret(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = line()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(self.line(inputs), 0.5)

    expect_the_same(loop(Secret, micro_batch=2))


def test_an_optimizer_with_parameters_that_are_not_of_the_model_is_refused():
    model, scale = line(), torch.nn.Parameter(torch.ones(3))
    advance = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    with pytest.raises(UsageError, match=r"1 parameters that are not of the model \(the first of shape \[3\]\)"):
        Elastic(model, advance, TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), global_batch=4,
                  traits=read_traits(model))  # fmt: skip


def test_a_loss_whose_sum_over_the_workers_may_overflow_is_its_workers_fault():
    model = line()
    advance = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Elastic(model, advance, TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), global_batch=4,
                  traits=read_traits(model))  # fmt: skip

    def take_all():
        for step in job:
            job.step(model(step.inputs).mean() * 0 + 2e38)

    with pytest.raises(TrainError, match="loss of step 0 is not finite"):
        take_all()


def test_a_worker_that_tries_records_one_by_one_is_stuck_only_when_one_of_them_takes_long():
    model, phases = line(), []
    advance = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Elastic(model, advance, TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), global_batch=4,
                  traits=read_traits(model))  # fmt: skip
    for step in job:
        job._link.report_phase = phases.append
        job._trials.find_blamed(step.step, step.records)
        break
    assert phases == ["reading"] * 4


def test_the_copy_that_joiners_fetch_is_dropped_when_everybody_holds_the_state():
    model = line()
    advance = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Elastic(model, advance, TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), global_batch=4,
                  traits=read_traits(model))  # fmt: skip
    for step in job:
        if step.step == 0:
            job._recovery._offer.publish(1, job._replica.snapshot())
        job.step(model(step.inputs).mean())
        assert job._recovery._offer._offered is None


def columns(records, mode):
    return tuple(torch.from_numpy(records[name].to_numpy().astype(np.float32))[:, None] for name in ("x", "y"))


def test_in_windows_of_row_groups_and_decoded_ahead_two_workers_arrive_where_one_does(tmp_path):
    table = pa.table({"x": np.random.default_rng(0).normal(size=400), "y": np.arange(400) % 7 / 7.0})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)

    def run() -> tuple[list[Any], Any, list[int], int]:
        torch.manual_seed(0)
        model, chosen = torch.nn.Linear(1, 1), Options(shuffle="windows")
        source = as_source(str(tmp_path / "rows.parquet"), mode="training", feed=columns, recipe="r")
        read: list[int] = []
        taken, ahead = source._tables.take, source.prefetch
        source._tables.take = lambda indices: (read.extend(indices.tolist()), taken(indices))[1]
        expected: list[bytes] = []
        source.prefetch = lambda indices: (expected.append(indices.tobytes()), ahead(indices))[1]
        job = Elastic(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            source,
            global_batch=40,
            epochs=2,
            options=chosen,
            traits=read_traits(model),
        )
        for step in job:
            job.step(((model(step.inputs) - step.labels) ** 2).mean())
        facts = [(one["records"], one["tally_min"], one["tally_max"]) for one in job.certificates]
        return [value.tolist() for value in model.parameters()], facts, read, len(expected)

    (alone,), pair = together(1, run), together(2, run)
    for weights, certificates, read, prefetched in (alone, *pair):
        torch.testing.assert_close(torch.tensor(weights[0]), torch.tensor(alone[0][0]), rtol=1e-5, atol=1e-6)
        assert certificates == [(400, 1, 1), (400, 1, 1)]
        assert prefetched == 19, "every step but the first of twenty"
        assert set(read) <= set(range(400))
    assert len(alone[2]) == 800, "what was decoded ahead is not read again"
    assert set(pair[0][2]) | set(pair[1][2]) == set(range(400)), "shares move: some of it was for nothing"


class Sparse(torch.nn.Module):
    """Tables whose gradients are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = (make(30, 4, sparse=True) for make in (torch.nn.Embedding, torch.nn.EmbeddingBag))
        self.last = line()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        ids = (inputs.abs() * 10).long().clamp(max=29)
        return self.last(self.words(ids).mean(1) + self.bags(ids))


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("members", "batch"), few([(2, 8), (3, 2)], 1, pytest.mark.jobs)
)  # of three, one has no records of a batch of 2
def test_sparse_gradients_are_summed_though_a_member_may_have_no_records(members: int, batch: int) -> None:
    expect_the_same(loop(Sparse, batch=batch), members)
