"""A nested state as JSON and tensors, without pickle.

`encode` splits the result of `state_dict()` of models, optimizers and schedulers (dicts, lists, tuples, numbers,
strings, None, tensors, numpy arrays) into a skeleton for JSON and a list of tensors; `decode` joins them again. Both
are written into checkpoints and sent to joining workers. Other types are refused by name: a pickled state runs code
when loaded.
"""

from typing import Any

import numpy as np
import torch

from trueline.errors import CheckpointError, name_type

Skeleton = Any
"""None, bool, int, float, str, or one of {"t": i}, {"n": i}, {"l": [..]}, {"u": [..]}, {"d": [[key, value], ..]}."""


def encode(tree: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """Splits `tree`; the tensors are those in it (not copies), in order of their index.

    >>> encode({"step": 3, "betas": (0.9, 0.99)})
    ({'d': [['step', 3], ['betas', {'u': [0.9, 0.99]}]]}, [])
    """
    tensors: list[torch.Tensor] = []
    return _encode(tree, tensors, "state"), tensors


def _encode(node: Any, tensors: list[torch.Tensor], where: str) -> Skeleton:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, torch.Tensor):
        tensors.append(node.detach())
        return {"t": len(tensors) - 1}
    if isinstance(node, np.ndarray):
        tensors.append(torch.from_numpy(node))
        return {"n": len(tensors) - 1}
    if isinstance(node, np.generic):
        return node.item()
    if isinstance(node, list | tuple):
        items = [_encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(node)]
        return {"l" if isinstance(node, list) else "u": items}
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str | int) or isinstance(key, bool):
                kind = type(key).__name__
                raise CheckpointError(f"{where} has the key {key!r} of type {kind}; expected a string or an integer")
        return {"d": [[key, _encode(node[key], tensors, f"{where}.{key}")] for key in node]}
    raise CheckpointError(
        f"{where} is {name_type(node)}, which a checkpoint cannot hold without pickle",
        hint="keep tensors, arrays, numbers, strings, lists and dicts in state_dict()",
    )


def decode(skeleton: Skeleton, tensors: list[torch.Tensor]) -> Any:
    """The tree. Raises CheckpointError when skeleton and tensors do not fit together."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, body),) = skeleton.items()
    if kind in ("t", "n"):
        if not 0 <= body < len(tensors):
            raise CheckpointError(f"the state names tensor {body}, but there are {len(tensors)}")
        return tensors[body] if kind == "t" else tensors[body].numpy()
    if kind == "l":
        return [decode(item, tensors) for item in body]
    if kind == "u":
        return tuple(decode(item, tensors) for item in body)
    if kind == "d":
        return {key: decode(value, tensors) for key, value in body}
    raise CheckpointError(f"the state has a node of the unknown kind '{kind}'")
