"""What parameters and buffers alone decide is decided while a model is traced: it is the same at every call.

    if self.initted: ...        assert (t[1:] > t[:-1]).all()        steps = int(self.num_steps)

torch.export follows no look at the values of a tensor, also where no input comes into it. Here what is computed of the
model's own tensors is computed beside the trace as well, and a look at its values is answered with them. A tensor that
the model writes itself is no such thing: then its values are those of a call, and nothing is answered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.patches import Patch
from trueline.capture.patches.per_record import Drawn, NoDraws, writes

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="a second export, after the first one failed",
    helps=("torchdiffeq", "vector-quantize-pytorch"),
)

LARGEST = 65_536
"""Elements. What decides is small; a large weight is not computed twice to find out that nobody looks at it."""
_LOOKS = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__contains__,
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.is_nonzero,
        torch.is_nonzero,
        torch.equal,
        torch.Tensor.equal,
        torch.allclose,
        torch.Tensor.allclose,
    }
)
_FREE = (torch.SymInt, torch.SymFloat, torch.SymBool)


def may_help(why: str) -> bool:
    """Whether `why` torch.export does not follow a model is a look at values."""
    return "data-dependent" in why or "DataDependent" in why


class HeldChoices(TorchFunctionMode):
    """While `module` is traced in the block, what its own tensors decide has an answer. `looks` counts them."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._real = {
            name: tensor.detach().clone()  # not to be written into, whatever is computed with it
            for name, tensor in _held(module).items()
            if tensor.numel() <= LARGEST
        }
        self._beside = WeakTensorKeyDictionary()
        self._seen: torch.Tensor | None = None
        self._sound = True
        self.looks = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._sound:
            return func(*args, **kwargs)
        self._enter()
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        held = [tensor for tensor in tensors if tensor in self._beside]
        if held and writes(func, kwargs):
            self._sound = False  # also what shares its memory would be another
            return func(*args, **kwargs)
        alone = len(held) == len(tensors) > 0 and not any(isinstance(leaf, _FREE) for leaf in leaves)
        if not alone:
            return func(*args, **kwargs)
        try:
            real = self._computed(func, args, kwargs)
        except Drawn:
            return func(*args, **kwargs)
        if func in _LOOKS:
            self.looks += 1
            return real
        found = func(*args, **kwargs)
        for ours, theirs in zip(tree_leaves(found), tree_leaves(real), strict=False):
            if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and theirs.numel() <= LARGEST:
                self._beside[ours] = theirs
        return found

    def _enter(self) -> None:
        """The tensors by which the tracer stands for the module's, whenever they are others than before."""
        if not self._real:
            return
        path, _, last = next(iter(self._real)).rpartition(".")
        tensor = getattr(self._module.get_submodule(path), last)
        if tensor is self._seen:
            return
        self._seen = tensor
        current = _held(self._module)
        for name, real in self._real.items():
            if name in current:
                self._beside[current[name]] = real

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tree_map(lambda leaf: self._beside[leaf] if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction(), NoDraws():  # type: ignore[no-untyped-call]
            return func(*given[0], **given[1])


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
