"""What a loop does after a step that was applied, and a worker that joins would not do, is refused before the first
step; what only looks does not disturb it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal import kept
from trueline.train.step.trial import FEW
from worlds.cases import few

pytestmark = pytest.mark.slow

RECORDS = 48


class World:
    """A loop of a user's own, which calls `after` for each step that was applied; `loss` may use what that keeps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(RECORDS, 4, dtype=torch.float64)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.advance = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.kept: Any = 0.0
        self.applied = 0

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((outputs - batch.labels) ** 2).mean()

    def train(self, after: Callable[[World], object], **given: Any) -> None:
        data = TensorDataset(self.inputs, self.inputs.sin().sum(dim=1, keepdim=True))
        for batch in (job := Elastic(self.model, self.advance, data, global_batch=12, **given)):
            if job.step(self.loss(self.model(batch.inputs), batch)):
                self.applied += 1
                after(self)


class Uses(World):
    """Its loss uses what the loop keeps."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return super().loss(outputs, batch) + 0.1 * ((outputs - self.kept) ** 2).mean()


def clamp(world: World) -> None:
    for value in world.model.parameters():
        value.data.clamp_(-100, 100)  # beyond all that these parameters ever are


def average(world: World) -> None:
    for mine, its in zip(world.kept.parameters(), world.model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(its.data, alpha=0.1)


def average_tensors(world: World) -> None:
    world.kept.update({name: 0.9 * world.kept[name] + 0.1 * value for name, value in world.model.state_dict().items()})


def wait(world: World) -> None:
    """After the first step and the two that follow, the counter is what it was."""
    world.kept += 1
    if world.kept == 2:
        world.kept, world.advance.param_groups[0]["lr"] = 0, world.advance.param_groups[0]["lr"] / 2


def slow_down(world: World) -> None:
    for group in world.advance.param_groups:
        group["lr"] *= 0.9


def count(world: World) -> None:
    world.kept += 1


def hold_target(model: torch.nn.Module) -> None:
    model.register_buffer("target", torch.zeros(2))


@pytest.mark.parametrize(
    ("make", "keep", "after", "why", "act"),
    few([
        (World, None, clamp, "changes parameters itself after a step", "the step"),
        (World, AveragedModel, lambda world: world.kept.update_parameters(world.model), "AveragedModel", "ema="),
        (World, copy.deepcopy, average, r"another module \(Sequential\)", "JointOptimizer"),
        (World, lambda model: dict(copy.deepcopy(model.state_dict())), average_tensors, "copy of the weights", "ema="),
        (World, hold_target, lambda world: world.model.target.add_(1), "changes buffers of", "before the batch"),
        (World, None, slow_down, "sets the optimizer's numbers", "batch.step"),
        (World, lambda _: -1, wait, "sets the optimizer's numbers .* or by what it keeps", "batch.step"),
        (Uses, lambda model: 0, count, "the loss of the same records is .* instead of", "batch.step or job.steps"),
        (Uses, lambda _: torch.zeros(()), lambda world: world.kept.copy_(world.inputs.mean()), "instead of", "buffer"),
    ], 3, pytest.mark.jobs),
    ids=["clamp", "swa", "second model", "tensors", "buffers", "rate", "plateau", "counter", "tensor"],
)  # fmt: skip
def test_what_a_worker_that_joins_would_not_have_is_refused_before_the_first_step(make, keep, after, why, act):
    world = make()
    world.kept = keep(world.model) if keep else None
    with pytest.raises(UsageError, match=why) as refused:
        world.train(after)
    assert (world.applied, act in refused.value.hint) == (0, True)


def average_flat(world: World) -> None:
    flat = nn.utils.parameters_to_vector(world.model.parameters()).detach()
    world.kept = flat if world.kept is None else 0.9 * world.kept + 0.1 * flat


def average_arrays(world: World) -> None:
    now = {name: value.detach().numpy().copy() for name, value in world.model.named_parameters()}
    world.kept = now if world.kept is None else {name: 0.9 * world.kept[name] + 0.1 * now[name] for name in now}


def make_average(world: World) -> None:
    world.kept = world.kept or AveragedModel(world.model)
    world.kept.update_parameters(world.model)


def wait(world: World) -> None:
    """As a callback that lowers the rate after some steps without a better loss."""
    world.kept = (world.kept or 0) + 1
    if world.kept > 30:
        world.advance.param_groups[0]["lr"] = 0.01


class Seen(World):
    """Sets its rate by a count of the records that it has seen, of which the trial alone has more than the bound."""

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self.kept = (self.kept or 0) + len(batch.records)
        self.advance.param_groups[0]["lr"] = 0.05 if self.kept < 30 else 0.01
        return super().loss(outputs, batch)


def step_other(world: World) -> None:
    assert world.beside.grad is not None
    with torch.no_grad():
        world.beside -= 0.1 * world.beside.grad
    world.beside.grad = None


def remember_later(world: World) -> None:
    world.kept = world.kept or [1.0] * 4
    if world.step > 3:
        world.kept[0] += 0.5


class Weighs(World):
    """Its loss has a tensor that the model does not have, and weights that the loop keeps; an average moves in it."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = torch.ones(1, dtype=torch.float64, requires_grad=True)
        self.step, self.average = 0, None

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self.step = batch.step
        if self.kept == "moves":
            now = {name: value.detach().clone() for name, value in self.model.named_parameters()}
            self.average = now if self.average is None else {
                name: 0.9 * self.average[name] + 0.1 * now[name] for name in now
            }  # fmt: skip
        weight = self.kept[0] if isinstance(self.kept, list) else 1.0
        return super().loss(weight * outputs * self.beside, batch)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("make", "keep", "after", "why"),
    few([
        (World, None, average_flat, "loop changes the loop's self.kept, an average or copy of the weights"),
        (World, None, average_arrays, "loop changes the loop's self.kept, an average or copy of the weights"),
        (World, None, make_average, r"another module \(AveragedModel\)"),
        (World, None, wait, r"sets the optimizer's numbers \(a learning rate\) by the loop's self.kept"),
        (Seen, 0, lambda _: None, r"sets the optimizer's numbers \(a learning rate\) by the loop's self.kept"),
        (Weighs, None, step_other, r"changes a tensor of shape \[1\] that the loss trains"),
        (Weighs, None, remember_later, "the loss of the same records is .* instead of"),
        (Weighs, "moves", lambda _: None, r"before job.step\(loss\) the loop changes the loop's self.average"),
    ], 3, pytest.mark.jobs),
    ids=["flat", "arrays", "made later", "callback", "seen", "beside", "later", "in the body"],
)  # fmt: skip
def test_averages_of_any_form_and_what_follows_from_them_are_refused_before_the_first_step(make, keep, after, why):
    world = make()
    world.kept = keep
    with pytest.raises(UsageError, match=why):
        world.train(after, epochs=3)
    assert world.applied == 0


def test_a_module_without_shapes_somewhere_in_the_process_hides_nothing():
    lazy, empty = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    world = World()
    world.kept = AveragedModel(world.model)
    with pytest.raises(UsageError, match="AveragedModel"):
        world.train(lambda world: world.kept.update_parameters(world.model))
    assert lazy.weight is not None
    assert empty.weight.is_meta


@pytest.mark.jobs
def test_a_model_in_a_loop_can_be_copied_and_pickled_and_the_copy_computes_alone(tmp_path):
    copies = []

    def keep(world: World) -> None:
        copies[:] = [copy.deepcopy(world.model)]
        torch.save(world.model, tmp_path / "model.pt")

    world = World()
    world.train(keep)
    assert (len(copies), world.applied) == (1, 4)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    wanted = world.model.eval()(world.inputs)
    for one in (copies[-1], loaded):
        torch.testing.assert_close(one(world.inputs), wanted)
    with torch.no_grad():
        copies[-1][0].weight.zero_()
    torch.testing.assert_close(world.model(world.inputs), wanted)


@pytest.mark.jobs
def test_a_scheduler_that_the_job_does_not_have_is_refused_and_given_ones_train_with_their_parts():
    world = World()
    own = lr_scheduler.StepLR(world.advance, 100)
    with pytest.raises(UsageError, match="has a scheduler that was not given to the job"):
        world.train(lambda _: own.step())
    world = World()
    parts = [lr_scheduler.ConstantLR(world.advance, 0.5, 2), lr_scheduler.ExponentialLR(world.advance, 0.9)]
    given = lr_scheduler.SequentialLR(world.advance, parts, [2])
    world.train(lambda _: None, scheduler=given)
    assert world.applied == RECORDS // 12


@pytest.mark.jobs
def test_a_loop_that_keeps_its_best_weights_writes_files_evaluates_and_counts_trains_and_leaves_no_trace_of_the_trial(
    tmp_path,
):
    """What it keeps does not come back into the steps."""
    losses = []

    def look(world: World) -> None:
        world.kept = copy.deepcopy(world.model.state_dict())
        with torch.no_grad():
            losses.append(float(world.model.eval()(world.inputs).mean()))
        world.model.train()
        torch.save(world.kept, tmp_path / f"{world.applied}.pt")
        with (tmp_path / "losses.csv").open("a") as file:
            file.write(f"{losses[-1]}\n")

    world = World()
    world.train(look)
    assert len(losses) == world.applied == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt", "2.pt", "3.pt", "4.pt", "losses.csv"]
    assert (tmp_path / "losses.csv").read_text().count("\n") == 4
    assert max(abs(loss) for loss in losses) < 100, "no evaluation saw the trial's odd weights"


@pytest.mark.jobs
def test_parameters_that_are_thawed_or_added_later_end_the_job_before_that_step():
    for turn, why in ((True, "thaws parameters in step 2"), (False, "freezes parameters in step 2")):
        world = World()
        world.model[0].requires_grad_(not turn)
        with pytest.raises(UsageError, match=why):
            world.train(lambda world, turn=turn: world.model[0].requires_grad_(turn) if world.applied == 2 else None)
        assert world.applied == 2
    world = World()
    world.advance = torch.optim.SGD(world.model[2].parameters(), lr=0.05)
    group = {"params": list(world.model[0].parameters()), "lr": 0.01}
    with pytest.raises(UsageError, match="changes the parameter groups of the optimizer in step 2"):
        world.train(lambda world: world.advance.add_param_group(group) if world.applied == 2 else None)


@pytest.mark.jobs
def test_another_module_with_numbers_that_are_none_is_not_taken_for_changed():
    world = World()
    world.kept = nn.Linear(4, 1)
    nn.init.constant_(world.kept.weight, torch.nan)
    world.train(lambda world: None)
    assert world.applied == RECORDS // 12
    nn.init.constant_(world.kept.weight, torch.nan)
    with pytest.raises(UsageError, match=r"the loop changes another module \(Linear\)"):
        world.train(lambda world: world.kept.weight.data.fill_(float(world.applied)))


def warm_up(count: str) -> None:
    """A loop whose warmup is over after seven batches of any kind, by a count of its own."""
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    job, clock = Elastic(model, optimizer, data, global_batch=20, epochs=4), itertools.count(1)
    for number, batch in enumerate(job):
        now = {"enumerate": number + 1, "the step": batch.step + 1, "the job": job.steps + 1}.get(count) or next(clock)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, now / 7)
        job.step(torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels))
    assert job.steps == 12


@pytest.mark.parametrize("count", ["enumerate", "an iterator"])
def test_a_warmup_by_a_count_of_the_loop_is_refused_though_it_would_be_over_at_late_steps(count):
    """The survivors of a death repeat a batch, and a worker that joins begins to count."""
    with pytest.raises(UsageError, match="by what it counts or keeps itself: after another batch they are"):
        warm_up(count)


@pytest.mark.jobs
@pytest.mark.parametrize("count", few(["the step", "the job"], 1, pytest.mark.jobs))
def test_a_warmup_by_the_step_trains(count):
    warm_up(count)


def test_an_iterator_that_counts_is_also_tried_as_it_was_before_the_first_batch():
    clock, held = itertools.count(3), []
    first = kept._keep(clock)
    for _ in range(5):
        next(clock)
    with kept._begin_again(clock, first, held.append):
        assert next(held[0]) == 3
    assert held[1:] == [clock]
    assert kept._keep(itertools.count(0.5)) is None


def add_later(use: Callable[[int, Any], bool], *, epochs: int = 4) -> None:
    """A loop that adds to its loss as `use` says of the number of its batch and of the batch."""
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Elastic(model, optimizer, TensorDataset(inputs, (inputs[:, 0] > 0).long()), global_batch=20, epochs=epochs)
    for number, batch in enumerate(job):
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
        job.step(loss + 0.1 * model.weight.abs().sum() if use(number, batch) else loss)
    assert job.steps == 12


@pytest.mark.parametrize(
    ("use", "why"),
    few(
        [
            (
                lambda number, _: number > 1000,
                r"the loss uses the number of enumerate\(...\), which each batch changes",
            ),
            (lambda number, _: number < 12, "it is not made of its parts"),
            (lambda number, _: number < 3, "once other batches were computed"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_loss_that_follows_from_the_number_of_its_batch_in_the_loop_is_refused(use, why):
    """A worker that joins begins with 0, and a step that is repeated has two numbers."""
    with pytest.raises(UsageError, match=why):
        add_later(use, epochs=1000)


@pytest.mark.jobs
def test_a_number_of_batches_that_is_only_logged_or_is_the_place_of_something_trains():
    add_later(lambda _, batch: batch.step > 6)
    names = [str(at) for at in range(200)]
    add_later(lambda number, batch: not names[number])


@pytest.mark.jobs
def test_a_loop_trains_whose_records_in_a_trial_are_as_many_as_the_models_parameters():
    """Its labels are no flat average of the weights, which have the same shape then."""
    inputs = torch.randn(60, FEW - 1, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(FEW - 1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Elastic(model, optimizer, TensorDataset(inputs, inputs.sum(1)), global_batch=6)
    for batch in job:
        labels = batch.labels
        job.step((model(batch.inputs)[:, 0] - labels).square().mean())
    assert job.steps == 10
