"""The blanks of a derived recipe. Its file calls `define`, in every worker of the job that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from trueline.checkpoint.checkpoint import load_model
from trueline.compress.derive import attention_heads, channels, experts, layers, masks, qat
from trueline.compress.derive.features import FeatureWatch
from trueline.compress.derive.plan import DerivePlan
from trueline.compress.derive.taught import read_variances
from trueline.data.source import Mode
from trueline.errors import CaptureError
from trueline.recipe.contract import Recipe
from trueline.recipe.load import load_recipe
from trueline.recipe.settings import TrainingSettings
from trueline.settings import declared_settings
from trueline.storage.location import parse_location

if TYPE_CHECKING:
    from trueline.data.source import Source

_TAKEN_OVER = (
    "loss", "feed", "columns", "augment", "tokenizer", "weight", "metrics", "scheduler", "examples", "dynamic_shapes",
    "preprocess", "postprocess",
)  # fmt: skip
_APPLIED = ("feed", "columns", "augment", "tokenizer")
"""What the Source of a taught recipe has done already."""
_RECORDS, _BATCH = 256, 32
"""Training records by which experts are chosen, and how many at a time."""


def define(given: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The names of the recipe that the plan `given`, which stands in `file`, describes."""
    plan = msgspec.convert(given, DerivePlan)
    near = Path(file).parent / plan.recipe
    base = load_recipe(near if near.exists() else plan.recipe)
    taught = plan.kind == "taught"
    kept = [name for name in _TAKEN_OVER if not (taught and name in _APPLIED)]
    found = {name: value for name in kept if (value := getattr(base, name)) is not None}
    if base.missing != "refuse":
        found["missing"] = base.missing
    found |= {one.name: getattr(base.defaults, one.name) for one in declared_settings(TrainingSettings)
              if one.setting.recipe and getattr(base.defaults, one.name) != one.default}  # fmt: skip
    found |= {"name": base.name, "epochs": plan.epochs}

    watch = FeatureWatch(plan.matches, read_variances(plan.answers) if plan.matches else ())

    schedule = masks.MaskSchedule(plan.amounts, plan.rounds, plan.steps) if plan.kind == "masks" else None

    def model() -> torch.nn.Module:
        if schedule is not None:
            return schedule.attach(load_base(base, plan))
        return watch.attach(make_student(base, plan) if taught else derive_model(base, plan))

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = base.optimizer(params)
        for group in made.param_groups:
            group["lr"] *= plan.rate
        return made if schedule is None else schedule.follow(made)

    found |= {"model": model, "optimizer": optimizer, "dataset": base.records}
    if taught:
        found |= _teach(base, plan, watch)
    return found


def make_student(base: Recipe, plan: DerivePlan) -> torch.nn.Module:
    """The model that a plan `taught` trains: the student recipe's own, or the teacher's without some layers."""
    return derive_model(base, plan) if plan.layers else base.make_model()


def derive_model(base: Recipe, plan: DerivePlan) -> torch.nn.Module:
    """The base's trained model, changed as the plan says: masks, fewer experts, heads, channels or layers, or layers
    that round."""
    model = load_base(base, plan)
    if plan.layers:
        return layers.drop_layers(model, plan.layers)
    if plan.kind == "qat":
        return qat.prepare_qat(model, plan.ranges)
    if plan.kind == "masks":
        return masks.mask(model, plan.amounts)
    example = read_example(base)
    model = experts.remove_experts(model, example, plan.experts)
    model = attention_heads.remove_heads(model, example, plan.heads)
    share = plan.amounts.get("channels")
    return channels.remove_channels(model, example, share) if share else model


def load_base(base: Recipe, plan: DerivePlan) -> torch.nn.Module:
    """The base's model with the parameters of the plan's checkpoint."""
    return load_model(base, parse_location(plan.checkpoint) if plan.checkpoint else None)


def choose_parts(base: Recipe, plan: DerivePlan) -> DerivePlan:
    """The plan with the heads and experts that stay, chosen here once: in each worker they might be others. Raises
    CaptureError where none can be removed safely."""
    if not plan.amounts.keys() & {"heads", "experts"}:
        return plan
    model, example = load_base(base, plan), read_example(base)
    found: dict[str, dict[str, list[int]]] = {}
    if "experts" in plan.amounts:
        found["experts"] = experts.choose_experts(model, read_examples(base), plan.amounts["experts"])
    if "heads" in plan.amounts:
        found["heads"] = attention_heads.choose_heads(model, example, plan.amounts["heads"])
    for name, kept in found.items():
        if not kept:
            raise CaptureError(
                f"no {name} of this model can be removed safely: in no block {plan.amounts[name]:.0%} are whole {name} "
                "without which it answers as if they were zero",
                hint="channels=0.3 removes channels between layers; linear=0.3 sets weights to zero",
            )
    return msgspec.structs.replace(plan, **found)


def read_example(recipe: Recipe) -> Any:
    """Inputs of two training records, or the recipe's own example."""
    import numpy as np

    if recipe.examples is not None:
        return recipe.examples()
    source: Source = recipe.source("training")
    return source.read(np.arange(2, dtype=np.int64) % source.num_records).inputs


def read_examples(recipe: Recipe) -> list[Any]:
    """Inputs of training records, some hundred in all; what is chosen by them is chosen once."""
    import numpy as np

    source: Source = recipe.source("training")
    picked = np.unique(np.linspace(0, source.num_records - 1, _RECORDS).astype(np.int64))
    return [source.read(picked[at : at + _BATCH]).inputs for at in range(0, len(picked), _BATCH)]


def _teach(base: Recipe, plan: DerivePlan, watch: FeatureWatch) -> dict[str, Any]:
    from trueline.compress.derive import taught

    def dataset(mode: Mode) -> Any:
        return taught.TaughtSource(base.source(mode), plan.answers) if mode == "training" else base.source(mode)

    distance = taught.find_distance(base, plan.distance) if plan.distance else None
    loss = taught.make_loss(base.loss, plan, watch, distance)
    return {"dataset": dataset, "loss": loss}
