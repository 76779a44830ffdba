"""How a loss reduces is known before step 1: it is averaged, summed, averaged by its weights, or refused in words."""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from trueline.errors import RecipeError, UsageError
from trueline.train.elastic import Elastic
from trueline.train.step.options import Options
from trueline.train.step.plan import JobPlan
from trueline.train.step.reduction import as_scalar, as_weight
from worlds.cases import few
from worlds.groups import together

RECORDS, BATCH, STEPS = 60, 12, 10
WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def data(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(RECORDS, 6, generator=made, dtype=torch.float64)
    if kind == "numbers":
        return inputs, torch.randn(RECORDS, 1, generator=made, dtype=torch.float64)
    if kind == "classes":
        return inputs, torch.randint(0, 3, (RECORDS,), generator=made)
    tokens, lengths = torch.randint(0, 3, (RECORDS, 5), generator=made), torch.randint(1, 6, (RECORDS,), generator=made)
    return inputs, tokens.masked_fill(torch.arange(5)[None] >= lengths[:, None], -100)


def net(width: int = 1, *more: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    first = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, width)]
    return torch.nn.Sequential(*first, *(make() for make in more)).double()


def zero_head() -> torch.nn.Linear:
    head = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def squares(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return (model(inputs) - labels) ** 2


def mean(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return squares(model, inputs, labels).mean()


def sums(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return squares(model, inputs, labels).sum()


def by_class(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return F.cross_entropy(model(inputs), labels, weight=WEIGHTS)


def by_token(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return F.cross_entropy(model(inputs).view(-1, 3), labels.view(-1))


def contrastive(model: Any, inputs: Any, *_: Any) -> torch.Tensor:
    return F.cross_entropy(model(inputs) @ model(-inputs).T, torch.arange(len(inputs)))


def chunked(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    parts = list(zip(inputs.chunk(4), labels.chunk(4), strict=True))
    return sum(mean(model, *part) for part in parts) / len(parts)


def positives(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return (F.softplus(model(inputs)[:, 0]) * (labels == 1)).sum() / (labels == 1).sum().clamp(min=1)


def noisy(model: Any, inputs: Any, labels: Any, *_: Any) -> torch.Tensor:
    return mean(model, inputs + 0.3 * torch.randn_like(inputs), labels)


def loop(model: Any, kind: str, loss: Any, *, after: Any = None, epochs: int = 2, **options: Any) -> Any:
    """A loop of one's own: its parameters, how the loss was found to reduce, and the records of a shard."""

    def run() -> tuple[list[Any], str, int]:
        inputs, labels = data(kind)
        mine, kept = model(), dict[str, Any]()
        advance = torch.optim.SGD(mine.parameters(), lr=0.02)
        chosen = Options(**options)
        job = Elastic(mine, advance, TensorDataset(inputs, labels), global_batch=BATCH, epochs=epochs, options=chosen)
        for batch in job:
            found = loss(mine, batch.inputs, batch.labels, batch, kept, advance)
            loss_and_weight = found if isinstance(found, tuple) else (found, None)
            job.step(loss_and_weight[0], weight=loss_and_weight[1])
            if after is not None:
                after(kept, job, advance)
        return [value.tolist() for value in mine.parameters()], job._traits.reduction, job._plan.micro_batch

    return run


def plain(model: Any, kind: str, loss: Any) -> list[Any]:
    """The same without Trueline: one optimizer step for the records of each step."""
    (inputs, labels), mine = data(kind), model()
    advance, plan = torch.optim.SGD(mine.parameters(), lr=0.02), JobPlan(num_records=RECORDS, global_batch=BATCH,
                                                                        epochs=2, seed=0)  # fmt: skip
    for step in range(plan.total_steps):
        at = torch.from_numpy(plan.records(step))
        found = loss(mine, inputs[at], labels[at])
        advance.zero_grad()
        (found[0] if isinstance(found, tuple) else found).backward()
        advance.step()
    return [value.tolist() for value in mine.parameters()]


def expect_close(one: list[Any], other: list[Any]) -> None:
    for mine, its in zip(one, other, strict=True):
        wide = torch.tensor(its, dtype=torch.float64)
        assert (torch.tensor(mine, dtype=torch.float64) - wide).norm() <= 1e-6 * wide.norm()


CLASSES, TOKENS = functools.partial(net, 3), functools.partial(net, 15)
KNOWN = {
    "mean": (net, "numbers", mean, "mean"),
    "sum": (net, "numbers", sums, "sum"),
    "sum over a fixed number": (net, "numbers", lambda *given: sums(*given) / BATCH, "sum"),
    "regularised": (
        net,
        "numbers",
        lambda m, *given: mean(m, *given) + sum((p**2).sum() for p in m.parameters()),
        "mean",
    ),
    "sum of a token mean": (TOKENS, "tokens", lambda m, x, y, *_: by_token(m, x, y) * (y >= 0).sum(), "sum"),
    "class weights": (CLASSES, "classes", lambda m, x, y, *_: (by_class(m, x, y), WEIGHTS[y].sum()), "weighted"),
    "tokens": (TOKENS, "tokens", lambda m, x, y, *_: (by_token(m, x, y), (y >= 0).sum()), "weighted"),
}


def train_all(size: int, runs: list[Any]) -> list[list[Any]]:
    """The results of each of `runs` in `size` members, by run: one group after the other in the same processes."""
    return (
        list(zip(*together(size, lambda: [run() for run in runs]), strict=True))
        if size > 1
        else [[run()] for run in runs]
    )


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.parametrize("size", [1, 2, 5])
def test_one_two_and_five_workers_train_as_plain_torch_does_with_the_whole_batch(size):
    found = train_all(size, [loop(*known[:3]) for known in KNOWN.values()])
    for (model, kind, loss, how), members in zip(KNOWN.values(), found, strict=True):
        expected = plain(model, kind, loss)
        for parameters, reduction, shard in members:
            assert (reduction, shard) == (how, 0)
            expect_close(parameters, expected)


DRAWING: dict[str, Any] = {
    "noise": (net, "numbers", noisy),
    "dropout in secret": (net, "numbers", lambda m, x, y, *_: mean(lambda v: F.dropout(m(v), 0.3), x, y)),
    "dropout of a sum": (functools.partial(net, 1, torch.nn.Dropout), "numbers", sums),
    "two forwards": (net, "numbers", lambda *given: noisy(*given) + noisy(*given)),
    "normalized": (functools.partial(net, 4, lambda: torch.nn.BatchNorm1d(4)), "numbers",
                   lambda m, x, y, *_: mean(lambda v: m.train()(v), x, y)),
    "python flips": (net, "numbers", lambda m, x, y, *_: mean(m, x if random.random() < 0.5 else -x, y)),
    "numpy": (net, "numbers", lambda m, x, y, *_: mean(m, x + torch.from_numpy(np.random.randn(*x.shape)), y)),
    "in the batch": (functools.partial(net, 4), "numbers", contrastive),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.parametrize("size", [2, 5])
def test_draws_and_whole_shards_do_not_depend_on_the_workers(size):
    named = {"numpy": {"reduction": "mean"}, "in the batch": {"reduction": "mean", "micro_batch": 4}}
    runs = [loop(*given, **named.get(name, {})) for name, given in DRAWING.items()]
    for run, members in zip(runs, train_all(size, runs), strict=True):
        expected, _, shard = run()
        assert shard == 4
        for parameters, _, _ in members:
            expect_close(parameters, expected)


def changing(kept: Any, job: Any, advance: Any) -> None:
    kept["noise"] = torch.randn(6, dtype=torch.float64)


def private(model: Any, inputs: Any, labels: Any, batch: Any, kept: Any, advance: Any) -> torch.Tensor:
    own = kept.setdefault("own", np.random.default_rng(0))
    return mean(model, inputs + torch.from_numpy(own.normal(size=inputs.shape)), labels)


def counting(model: Any, inputs: Any, labels: Any, batch: Any, kept: Any, advance: Any) -> torch.Tensor:
    kept["seen"] = kept.get("seen", 0) + 1
    return mean(model, inputs, labels) * kept["seen"]


def stepping(model: Any, inputs: Any, labels: Any, batch: Any, kept: Any, advance: Any) -> torch.Tensor:
    loss = mean(model, inputs, labels)
    loss.backward(retain_graph=True)
    advance.step()
    return loss


NOT_OF_PARTS, NOT_REPEATABLE = "is not made of its parts", "depends on what was trained before"
REFUSED: dict[str, Any] = {
    "contrastive": (functools.partial(net, 4), "numbers", contrastive, NOT_OF_PARTS),
    "class weights": (CLASSES, "classes", by_class, "class weights or ignored labels"),
    "class weights and a head of zeros": (functools.partial(net, 4, zero_head), "classes", by_class, NOT_OF_PARTS),
    "tokens": (TOKENS, "tokens", by_token, "class weights or ignored labels"),
    "another weight": (TOKENS, "tokens", lambda m, x, y, *_: (by_token(m, x, y), len(y)), "as a mean by the weights"),
    "root": (net, "numbers", lambda *given: mean(*given).sqrt(), NOT_OF_PARTS),
    "largest": (net, "numbers", lambda *given: squares(*given).max(), NOT_OF_PARTS),
    "sum and a penalty": (net, "numbers", lambda m, *given: sums(m, *given) + m[0].weight.square().sum(), NOT_OF_PARTS),
    "positives": (net, "classes", positives, NOT_OF_PARTS),
    "chunks": (net, "numbers", chunked, NOT_OF_PARTS),
    "broadcast": (net, "numbers", lambda m, x, y, *_: ((m(x)[:, 0] - y) ** 2).mean(), NOT_OF_PARTS),
    "own normalization": (net, "numbers", lambda m, x, y, *_: mean(lambda v: m(v) - m(v).mean(0), x, y), NOT_OF_PARTS),
    "zero": (net, "numbers", lambda *given: mean(*given) * 0, "a mean or a sum cannot be seen"),
    "numpy": (*DRAWING["numpy"], NOT_OF_PARTS),
    "generator of its own": (net, "numbers", private, NOT_REPEATABLE),
    "counter": (net, "numbers", counting, NOT_REPEATABLE),
    "optimizer of its own": (net, "numbers", stepping, "changes the parameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", few(REFUSED, 1, pytest.mark.jobs))
def test_what_cannot_be_made_equal_is_refused_before_the_first_step(name):
    *given, words = REFUSED[name]
    with pytest.raises(UsageError, match=words) as raised:
        loop(*given)()
    assert raised.value.hint


def test_what_is_done_between_two_batches_is_seen_too():
    def loss(model: Any, inputs: Any, labels: Any, batch: Any, kept: Any, advance: Any) -> torch.Tensor:
        return mean(model, inputs + kept.get("noise", 0.0), labels)

    with pytest.raises(UsageError, match=NOT_REPEATABLE):
        loop(net, "numbers", loss, after=changing)()


@pytest.mark.jobs
def test_a_loop_that_begins_to_draw_later_ends_before_that_step_is_applied():
    def late(model: Any, inputs: Any, labels: Any, batch: Any, *_: Any) -> torch.Tensor:
        """In a step that no trial has met."""
        return (noisy if batch.step == 4 else mean)(model, inputs, labels)

    with pytest.raises(UsageError, match="step 4 draws random numbers"):
        loop(net, "numbers", late)()


@pytest.mark.jobs
def test_the_first_ignored_label_of_a_job_ends_it_if_the_loss_has_no_weight():
    def loss(model: Any, inputs: Any, labels: Any, batch: Any, *_: Any) -> torch.Tensor:
        """In a step that no trial has met."""
        given = labels.clone()
        given[0] = -100 if batch.step == 4 else given[0]
        return F.cross_entropy(model(inputs), given)

    with pytest.raises(UsageError, match="in step 4 a cross entropy of 12 labels divides by 11"):
        loop(CLASSES, "classes", loss)()


@pytest.mark.jobs
def test_batches_of_which_nothing_counts_change_nothing():
    def loss(model: Any, inputs: Any, labels: Any, batch: Any, *_: Any) -> Any:
        given = labels if batch.trial else torch.full_like(labels, -100)
        return by_token(model, inputs, given), (given >= 0).sum()

    parameters, how, _ = loop(TOKENS, "tokens", loss)()
    assert how == "weighted"
    expect_close(parameters, [value.tolist() for value in TOKENS().parameters()])


def test_the_trial_leaves_no_trace_in_model_generators_and_steps():
    torch.manual_seed(5)
    inputs, labels = data("numbers")
    model = net(1, lambda: torch.nn.BatchNorm1d(1), torch.nn.Dropout)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    job = Elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(inputs, labels), global_batch=BATCH)
    for batch in job:
        if not batch.trial:
            assert torch.equal(torch.get_rng_state(), drawn) or job.steps == 0
            assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
            assert model[-1].p == 0.5
            break
        assert job.step(mean(model, batch.inputs, batch.labels)) is False
    job._group.process_group.close()


@pytest.mark.parametrize("shape", [(8, 2), (2, 8), (3,), (1, 2), (8, 2, 1)])
def test_a_loss_of_a_shape_that_torch_would_refuse_is_not_averaged(shape):
    with pytest.raises(RecipeError, match=r"the loss of 8 records has the shape"):
        as_scalar(torch.ones(shape), 8)


@pytest.mark.parametrize(
    ("loss", "found", "hint"),
    [
        ({"total": torch.ones(())}, "a dict with the keys 'total'", r"found\['total'\], or the sum"),
        ((torch.ones(()), 2.0), "a tuple of 2", r"found\[0\], or the sum"),
        (0.25, r"a float \(0\.25\)", "without .item()"),
        (None, "a NoneType", "return the loss"),
    ],
)
def test_a_loss_that_is_no_tensor_is_refused_with_what_it_is_and_what_to_give(loss, found, hint):
    with pytest.raises(RecipeError, match=f"the loss is {found}, expected a tensor") as raised:
        as_scalar(loss, 8)
    assert re.search(hint, str(raised.value.hint))


def test_a_loss_is_one_number_or_one_for_each_record():
    assert as_scalar(torch.tensor(3.0), 8).item() == 3.0
    assert as_scalar(torch.arange(8.0), 8).item() == 3.5
    assert as_scalar(torch.arange(8.0)[:, None], 8, "sum").item() == 28.0
    assert as_weight(torch.tensor([2, 3]), 2) == 5.0
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(RecipeError, match="the weight of 8 records is"):
            as_weight(weight, 8)


def masked(model: Any, inputs: Any, labels: Any, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over the records that a mask lets count, and their number."""
    counts = (labels > -0.5).double()
    return (squares(model, inputs, labels) * counts).sum() / (counts.sum() + epsilon), counts.sum()


@pytest.mark.jobs
@pytest.mark.parametrize("inside", few([0.0, 1e-6], 1, pytest.mark.jobs))
def test_an_epsilon_beside_a_weight_that_single_precision_would_round_off_trains(inside):
    def loss(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        value, weight = masked(*given[:3], 1e-6)
        return value, weight + inside

    assert loop(net, "numbers", loss)()[1] == "weighted"


@pytest.mark.parametrize(("epsilon", "weight"), [(1e-6, len), (1e-2, None)], ids=["wrong weight", "large epsilon"])
def test_another_weight_and_an_epsilon_beyond_rounding_are_refused(epsilon, weight):
    def loss(model: Any, inputs: Any, labels: Any, *_: Any) -> tuple[torch.Tensor, Any]:
        value, right = masked(model, inputs, labels, epsilon)
        return value, right if weight is None else weight(labels)

    words = "it is not made of its parts" if weight else "has an epsilon beside"
    with pytest.raises(UsageError, match=words) as raised:
        loop(net, "numbers", loss)()
    assert ("weight=" if weight else "clamp(min=1)") in str(raised.value.hint)
