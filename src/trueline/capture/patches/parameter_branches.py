"""A branch that parameters and buffers alone decide is decided in the trace: it is the same at every call.

    if self.initted: ...        assert (t[1:] > t[:-1]).all()        steps = int(self.num_steps)

torch.export refuses every read of values. Here what the model computes of its own tensors is computed beside the trace
as well, and answers the read; no read is answered any more once the model writes one of its tensors.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.patches import Patch
from trueline.capture.patches.per_record import SYMBOLIC, NoRandom, RandomNumbers, writes

PATCH = Patch(
    issue="none found", versions="torch 2.13", cost="a second export", helps=("torchdiffeq", "vector quantizers")
)

MAX_ELEMENTS = 65_536
"""What decides is small; a large weight is not computed twice for a read that may never come."""
_READS = frozenset(
    {
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__contains__",
        "item",
        "tolist",
        "is_nonzero",
        "equal",
        "allclose",
    }
)


def may_help(message: str) -> bool:
    """Whether torch.export failed because code reads values."""
    return "data-dependent" in message or "DataDependent" in message


class ParameterReads(TorchFunctionMode):
    """While `module` is traced in the block, reads of values of its own tensors are answered. `reads` counts them."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._own = {
            name: tensor.detach().clone()  # so that nothing computed with it can write it
            for name, tensor in _tensors(module).items()
            if tensor.numel() <= MAX_ELEMENTS
        }
        self._real = WeakTensorKeyDictionary()
        """Traced tensor -> the real one, computed beside the trace."""
        self._first: torch.Tensor | None = None
        self._sound = True
        self.reads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._sound:
            return func(*args, **kwargs)
        self._note_own()
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if tensor in self._real]
        if known and writes(func, kwargs):
            self._sound = False  # tensors that share its memory change too
            return func(*args, **kwargs)
        if not tensors or len(known) < len(tensors) or any(isinstance(leaf, SYMBOLIC) for leaf in leaves):
            return func(*args, **kwargs)
        given = tree_map(lambda leaf: self._real[leaf] if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), NoRandom():  # type: ignore[no-untyped-call]
                real = func(*given[0], **given[1])
        except RandomNumbers:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _READS:
            self.reads += 1
            return real
        result = func(*args, **kwargs)
        for ours, theirs in zip(tree_leaves(result), tree_leaves(real), strict=False):
            if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and theirs.numel() <= MAX_ELEMENTS:
                self._real[ours] = theirs
        return result

    def _note_own(self) -> None:
        """Notes the tensors that the tracer puts in place of the module's own, whenever they are new ones."""
        if not self._own:
            return
        path, _, last = next(iter(self._own)).rpartition(".")
        tensor = getattr(self._module.get_submodule(path), last)
        if tensor is self._first:
            return
        self._first = tensor
        current = _tensors(self._module)
        for name, real in self._own.items():
            if name in current:
                self._real[current[name]] = real


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
