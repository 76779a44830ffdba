"""Structured pruning: channels are removed, with all that depends on them. The model is physically smaller.

Torch-Pruning's dependency graph finds which layers have to change together (Fang et al., DepGraph, CVPR 2023). A group
is pruned only where that is safe: one that reaches into attention, a recurrent layer, a normalization over features or
an embedding is left alone, since head sizes and feature counts are written into the forward of most models. Of an
attention model so its feed-forward layers get smaller. A model that fails with all groups at once is pruned group by
group, and keeps those that it cannot be called without.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

from trueline.capture.model.arguments import as_arguments
from trueline.errors import CaptureError, first_line
from trueline.extras import naming_extras
from trueline.recipe.eager_mode import as_trained

_UNSAFE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.LayerNorm, nn.GroupNorm, nn.Embedding, nn.PReLU)
_ROOTS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "nhead", "n_head")


def remove_channels(model: nn.Module, example: Any, share: float) -> nn.Module:
    """`model` without the `share` of the channels of each group that weigh least; its outputs have the shapes that they
    had. Raises MissingPackage, CaptureError with the reason where nothing can be removed."""
    with naming_extras():
        import torch_pruning as pruning
    before, count = _shapes(model, example), _count(model)
    try:
        whole = copy.deepcopy(model)
        _prune_whole(pruning, whole, example, share)
        if _shapes(whole, example) == before and _count(whole) < count:
            return whole
        why = "without these channels the model's outputs have other shapes"
    except Exception as error:  # noqa: BLE001 - whatever the model does with fewer channels; each group is tried alone
        why = f"channels of this model cannot be removed: {first_line(error)}"
    found = _prune_groups(pruning, model, example, share)
    if _count(found) == count:
        raise CaptureError(f"no channel of this model can be removed safely: {why}", hint=_MASKS)
    return found


def _prune_whole(pruning: Any, model: nn.Module, example: Any, share: float) -> None:
    given = _list_inputs(example)
    with warnings.catch_warnings(), as_trained():
        warnings.simplefilter("ignore")
        graph = pruning.DependencyGraph().build_dependency(model, example_inputs=given)
        pruner = pruning.pruner.BasePruner(
            model, given, importance=pruning.importance.GroupMagnitudeImportance(p=2), pruning_ratio=share,
            ignored_layers=_find_kept(pruning, graph, model),
        )  # fmt: skip
        pruner.step()


def _prune_groups(pruning: Any, model: nn.Module, example: Any, share: float) -> nn.Module:
    """`model` without channels of those groups that it can be called without, tried one after the other."""
    before = _shapes(model, example)
    sizes = {name: one.weight.shape for name, one in model.named_modules() if isinstance(one, _ROOTS)}
    for name, size in sizes.items():
        if model.get_submodule(name).get_parameter("weight").shape[0] != size[0]:
            continue  # it went with a group before
        trial = copy.deepcopy(model)
        try:
            _prune_group(pruning, trial, trial.get_submodule(name), example, share)
            if _shapes(trial, example) == before:
                model = trial
        except Exception:  # noqa: BLE001 - this group stays as it is
            continue
    return model


def _prune_group(pruning: Any, model: nn.Module, root: nn.Module, example: Any, share: float) -> None:
    with warnings.catch_warnings(), as_trained():
        warnings.simplefilter("ignore")
        graph = pruning.DependencyGraph().build_dependency(model, example_inputs=_list_inputs(example))
        if any(root is one for one in _find_kept(pruning, graph, model)):
            return
        prune = graph.get_pruner_of_module(root)
        channels = prune.get_out_channels(root)
        whole = graph.get_pruning_group(root, prune.prune_out_channels, list(range(channels)))
        scores = pruning.importance.GroupMagnitudeImportance(p=2)(whole)
        least = scores.argsort()[: int(channels * share)].tolist()
        group = graph.get_pruning_group(root, prune.prune_out_channels, least)
        if least and len(scores) == channels and graph.check_pruning_group(group):
            group.prune()


_MASKS = "--prune conv=0.3,linear=0.3 sets weights to zero and keeps every shape"


def _list_inputs(example: Any) -> Any:
    arguments = as_arguments(example)
    return arguments.kwargs or arguments.args


def _count(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def _shapes(model: nn.Module, example: Any) -> list[torch.Size]:
    """Of the tensors that the model returns."""
    arguments = as_arguments(example)
    with torch.no_grad(), as_trained():
        found = model(*arguments.args, **arguments.kwargs)
    return [leaf.shape for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _find_kept(pruning: Any, graph: Any, model: nn.Module) -> list[nn.Module]:
    """The layers whose channels stay: of the outputs, and of groups that reach into what is unsafe."""
    inside = {
        id(part)
        for module in model.modules()
        if isinstance(module, _UNSAFE) or any(isinstance(getattr(module, name, None), int) for name in _HEADS)
        for part in module.modules()
    }
    kept: list[nn.Module] = [module for module in model.modules() if id(module) in inside]
    outputs = set(map(id, _find_outputs(model, graph)))
    for module in model.modules():
        if not isinstance(module, _ROOTS) or id(module) in inside:
            continue
        prune = graph.get_pruner_of_module(module)
        group = graph.get_pruning_group(module, prune.prune_out_channels, list(range(prune.get_out_channels(module))))
        if any(id(dep.target.module) in inside or _ends(dep, outputs) for dep, _ in group):
            kept.append(module)
    return kept


def _ends(dep: Any, outputs: set[int]) -> bool:
    """Whether a step of a group takes channels from a layer of the outputs."""
    return id(dep.target.module) in outputs and "out_channels" in getattr(dep.handler, "__name__", "")


def _find_outputs(model: nn.Module, graph: Any) -> list[nn.Module]:
    return [node.module for node in graph.module2node.values() if not node.outputs]
