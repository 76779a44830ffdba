"""Fewer experts of a mixture: those that the router weighs least on training records, with their rows of the router.

Experts are a list of equal modules, or parameters whose first index they are. The router is the matrix with a row for
each. Which one that is is proven: the smaller model answers as the whole one whose router never chooses the removed
experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trueline.compress.derive.attention_heads import answer_of, answers_alike
from trueline.errors import CaptureError

_COUNTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "experts_count")
_CHOSEN = ("top_k", "k", "num_experts_per_tok", "topk", "num_selected_experts")
_NEVER = -1e9
"""A router's number for an expert that is not to be chosen."""


class RouterWatch(TorchFunctionMode):
    """Sees what the router's matrix answers: adds up the share that each expert gets, and keeps `barred` ones from
    being chosen."""

    def __init__(self, weight: torch.Tensor, barred: Sequence[int] = ()) -> None:
        super().__init__()
        self._weight, self._barred = weight, list(barred)
        self.shares = torch.zeros(len(weight), dtype=torch.float64)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is functional.linear and len(args) > 1 and args[1] is self._weight:
            self.shares += found.detach().double().softmax(dim=-1).reshape(-1, len(self.shares)).mean(dim=0)
            if self._barred:
                found = found.index_fill(-1, torch.tensor(self._barred), _NEVER)
        return found


def choose_experts(model: nn.Module, examples: Sequence[Any], share: float) -> dict[str, list[int]]:
    """The experts that stay when each mixture loses the `share` that its router weighs least on `examples`, for the
    mixtures where that is proven. As many stay as a record chooses."""
    kept: dict[str, list[int]] = {}
    for name, container in model.named_modules():
        total = _count(container)
        if total < 2:
            continue
        for router in _list_routers(model, name, total):
            count = min(total - _count_chosen(model, name, router), int(total * share))
            if count < 1:
                break
            shares = _weigh(model, examples, router)
            stay = sorted(shares.argsort(descending=True)[: total - count].tolist())
            if _is_proven(model, examples[0], name, router, stay):
                kept[name] = stay
                break
    return kept


def remove_experts(model: nn.Module, example: Any, kept: Mapping[str, Sequence[int]]) -> nn.Module:
    """`model` without the experts that `kept` lacks. Raises CaptureError for a plan of another model."""
    for name, stay in kept.items():
        total = _count(dict(model.named_modules()).get(name))
        routers = [one for one in _list_routers(model, name, total) if _is_proven(model, example, name, one, stay)]
        if not routers:
            raise CaptureError(
                f"the plan removes experts of '{name}', and the model has no such mixture",
                hint="the recipe's model has changed: write the plan again",
            )
        _cut(model, name, routers[0], stay)
    return model


def _count(container: nn.Module | None) -> int:
    """How many experts `container` has; 0: it is none."""
    if isinstance(container, nn.ModuleList):
        has_weights = any(True for _ in container.parameters())
        return len(container) if len({type(one) for one in container}) == 1 and has_weights else 0
    if container is None:
        return 0
    sizes = {len(one) for one in container.parameters(recurse=False) if one.dim() == 3}
    return sizes.pop() if len(sizes) == 1 and any(getattr(container, one, None) in sizes for one in _COUNTS) else 0


def _list_routers(model: nn.Module, name: str, total: int) -> Iterator[str]:
    """Modules beside the experts whose matrix has a row for each."""
    parent = name.rpartition(".")[0]
    for one, module in model.get_submodule(parent).named_modules():
        full = f"{parent}.{one}".strip(".")
        weight = module._parameters.get("weight")
        if not full.startswith(f"{name}.") and weight is not None and weight.dim() == 2 and len(weight) == total:
            yield full


def _list_counting(model: nn.Module, name: str, router: str) -> list[nn.Module]:
    return [model.get_submodule(one) for one in dict.fromkeys((name.rpartition(".")[0], name, router))]


def _count_chosen(model: nn.Module, name: str, router: str) -> int:
    numbers = [getattr(module, one, None) for module in _list_counting(model, name, router) for one in _CHOSEN]
    return max((one for one in numbers if isinstance(one, int) and not isinstance(one, bool)), default=1)


def _weigh(model: nn.Module, examples: Sequence[Any], router: str) -> torch.Tensor:
    with RouterWatch(model.get_submodule(router).get_parameter("weight")) as watch:
        for example in examples:
            answer_of(model, example)
    shares: torch.Tensor = watch.shares
    return shares


def _is_proven(model: nn.Module, example: Any, name: str, router: str, stay: Sequence[int]) -> bool:
    """Whether the smaller model answers as the whole one whose router never chooses the others."""
    try:
        whole, smaller = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
        weight = whole.get_submodule(router).get_parameter("weight")
        with RouterWatch(weight, [at for at in range(len(weight)) if at not in stay]) as watch:
            want = answer_of(whole, example)
        _cut(smaller, name, router, stay)
        return bool(watch.shares.any()) and answers_alike(want, answer_of(smaller, example))
    except Exception:  # noqa: BLE001 - whatever a model does when its experts are none of these
        return False


def _cut(model: nn.Module, name: str, router: str, stay: Sequence[int]) -> None:
    container, total = model.get_submodule(name), _count(model.get_submodule(name))
    for module in _list_counting(model, name, router):
        for one in _COUNTS:
            if getattr(module, one, None) == total:
                setattr(module, one, len(stay))
    if isinstance(container, nn.ModuleList):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.ModuleList(container[at] for at in stay))
    else:
        _keep(container, [one for one, value in container._parameters.items() if value is not None], total, stay)
    gate = model.get_submodule(router)
    _keep(gate, ["weight", "bias"], total, stay)
    if isinstance(gate, nn.Linear):
        gate.out_features = len(stay)


def _keep(module: nn.Module, names: Sequence[str], total: int, stay: Sequence[int]) -> None:
    for name in names:
        value = module._parameters.get(name)
        if value is not None and len(value) == total:
            made = value.detach()[list(stay)].clone()
            setattr(module, name, nn.Parameter(made, requires_grad=value.requires_grad))
