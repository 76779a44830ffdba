"""Loops that would depend on how a step is shared end before their first step, with the reason; loops that look like
them, and do not, train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

from trueline.errors import UsageError
from trueline.train.elastic import Elastic
from trueline.train.rehearsal.steps import many_batches
from trueline.train.step import features
from trueline.train.step.options import Options
from worlds.cases import few

pytestmark = pytest.mark.slow

RECORDS = 120


def records() -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    inputs = torch.randn(RECORDS, 4, generator=made, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


class World:
    """A loop of a user's own; `body(model, batch)` is its loss."""

    def __init__(self, data: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.advance = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.data, self.options, self.scheduler = data or records(), Options(**options), None
        self.applied = 0

    def train(
        self,
        body: Callable[[nn.Module, Any], Tensor] = lambda model, batch: mean(model(batch.inputs), batch.labels),
        after: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        job = Elastic(self.model, self.advance, self.data, global_batch=24, options=self.options,
                      scheduler=self.scheduler)  # fmt: skip
        for batch in job:
            self.applied += job.step(body(self.model, batch))
            after(self.model)


def mean(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs - labels) ** 2).mean()


def hook_all(world: World, hook: Any, name: str = "register_hook") -> None:
    for value in world.model.parameters():
        getattr(value, name)(hook)


def test_hooks_that_clip_gradients_are_refused_though_they_clip_nothing_at_first():
    world = World()
    hook_all(world, lambda grad: grad.clamp(-50, 50))
    with pytest.raises(UsageError, match=r"a hook or an autograd function of yours changes them"):
        world.train()


@pytest.mark.jobs
def test_hooks_that_mask_gradients_train_and_hooks_that_clip_see_whole_shards_when_these_are_named():
    world = World()
    hook_all(world, lambda grad: grad * (torch.arange(grad.shape[-1]) > 0))
    world.train()
    assert world.applied == 5
    world = World(reduction="mean", micro_batch=6)
    hook_all(world, lambda grad: grad.clamp(-50, 50))
    world.train()
    assert world.applied == 5


def test_hooks_that_run_after_a_gradient_was_accumulated_are_refused():
    world = World()
    hook_all(world, lambda value: None, "register_post_accumulate_grad_hook")
    with pytest.raises(UsageError, match="would see that of a part of a step"):
        world.train()


@pytest.mark.parametrize("place", ["body", "after"])
def test_clipping_in_the_loop_has_no_effect_and_is_refused(place):
    def clip(model: nn.Module, batch: Any = None) -> Tensor:
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        return torch.zeros(())

    world = World()
    usual = {"body": lambda model, batch: mean(model(batch.inputs), batch.labels) + clip(model)}
    with pytest.raises(UsageError, match="changes the parameters or their gradients itself") as caught:
        world.train(**(usual if place == "body" else {"after": clip}))
    assert "clip_norm" in str(caught.value.hint)
    assert world.applied == 0


@pytest.mark.jobs
def test_parameters_that_the_loop_clamps_after_a_step_end_the_job_before_the_next(monkeypatch):
    """A worker that joins would catch up without clamping."""

    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            for value in model.parameters():
                if str(world.applied) == "14":  # which the trial does not reach, and cannot read
                    value.clamp_(-0.3, 0.3)

    monkeypatch.setattr(many_batches, "MOST_S", 0.0)  # a job may have more steps than that tries
    world = World(TensorDataset(*(value.repeat(4, 1) for value in records().tensors)))
    with pytest.raises(UsageError, match="the loop changes parameters itself before step 14"):
        world.train(after=clamp)
    assert world.applied == 14


@pytest.mark.jobs
def test_parameters_that_the_loop_clamps_after_a_step_that_it_names_are_refused_before_the_first():
    def clamp(model: nn.Module) -> None:
        with torch.no_grad():
            for value in model.parameters():
                if world.applied == 14:
                    value.clamp_(-0.3, 0.3)

    world = World(TensorDataset(*(value.repeat(4, 1) for value in records().tensors)))
    with pytest.raises(UsageError, match="the loop changes parameters itself after a step that was applied"):
        world.train(after=clamp)
    assert world.applied == 0


class Reads(Dataset[tuple[Tensor, Tensor]]):
    """`read` makes the input of a record."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        self.read, self.records = read, records()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.records[at]
        return self.read(inputs), labels


@pytest.mark.jobs
@pytest.mark.parametrize(
    "made_of",
    [
        lambda world, x: x + world.model(x).detach(),
        lambda world, x: x * (1 + world.advance.param_groups[0]["lr"]),
        lambda world, x: x.abs() if world.model[0].weight[0, 0] > 0 else x,
    ],
    ids=["weights", "rate", "sign of a weight"],
)
def test_records_that_are_made_of_what_training_changes_are_refused_before_the_first_step(made_of):
    """A worker reads ahead, before the update, and once more after a join."""
    world = World()
    world.data = Reads(lambda x: made_of(world, x))
    with pytest.raises(UsageError, match="the dataset, or what puts its records together, reads the model's weights"):
        world.train()
    assert world.applied == 0


@pytest.mark.jobs
def test_records_that_a_fixed_part_of_the_model_makes_are_trained():
    world = World()
    fixed = world.model[0].requires_grad_(False)
    world.data = Reads(lambda x: x + fixed(x).mean().detach())
    world.train()
    assert world.applied == RECORDS // 24


def test_a_small_part_of_a_loss_in_double_precision_that_is_no_mean_is_found():
    def penalized(model: nn.Module, batch: Any) -> Tensor:
        size = sum((value**2).sum() for value in model.parameters())
        return ((model(batch.inputs) - batch.labels) ** 2).sum() + 1e-6 * size

    with pytest.raises(UsageError, match=r"as a sum it is [\de.-]+% off"):
        World().train(penalized)


@pytest.mark.jobs
def test_a_penalty_of_the_weights_beside_a_sum_is_found_in_single_precision_however_small_it_is():
    """Each worker would add it: 1e-5 of the gradient, and less than what rounding may be elsewhere."""

    def penalized(model: nn.Module, batch: Any) -> Tensor:
        size = sum((value**2).sum() for value in model.parameters())
        return ((model(batch.inputs.float()) - batch.labels.float()) ** 2).sum() + factor * size

    for factor in (0.0, 1e-3):
        world = World()
        world.model.float()
        if factor:
            with pytest.raises(UsageError, match=r"as a sum it is [\de.-]+% off"):
                world.train(penalized)
        else:
            world.train(penalized)
        assert world.applied == (0 if factor else 5)


@pytest.mark.jobs
def test_steps_of_a_loop_in_half_precision_are_cut_into_shards_unless_a_setting_says_that_it_rounds():
    sizes: list[int] = []

    def rounded(model: nn.Module, batch: Any) -> Tensor:
        sizes.extend([] if batch.trial else [len(batch.records)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(batch.inputs.float())
        return mean(outputs.float(), batch.labels.float())

    for precision, expected in (("fp32", [4] * 30), ("bf16", [24] * 5)):
        sizes.clear()
        world = World(precision=precision)
        world.model.float()
        world.train(rounded)
        assert (world.applied, sizes) == (5, expected)


@pytest.mark.jobs
def test_gradient_checkpointing_of_the_whole_model_trains():
    world = World()
    world.train(lambda model, batch: mean(checkpoint(model, batch.inputs, use_reentrant=False), batch.labels))
    assert world.applied == 5


def test_a_mask_among_the_inputs_that_few_records_have_is_seen_to_be_what_the_mean_divides_by(monkeypatch):
    """Its labels do not show it: of 120 records 5 have a mask."""
    monkeypatch.setattr(features, "LOOK_S", 600.0)

    def masked(model: nn.Module, batch: Any) -> Tensor:
        weights = batch.inputs["mask"]
        return (((model(batch.inputs["x"]) - batch.labels) ** 2) * weights).sum() / weights.sum()

    mask = torch.ones(RECORDS, 3).double()
    mask[61:66, 1:] = 0
    data = [({"x": inputs, "mask": mask[at]}, labels) for at, (inputs, labels) in enumerate(records())]
    with pytest.raises(UsageError, match="is not made of its parts"):
        World(data).train(masked)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "order", few([lambda n: torch.randperm(n), lambda n: torch.rand(n).argsort()], 1, pytest.mark.jobs)
)
def test_a_loop_that_mixes_the_records_of_a_batch_at_random_needs_whole_shards(order):
    def mixed(model: nn.Module, batch: Any) -> Tensor:
        other = order(len(batch.inputs))
        inputs, labels = (0.3 * value + 0.7 * value[other] for value in (batch.inputs, batch.labels))
        return mean(model(inputs), labels)

    with pytest.raises(UsageError, match="is not made of its parts"):
        World().train(mixed)
    world = World(reduction="mean", micro_batch=12)
    world.train(mixed)
    assert world.applied == 5


@pytest.mark.jobs
def test_a_collate_function_that_mixes_records_is_refused_and_one_that_draws_for_each_trains():
    """Where reading draws each record is read alone, so a mixed batch would be one record mixed with itself."""

    def mix(items: list[Any]) -> Any:
        inputs, labels = default_collate(items)
        other = torch.randperm(len(inputs))
        return 0.3 * inputs + 0.7 * inputs[other], 0.3 * labels + 0.7 * labels[other]

    def blur(items: list[Any]) -> Any:
        inputs, labels = default_collate(items)
        return inputs + 0.1 * torch.randn_like(inputs), labels

    with pytest.raises(UsageError, match="draws random numbers and mixes records"):
        World(DataLoader(records(), collate_fn=mix)).train()
    world = World(DataLoader(records(), collate_fn=blur))
    world.train()
    assert world.applied == 5


def test_a_data_set_that_mixes_the_records_of_a_batch_is_refused():
    class Mixes(Dataset[Any]):
        def __len__(self) -> int:
            return RECORDS

        def __getitems__(self, indices: list[int]) -> list[Any]:
            others = [indices[int(at)] for at in torch.randperm(len(indices))]
            data = records()
            return [(data[one][0] + data[other][0], data[one][1]) for one, other in zip(indices, others, strict=True)]

    with pytest.raises(UsageError, match="reading draws random numbers and mixes records") as refused:
        World(Mixes()).train()
    assert "micro_batch" in str(refused.value.hint)


@pytest.mark.jobs
def test_records_of_different_lengths_that_draw_are_padded_together_and_do_not_depend_on_their_batch():
    class Uneven(Dataset[Any]):
        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> Any:
            inputs, labels = records()[index]
            return inputs.repeat(1 + index % 3, 1) + 0.1 * torch.randn(1 + index % 3, 4, dtype=torch.float64), labels

    def pad(items: list[Any]) -> Any:
        values, labels = zip(*items, strict=True)
        return (
            nn.utils.rnn.pad_sequence(list(values), batch_first=True),
            torch.tensor([*map(len, values)]),
        ), torch.stack(labels)

    def summed(model: nn.Module, batch: Any) -> Tensor:
        values, lengths = batch.inputs
        inside = torch.arange(values.shape[1]) < lengths[:, None]
        outputs = (model(values)[..., 0] * inside).sum(dim=1, keepdim=True) / lengths[:, None]
        if not batch.trial:
            seen.update(
                {int(one): row[inside[at]] for at, (one, row) in enumerate(zip(batch.records, values, strict=True))}
            )
        return mean(outputs, batch.labels)

    found = []
    for shard in (24, 5):
        seen: dict[int, Tensor] = {}
        world = World(DataLoader(Uneven(), collate_fn=pad), micro_batch=shard)
        world.train(summed)
        assert world.applied == 5
        found.append(seen)
    assert all(torch.equal(value, found[1][one]) for one, value in found[0].items())


@pytest.mark.jobs
def test_a_sampler_of_a_data_loader_that_the_job_would_ignore_is_refused():
    sampler = WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    with pytest.raises(UsageError, match="has a WeightedRandomSampler") as caught:
        World(DataLoader(records(), sampler=sampler)).train()
    assert "sample_by_weight" in str(caught.value.hint)
    world = World(DataLoader(records(), shuffle=True, drop_last=True, batch_size=7))
    world.train()
    assert world.applied == 5


def test_a_plateau_schedule_without_evaluations_is_refused():
    world = World()
    world.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(world.advance)
    with pytest.raises(UsageError, match="follows evaluations while training, and this job has none"):
        world.train()


def test_a_model_whose_parameters_have_no_shape_yet_is_refused():
    world = World()
    world.model = nn.Sequential(nn.LazyLinear(1))
    world.advance = torch.optim.SGD(world.model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="have no shape yet"):
        world.train()


class Gated(nn.Module):
    """A part that compares records stands behind a gate or a head that begins at nothing."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.usual, self.other = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
        self.gate = nn.Parameter(torch.full((1,), gate, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        other = self.other(inputs)
        compared: Tensor = self.usual(inputs) + self.gate * other / other.norm(dim=0)
        return compared


def spread(model: nn.Module, batch: Any) -> Tensor:
    """A penalty for outputs that are alike, whose gradient is zero where they are all equal."""
    outputs = model(batch.inputs)
    spread = (outputs.var(dim=0, unbiased=False) + 1e-4).sqrt()
    return (outputs.mean() - 1) ** 2 + mean(outputs, batch.labels) + (1 - spread).relu().mean()


@pytest.mark.parametrize("kind", few(["gate", "small gate", "head"], 1, pytest.mark.jobs))
def test_what_compares_records_is_found_behind_parameters_that_begin_as_constants(kind):
    world = World()
    if kind == "head":
        nn.init.zeros_(world.model[2].weight)
        nn.init.zeros_(world.model[2].bias)
    else:
        world.model = Gated(0.0 if kind == "gate" else 1e-9)
        world.advance = torch.optim.SGD(world.model.parameters(), lr=0.05)
    before = [value.tolist() for value in world.model.parameters()]
    name = r"2\.weight" if kind == "head" else "gate"
    with pytest.raises(UsageError, match=rf"is not made of its parts|begin as constants \(.*{name}.*have other values"):
        world.train(*([spread] if kind == "head" else []))
    assert world.applied == 0
    assert [value.tolist() for value in world.model.parameters()] == before


@pytest.mark.jobs
def test_gates_that_begin_at_zero_train_where_nothing_compares_records_and_keep_their_values():
    world = World()
    nn.init.zeros_(world.model[2].weight)
    seen = list[float]()

    def note(model: nn.Module, batch: Any) -> Tensor:
        seen.append(float(model[2].weight.detach().abs().max()))
        return mean(model(batch.inputs), batch.labels)

    world.train(note)
    assert world.applied == 5
    assert seen[0] == 0.0


class Read(Dataset[Any]):
    """Records that `change` makes of a batch."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.inputs, self.labels = records().tensors
        self.change = change

    def __len__(self) -> int:
        return RECORDS

    def __getitems__(self, ids: list[int]) -> list[Any]:
        return list(zip(self.change(self.inputs[ids]), self.labels[ids], strict=True))

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


@pytest.mark.jobs
def test_reading_that_fills_a_gap_by_the_mean_of_its_batch_is_refused_though_few_records_have_one(monkeypatch):
    monkeypatch.setattr(features, "LOOK_S", 600.0)

    def fill(inputs: Tensor) -> Tensor:
        return torch.where(inputs[:, :1] > 2.1, inputs.mean(dim=0), inputs)

    assert 0 < int((records().tensors[0][:, 0] > 2.1).sum()) < 5
    with pytest.raises(UsageError, match="reading mixes records: what it makes of record"):
        World(Read(fill)).train()
    world = World(Read(lambda inputs: inputs.clamp(-2, 2)))
    world.train()
    assert world.applied == 5


@pytest.mark.jobs
def test_a_collate_function_that_sorts_and_pads_its_batch_trains():
    def sort(items: list[Any]) -> Any:
        items = sorted(items, key=lambda item: float(item[0][0]))
        return default_collate(items)

    world = World(DataLoader(records(), collate_fn=sort))
    world.train()
    assert world.applied == 5


class Pair(NamedTuple):
    noisy: Tensor
    clean: Tensor


@pytest.mark.jobs
def test_records_that_are_named_tuples_and_draw_train():
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> Any:
            inputs, labels = records()[index]
            return Pair(inputs + 0.1 * torch.randn_like(inputs), inputs), labels

    world = World(Noisy())
    world.train(lambda model, batch: mean(model(batch.inputs.noisy + batch.inputs.clean), batch.labels))
    assert world.applied == 5


@pytest.mark.jobs
@pytest.mark.parametrize("bitwise", [False, True])
def test_gradients_of_a_sparse_embedding_are_measured_and_summed(bitwise):
    world = World(TensorDataset(torch.arange(RECORDS) % 30, torch.ones(RECORDS, 1).double()), bitwise=bitwise)
    world.model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, 1)).double()
    world.advance = torch.optim.SGD(world.model.parameters(), lr=0.1)
    world.train()
    assert world.applied == 5
    assert bool(world.model[0].weight.isfinite().all())
