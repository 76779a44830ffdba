"""Promises of the optimizer's side of a step: what is done in which order, and what an overflow takes back."""

import copy

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trueline.errors import TrainError, UsageError
from trueline.train.step.optimizer_step import OptimizerStep, check_length, check_optimizer
from trueline.train.step.options import Options


def one(value=1.0):
    """A model of one parameter."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def advance_of(model=None, *, lr=1.0, momentum=0.0, scheduler=None, **options):
    model = model or one()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    made = scheduler(optimizer) if scheduler else None
    return OptimizerStep(model, optimizer, made, Options(**options))


def step(advance, gradient=1.0, **how):
    for parameter in advance.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    return advance.apply(**how)


def weight(advance):
    return advance.model.weight.item()


def test_gradients_are_clipped_to_the_norm_of_all_together_and_small_ones_left_alone():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.0)
    torch.nn.init.constant_(model.bias, 0.0)
    advance = advance_of(model, clip_norm=1.0)
    model.weight.grad, model.bias.grad = torch.full((1, 1), 3.0), torch.full((1,), 4.0)
    advance.apply()
    assert (model.weight.item(), model.bias.item()) == (pytest.approx(-0.6, 1e-4), pytest.approx(-0.8, 1e-4))
    small = advance_of(clip_norm=1.0)
    step(small, 0.25)
    assert weight(small) == 0.75


@pytest.mark.parametrize("gradient", [float("nan"), float("inf")])
def test_a_norm_that_is_to_be_clipped_and_is_no_number_ends_the_training_before_the_step(gradient):
    advance = advance_of(clip_norm=1.0)
    with pytest.raises(TrainError, match="not finite, though the loss is"):
        step(advance, gradient)
    assert weight(advance) == 1.0


def test_a_schedule_advances_once_a_step_and_after_it():
    advance = advance_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    weights = []
    for _ in range(3):
        step(advance)
        weights.append(weight(advance))
    assert weights == [0.0, -0.5, -0.75]


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def test_a_schedule_that_waits_for_plateaus_hears_of_evaluations_and_of_nothing_else():
    advance = advance_of(scheduler=plateau)
    rates = []
    for measured in (1.0, None, None, 2.0, None):
        step(advance, measured=measured)
        rates.append(advance.optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_an_average_forgets_its_beginning_faster_in_the_first_steps():
    advance = advance_of(ema=0.9)
    average = 1.0
    for steps in (0, 1, 2, 500):
        step(advance, steps=steps)
        decay = min(0.9, (1 + steps) / (10 + steps))
        average = decay * average + (1 - decay) * weight(advance)
        assert advance.state()["ema"]["weight"].item() == pytest.approx(average, 1e-6)


def test_the_averaged_parameters_are_there_within_the_block_alone():
    advance = advance_of(ema=0.5)
    step(advance)
    live, average = weight(advance), advance.state()["ema"]["weight"].item()
    with advance.use_averages():
        assert weight(advance) == average != live
    assert weight(advance) == live
    with pytest.raises(KeyError), advance.use_averages():
        raise KeyError
    assert weight(advance) == live
    plain = advance_of()
    with plain.use_averages():
        assert weight(plain) == 1.0


def test_a_state_goes_on_elsewhere_as_if_it_had_stayed():
    def made():
        schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # noqa: E731
        return advance_of(momentum=0.9, scheduler=schedule, ema=0.9, precision="fp16")

    stays, travels = made(), made()
    stays.scaler.update(new_scale=64.0)
    for steps in range(3):
        step(stays, 64.0, steps=steps)
    travels.model.load_state_dict(stays.model.state_dict())
    travels.restore(copy.deepcopy(stays.state()))  # its tensors are the live ones
    for advance in (stays, travels):
        for steps in range(3, 6):
            step(advance, 64.0, steps=steps)
    assert weight(travels) == weight(stays)
    assert travels.optimizer.param_groups[0]["lr"] == stays.optimizer.param_groups[0]["lr"] == 0.125
    assert travels.scaler.state_dict() == stays.scaler.state_dict()
    assert torch.equal(travels.state()["ema"]["weight"], stays.state()["ema"]["weight"])
    assert advance_of().state() == {**advance_of().state(), "scheduler": None, "scaler": None, "ema": None}


def scaled_step(**how):
    advance = advance_of(precision="fp16", **how)
    advance.scaler.update(new_scale=64.0)
    return advance


def test_a_step_that_overflows_changes_nothing_but_the_scale():
    advance = scaled_step(
        momentum=0.9, ema=0.5, scheduler=lambda one: torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5)
    )
    assert not step(advance, float("inf"))
    assert (weight(advance), advance.optimizer.param_groups[0]["lr"], advance.scaler.get_scale()) == (1.0, 1.0, 32.0)
    assert advance.state()["ema"]["weight"].item() == 1.0
    assert step(advance, 32.0)
    assert (weight(advance), advance.scaler.get_scale()) == (0.0, 32.0)


def test_an_overflow_takes_back_what_a_schedule_heard_with_the_step():
    advance = scaled_step(scheduler=plateau)
    step(advance, 64.0, measured=1.0)
    before = advance.scheduler.state_dict()
    assert not step(advance, float("inf"), measured=2.0)
    assert advance.optimizer.param_groups[0]["lr"] == 1.0
    assert advance.scheduler.state_dict() == before
    assert step(advance, 32.0, measured=2.0)
    assert advance.optimizer.param_groups[0]["lr"] == 0.5


def test_scaled_gradients_are_clipped_by_their_true_norm():
    advance = scaled_step(clip_norm=1.0)
    step(advance, 64.0 * 0.5)
    assert weight(advance) == 0.5, "a norm of a half is within it"


def test_gradients_that_overflow_at_every_scale_end_the_training():
    advance = scaled_step()
    advance.scaler.update(new_scale=2.0**-19)
    assert not step(advance, float("inf"))
    with pytest.raises(TrainError, match="overflow in fp16 at a scale of"):
        step(advance, float("inf"))


def test_the_loss_is_scaled_where_the_precision_is_fp16_and_nowhere_else():
    assert scaled_step().scale_loss(torch.ones(())).item() == 64.0
    assert advance_of().scale_loss(torch.ones(())).item() == 1.0


def test_gradients_are_dropped_also_where_the_optimizer_does_not_have_the_parameter():
    model = torch.nn.Linear(1, 1)
    advance = OptimizerStep(model, torch.optim.SGD([model.weight], lr=1.0), None, Options())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    advance.zero_grad()
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_an_optimizer_has_parameters_of_the_model_only():
    model, other = one(), torch.nn.Parameter(torch.ones(3))
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UsageError, match=r"has 1 parameters that are not of the model \(the first of shape \[3\]\)"):
        check_optimizer(model, torch.optim.SGD([*model.parameters(), other], lr=1.0))


@pytest.mark.parametrize("chained", [False, True])
def test_a_schedule_that_ends_before_the_job_is_refused_before_the_first_step(chained):
    advance = advance_of()
    schedule = torch.optim.lr_scheduler.OneCycleLR(advance.optimizer, max_lr=1.0, total_steps=10, cycle_momentum=False)
    if chained:
        schedule = torch.optim.lr_scheduler.ChainedScheduler([schedule])
    check_length(schedule, 10)
    for _ in range(10):
        advance.optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match="Tried to step 11 times"):
        schedule.step()
    with pytest.raises(UsageError, match="the OneCycleLR is for 10 steps, and this job has 11"):
        check_length(schedule, 11)


@pytest.mark.parametrize("first", [False, True])
def test_a_schedule_in_a_row_of_several_has_the_steps_until_the_next_one(first):
    advance = advance_of()
    short = torch.optim.lr_scheduler.OneCycleLR(advance.optimizer, max_lr=1.0, total_steps=6, cycle_momentum=False)
    flat = torch.optim.lr_scheduler.ConstantLR(advance.optimizer)
    row = [short, flat] if first else [flat, short]

    def in_a_row(milestone):
        return torch.optim.lr_scheduler.SequentialLR(advance.optimizer, row, [milestone])

    fits, steps = in_a_row(7 if first else 4), 40 if first else 10
    check_length(fits, steps)
    for _ in range(steps):
        advance.optimizer.step()
        fits.step()
    with pytest.raises(UsageError, match="the OneCycleLR is for 6 steps, and this job has 7 for it"):
        check_length(in_a_row(8) if first else fits, steps + 1)


def test_what_reads_the_state_is_told_before_it_changes():
    advance, seen = advance_of(ema=0.9), []
    advance.before_change = lambda: seen.append(weight(advance))
    assert step(advance)
    assert (seen, weight(advance)) == ([1.0], 0.0)
    with advance.use_averages():
        seen.append("averages")
    assert seen == [1.0, 0.0, "averages"]


def test_memory_is_stable_between_steps_for_parameters_and_moments_but_not_for_buffers_and_what_a_forward_scales():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, max_norm=1.0), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    advance = advance_of(model, momentum=0.9)
    step(advance)
    stable = advance.stable_memory()
    assert all(value.data_ptr() in stable for value in (*model[1].parameters(), *model[2].parameters()))
    assert model[0].weight.data_ptr() not in stable
    assert all(buffer.data_ptr() not in stable for buffer in model.buffers())
    moments = [state["momentum_buffer"] for state in advance.optimizer.state.values()]
    assert all(moment.data_ptr() in stable for moment in moments)


def sparse_and_dense() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 2, sparse=True), torch.nn.Linear(2, 1))
    model(torch.tensor([1, 1, 4])).square().sum().backward()
    return model


@pytest.mark.parametrize(
    ("kind", "given", "hint"),
    [
        ("SparseAdam", "sparse for 0.weight and dense for 1.weight and 1.bias", "JointOptimizer"),
        ("Adam", "sparse for 0.weight and dense for 1.weight and 1.bias", "JointOptimizer"),
    ],
)
def test_an_optimizer_that_does_not_take_the_gradients_is_refused_with_their_names_and_changes_nothing(
    kind, given, hint
):
    model = sparse_and_dense()
    before = copy.deepcopy(model.state_dict())
    advance = OptimizerStep(model, getattr(torch.optim, kind)(model.parameters()), None, Options())
    with pytest.raises(UsageError, match=f"{kind} does not take the gradients of step 0") as refused:
        advance.apply()
    assert given in refused.value.message.replace(",", " and")
    assert hint in refused.value.hint
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_error_of_an_optimizer_of_the_users_own_is_left_as_it_is():
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no luck")

    model = one()
    with pytest.raises(RuntimeError, match="no luck"):
        step(OptimizerStep(model, Mine(model.parameters(), lr=1.0), None, Options()))


def test_sparse_gradients_are_clipped_as_dense_ones_are():
    sparse, dense = sparse_and_dense(), sparse_and_dense()
    dense[0].weight.grad = dense[0].weight.grad.to_dense()
    for model in (sparse, dense):
        advance_of(model, lr=0.5, clip_norm=0.1).apply()
    for mine, its in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_an_optimizer_is_hooked_and_labelled_for_profilers_as_where_its_step_is_called():
    first, second, seen = advance_of(), advance_of(), []
    first.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    second.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    step(first)
    step(second)
    assert seen == ["before", "after"]
    with torch.profiler.profile() as profiler:
        step(advance_of())
    assert "Optimizer.step#SGD.step" in {event.name for event in profiler.events()}
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("any"))
    try:
        step(advance_of())
    finally:
        handle.remove()
    assert seen[2:] == ["any"]


def test_what_an_optimizer_draws_follows_from_the_step_whether_it_was_seeded_ahead_or_not():
    class Drawing(torch.optim.SGD):
        def step(self, closure=None):
            drawn.append(torch.rand(()).item())

    drawn = []
    model = one()
    advance = OptimizerStep(model, Drawing(model.parameters(), lr=1.0), None, Options(), seed=7)
    for steps, ahead in ((3, False), (3, True), (4, True), (4, False)):
        advance.begin()
        if ahead:
            advance.seed(steps)
        else:
            torch.rand(steps)
        step(advance, steps=steps)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    advance.seed(5)
    advance.begin()  # that step was given up, and others drew since
    torch.rand(1)
    step(advance, steps=5)
    advance.begin()
    step(advance, steps=5)
    assert drawn[4] == drawn[5]
