"""An optimizer that joins continues as the others do: what it keeps travels with the state, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from trueline import events
from trueline.errors import CheckpointError, UsageError
from trueline.train.rehearsal import fork, joined
from trueline.train.step.joint import JointOptimizer
from trueline.train.step.optimizer_step import OptimizerStep
from trueline.train.step.options import Options


class Lookahead(SGD):
    """Keeps slow weights and a counter in attributes."""

    def __init__(self, params: Any, by_parameter: bool = False) -> None:
        super().__init__(params, lr=0.1, momentum=0.5)
        values = [value for group in self.param_groups for value in group["params"]]
        self.slow: Any = [value.detach().clone() for value in values]
        self.taken = 0
        if by_parameter:
            self.slow = dict(zip(values, self.slow, strict=True))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.taken += 1
        slow = self.slow.values() if isinstance(self.slow, dict) else self.slow
        for mine, its in zip(slow, self.param_groups[0]["params"], strict=True):
            mine.lerp_(its, 0.5)
            if self.taken % 3 == 0:
                its.copy_(mine)


class Wraps(Optimizer):
    """Another optimizer does the work, and keeps its state to itself."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class Tells(Wraps):
    """The same, with that state in its own."""

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


def count_in_hook(params: Any) -> Optimizer:
    optimizer, number = SGD(params, lr=0.1), itertools.count()

    def slow_down(given: Any, *_: Any) -> None:
        given.param_groups[0]["lr"] = 0.1 / (1 + next(number))

    optimizer.register_step_pre_hook(slow_down)
    return optimizer


def counted(optimizer: Optimizer) -> LambdaLR:
    number = itertools.count()
    return LambdaLR(optimizer, lambda _: 0.5 ** next(number))


def make(optimizer: Callable[[Any], Optimizer], scheduler: Any = None) -> Callable[[], OptimizerStep]:
    def new() -> OptimizerStep:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        advance = optimizer(model.parameters())
        return OptimizerStep(model, advance, scheduler and scheduler(advance), Options(ema=0.9))

    return new


KEPT = "keeps something that is not in its state_dict"


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "fault"),
    [
        pytest.param(Lookahead, None, "", id="plain attributes"),
        pytest.param(lambda p: JointOptimizer(Lookahead(p)), None, "", id="plain attributes of a part"),
        pytest.param(lambda p: Tells(Adam(p)), None, "", id="a state_dict of its own"),
        pytest.param(SGD, lambda o: LambdaLR(o, lambda step: 0.5**step), "", id="a function of the step"),
        pytest.param(lambda p: Lookahead(p, by_parameter=True), None, KEPT, id="by parameter"),
        pytest.param(lambda p: Wraps(Adam(p)), None, KEPT, id="another optimizer"),
        pytest.param(count_in_hook, None, KEPT, id="a hook that counts"),
        pytest.param(SGD, counted, KEPT, id="a schedule that counts"),
    ],
)
def test_an_optimizer_continues_in_a_worker_that_joins_or_is_refused_before_the_first_step(
    optimizer: Any, scheduler: Any, fault: str
) -> None:
    new = make(optimizer, scheduler)
    first = new()
    assert joined.needs_trial(first.model, first.optimizer, first.scheduler)
    if fault:
        with pytest.raises(UsageError, match=fault):
            joined.expect_same_after_join(new)
    else:
        assert joined.expect_same_after_join(new) == ""


class Rarely(SGD):
    """Its own state_dict leaves out the slow weights, which count in each 40th step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.slow = [value.detach().clone() for value in self.param_groups[0]["params"]]
        self.taken = 0

    def state_dict(self) -> Any:
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.taken = state_dict["taken"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.taken += 1
        for mine, its in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.taken % 40 == 0:
                its.copy_(mine.lerp_(its, 0.5))


def test_what_an_optimizer_uses_in_few_steps_alone_is_found_in_a_job_that_has_such_a_step() -> None:
    joined.expect_same_after_join(make(Rarely), 79)
    with pytest.raises(UsageError, match=r"differ from them by .* after 40 more steps"):
        joined.expect_same_after_join(make(Rarely), 80)


class Clock:
    taken = 0


class Warms(SGD):
    """Counts its steps in an object of its own, which no state has; then it is slower, if it `cools`."""

    def __init__(self, params: Any, *, cools: bool) -> None:
        super().__init__(params, lr=0.1)
        self.clock, self.cools, self.factor = Clock(), cools, 1.0
        self.clock.taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.taken += 1
        if self.clock.taken == 37_000:
            self.factor = 0.1 if self.cools else 1.0
        self.param_groups[0]["lr"] = 0.1 * self.factor
        super().step()


def test_what_an_optimizer_does_where_its_own_count_has_become_a_number_of_its_code_is_tried() -> None:
    assert joined.expect_same_after_join(make(lambda p: Warms(p, cools=False)), 40_000) == ""
    with pytest.raises(UsageError, match=r"keeps clock\.taken, which is not in its state_dict\(\): with 36999 there"):
        joined.expect_same_after_join(make(lambda p: Warms(p, cools=True)), 40_000)


def test_a_schedule_that_ends_with_the_job_is_tried_no_longer() -> None:
    ends = make(Lookahead, lambda one: OneCycleLR(one, 0.1, total_steps=12))
    assert joined.expect_same_after_join(ends, 12) == ""


class Sharp(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "requires closure"


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="computes the loss again inside of its step") as caught:
        joined.expect_same_after_join(make(lambda p: Sharp(p, lr=0.1)))
    assert "one" in caught.value.hint


def test_the_optimizer_of_a_large_model_is_tried_with_small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MOST_BYTES", 1000)
    sizes: list[int] = []

    def wide(optimizer: Any) -> OptimizerStep:
        model = nn.Sequential(nn.Linear(100, 70), nn.BatchNorm1d(70))
        return OptimizerStep(model, optimizer(model.parameters()), None, Options())

    def copied(step: OptimizerStep) -> OptimizerStep:
        made = joined.copy_step(step)
        sizes.extend(value.numel() for value in made.model.parameters())
        return made

    kept, lost = wide(Lookahead), wide(lambda p: Lookahead(p, by_parameter=True))
    joined.expect_same_after_join(lambda: copied(kept))
    assert max(sizes) == joined.MOST_SIDE**2
    with pytest.raises(UsageError, match=KEPT):
        joined.expect_same_after_join(lambda: copied(lost))
    assert joined.copy_model(kept.model)[0].weight.shape == (joined.MOST_SIDE,) * 2  # type: ignore[index, union-attr]
    assert kept.model[0].weight.shape == (70, 100)  # type: ignore[index, union-attr]


def test_a_state_that_no_checkpoint_holds_is_refused_before_the_first_step() -> None:
    class Odd(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for value in self.param_groups[0]["params"]:
                self.state[value]["z"] = torch.zeros(1, dtype=torch.complex128)

    with pytest.raises(CheckpointError, match="complex128"):
        joined.expect_same_after_join(make(lambda p: Odd(p, lr=0.1)))


def test_a_copy_of_a_step_has_its_own_optimizer_and_schedule_and_torchs_own_are_not_tried() -> None:
    def new() -> OptimizerStep:
        return joined.copy_step(original)

    original = make(Lookahead, lambda one: LambdaLR(one, lambda step: 0.5**step))()
    before = [value.tolist() for value in original.model.parameters()]
    joined.expect_same_after_join(new)
    assert [value.tolist() for value in original.model.parameters()] == before
    assert original.optimizer.param_groups[0]["lr"] == 0.1
    assert original.optimizer.taken == 0  # type: ignore[attr-defined]
    plain = make(Adam)()
    assert not joined.needs_trial(plain.model, plain.optimizer, plain.scheduler)


def test_what_an_optimizer_counts_and_writes_knows_nothing_of_its_trial(tmp_path: Path) -> None:
    seen = {"steps": 0}

    class Counts(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            seen["steps"] += 1
            with (tmp_path / "log.txt").open("a") as log:
                log.write("a step\n")

    new = make(lambda p: Counts(p, lr=0.1))
    fork.expect_same_after_join(new, new().model, 40)
    assert seen == {"steps": 0}
    assert not (tmp_path / "log.txt").exists()


def test_what_the_trial_of_an_optimizer_finds_in_a_fork_is_raised_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("no such step")

    lost, breaks = make(lambda p: Lookahead(p, by_parameter=True)), make(lambda p: Breaks(p, lr=0.1))
    heard: list[tuple[str, Any]] = []
    with events.listening(lambda name, fields: heard.append((name, dict(fields)))):
        for forks in (True, False):
            monkeypatch.setattr(fork, "can_fork", lambda _, forks=forks: forks)
            with pytest.raises(UsageError, match=KEPT) as caught:
                fork.expect_same_after_join(lost, lost().model, 40)
            assert "JointOptimizer" in caught.value.hint
            fork.expect_same_after_join(breaks, breaks().model, 40)
    assert heard == [("optimizer.untried", {"why": "ValueError: no such step"})] * 2
