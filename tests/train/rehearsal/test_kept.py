"""What Python code keeps from one batch to the next is found where the loss uses it, and else left alone."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import kept
from trueline.train.step import features
from trueline.train.step.options import Options

INPUTS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)


class Counts(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.net(x)
        return outputs if self.calls < 40 else 0.5 * outputs


class Numbers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        return outputs if next(self.numbers) < 40 else 0.5 * outputs


class Queues(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=500)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        others = torch.stack(list(self.queue)).mean(dim=0) if len(self.queue) > 150 else torch.zeros(3)
        self.queue.extend(outputs.detach())
        return outputs - others


class Teaches(Plain):
    """Its teacher begins as the student, so that the first averages change no number."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [copy.deepcopy(self.net)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teachers[0](x)
            for mine, its in zip(self.teachers[0].parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
        outputs: Tensor = self.net(x)
        return outputs + (outputs - taught) ** 2


class Harmless(Plain):
    """A counter and a history that nothing reads, the last outputs, and a cache that the first forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.last, self.cache = 0, list[float](), torch.zeros(0), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = self.cache.setdefault(len(x), torch.ones(len(x), 1))
        outputs: Tensor = self.net(x) * scale
        self.last = outputs.detach()
        self.history.append(float(self.last.mean()))
        return outputs


class Scaled(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Scaled.backwards += 1
        return grad if Scaled.backwards < 40 else 0.5 * grad


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def by_closure() -> Any:
    calls = 0

    def weigh(outputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return outputs if calls < 40 else 0.5 * outputs

    return weigh


def by_default(outputs: Tensor, state: dict[str, int] = {"calls": 0}) -> Tensor:  # noqa: B006
    state["calls"] += 1
    return outputs if state["calls"] < 40 else 0.5 * outputs


def by_attribute(outputs: Tensor) -> Tensor:
    by_attribute.calls = getattr(by_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return outputs if by_attribute.calls < 40 else 0.5 * outputs  # type: ignore[attr-defined]


def by_generator() -> Any:
    numbers = (1.0 if at < 40 else 0.5 for at in itertools.count())
    return lambda outputs: next(numbers) * outputs


def by_array() -> Any:
    seen = np.zeros(2)

    def weigh(outputs: Tensor) -> Tensor:
        seen[0] += 1
        return outputs if seen[0] < 40 else 0.5 * outputs

    return weigh


def by_tuple() -> Any:
    calls = (0, 1)

    def weigh(outputs: Tensor) -> Tensor:
        nonlocal calls
        calls = (calls[0] + 1, 1)
        return outputs if calls[0] < 40 else 0.5 * outputs

    return weigh


def by_set() -> Any:
    seen = set[int]()

    def weigh(outputs: Tensor) -> Tensor:
        seen.add(len(seen))
        return outputs if len(seen) < 40 else 0.5 * outputs

    return weigh


def by_plan() -> Any:
    plan = [0.5] * 100 + [1.0] * 100

    def weigh(outputs: Tensor) -> Tensor:
        return plan.pop() * outputs

    return weigh


def by_slot() -> Any:
    kept = Slotted()

    def weigh(outputs: Tensor) -> Tensor:
        kept.count += 1
        return outputs if kept.count < 40 else 0.5 * outputs

    return weigh


def by_backward() -> Any:
    return Scaled.apply


def try_function(weigh: Any, spaces: dict[str, Any]) -> None:
    model = Plain()

    def compute() -> list[float]:
        loss = (weigh(model.net(INPUTS)) ** 2).sum()
        (grad,) = torch.autograd.grad(loss, [model.net.weight])
        return [float(loss.detach()), *features.measure_gradient(grad)]

    memory = kept.KeptNames(model, lambda: [("the loop's ", spaces)])
    for _ in range(2):
        compute()
        memory.look()
    memory.expect_unused(compute)


@pytest.mark.parametrize(
    "made",
    [by_closure(), by_default, by_attribute, by_generator(), by_array(), by_tuple(), by_set(), by_plan(),
     by_slot(), functools.partial(by_closure())],
    ids=["closure", "default", "attribute", "generator", "array", "tuple", "set", "plan", "slot", "partial"],
)  # fmt: skip
def test_what_a_function_keeps_is_found_wherever_it_is(made: Any) -> None:
    with pytest.raises(UsageError, match=r"the loss uses the loop's weigh"):
        try_function(made, {"weigh": made})


@pytest.mark.parametrize("none", [np.int64(0), np.float32(0), Fraction(0), Decimal(0), datetime(2026, 1, 1)], ids=repr)
def test_a_counter_of_any_kind_of_number_is_found(none: Any) -> None:
    one = timedelta(seconds=1) if isinstance(none, datetime) else 1

    class Counter:
        count, late = none, none + 1000 * one

    def weigh(outputs: Tensor) -> Tensor:
        Counter.count = Counter.count + one
        return outputs if Counter.count < Counter.late else 0.5 * outputs

    with pytest.raises(UsageError, match=r"the loss uses the loop's weigh\.Counter\.count"):
        try_function(weigh, {"weigh": weigh})


def put_item(room: Any, at: int) -> int:
    """Puts one more item into a collection, or adds one to a tensor or an array, and returns how many there are."""
    if isinstance(room, Tensor | np.ndarray):
        room[...] = room + 1
        return int(room.sum())
    if isinstance(room, dict):
        room[at] = at
    else:
        (room.add if isinstance(room, set) else room.append)(at)
    return len(room)


@pytest.mark.parametrize(
    "make", [list, deque, set, dict, lambda: torch.zeros(()), lambda: np.zeros(1)],
    ids=["list", "deque", "set", "dict", "tensor", "array"],
)  # fmt: skip
def test_a_bound_that_the_batches_of_a_trial_have_passed_is_found_by_what_was_kept_before_them(make: Any) -> None:
    room, calls = make(), itertools.count()

    def compute() -> list[float]:
        return [1.0 if put_item(room, next(calls)) < 7 else 0.5]

    memory = kept.KeptNames(Plain(), lambda: [("the loop's ", {"room": room})])
    memory.begin()
    for _ in range(9):
        compute()
        memory.look()
    before = copy.deepcopy(room)
    with pytest.raises(UsageError, match="the loss uses the loop's room, which each batch changes"):
        memory.expect_unused(compute)
    assert len(before) + 1 == len(room) if isinstance(room, list) else True


def test_a_set_of_what_was_seen_is_found_though_the_same_records_do_not_make_it_longer() -> None:
    seen = set[float]()

    def compute(inputs: Tensor = INPUTS) -> list[float]:
        seen.add(float(inputs.sum()))
        return [float(inputs.sum()) * (1.0 if len(seen) < 40 else 0.5)]

    memory = kept.KeptNames(Plain(), lambda: [("the loop's ", {"seen": seen})])
    for _ in range(2):
        compute()
        memory.look()
    compute(2 * INPUTS)
    with pytest.raises(UsageError, match="the loss uses the loop's seen"):
        memory.expect_unused(compute)


def test_a_counter_that_only_gradients_depend_on_is_found() -> None:
    with pytest.raises(UsageError, match=r"the loop's Scaled.backwards.* the gradients of the same records have"):
        try_function(by_backward(), {"Scaled": Scaled})


def test_functions_that_keep_what_nothing_reads_are_left_alone() -> None:
    calls, seen, marks, numbers, pairs = 0, set[int](), np.zeros(2), (at for at in range(99)), (0, 0)

    def weigh(outputs: Tensor) -> Tensor:
        nonlocal calls, pairs
        calls, pairs = calls + 1, (calls, 1)
        seen.add(calls)
        marks[0] += 1
        next(numbers)
        return outputs

    try_function(weigh, {"weigh": weigh})
    assert 4 < calls < 20
    assert len(seen) == calls


def look(model: nn.Module) -> kept.KeptNames:
    memory = kept.KeptNames(model, list)
    for _ in range(2):
        model(INPUTS)
        memory.look()
    return memory


@pytest.mark.parametrize(
    ("make", "place"), [(Counts, "calls"), (Numbers, "numbers"), (Queues, "queue"), (Teaches, "teachers/0.weight")]
)
def test_what_a_forward_keeps_and_uses_is_named_and_has_its_value_again(make: Any, place: str) -> None:
    model = make()
    memory = look(model)
    with pytest.raises(UsageError, match=f"uses the model's {place}, which each batch changes") as caught:
        memory.expect_unused(lambda: [float(model(INPUTS).detach().sum())])
    assert "a buffer of the model" in caught.value.hint
    assert model.calls < 9 if make is Counts else len(getattr(model, "queue", ())) < 50


def test_what_a_forward_keeps_and_does_not_use_is_left_alone() -> None:
    model = Harmless()
    memory = look(model)
    assert {place.name for place in memory.list_changed()} == {"the model's calls", "the model's history"}
    memory.expect_unused(lambda: [float(model(INPUTS).detach().sum())])
    assert 2 < model.calls < 9
    assert len(model.history) < 9


def train(body: Any, **options: Any) -> int:
    """Steps of a loop whose names are those of a function."""
    torch.manual_seed(0)
    inputs = torch.randn(240, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    advance = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    applied = calls = 0
    for batch in (job := Elastic(model, advance, data, global_batch=24, options=Options(**options))):
        calls += 1  # noqa: SIM113  a counter is what this is about
        applied += job.step(body(model(batch.inputs), batch.labels, calls))
    return applied


@pytest.mark.slow
def test_a_loss_that_changes_with_a_counter_of_the_loop_is_refused_though_the_trial_does_not_reach_it() -> None:
    def later(outputs: Tensor, labels: Tensor, calls: int) -> Tensor:
        squares = (outputs - labels) ** 2
        return squares.mean() if calls < 100 else squares.sqrt().mean()

    with pytest.raises(UsageError, match="uses the loop's calls, which each batch changes"):
        train(later)


@pytest.mark.jobs
@pytest.mark.slow
def test_a_loss_that_changes_slowly_with_a_counter_is_refused_and_one_that_is_counted_trains() -> None:
    def slowly(outputs: Tensor, labels: Tensor, calls: int) -> Tensor:
        return ((outputs - labels) ** 2).mean() + 1e-9 * calls * outputs.square().mean()

    with pytest.raises(UsageError, match="it depends on what was trained before"):
        train(slowly)
    assert train(lambda outputs, labels, calls: ((outputs - labels) ** 2).mean()) == 10
