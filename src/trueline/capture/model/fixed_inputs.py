"""Inputs that a claim holds at one value: a number that code reads out of them is the same in every request.

`self.heads[task.item()]` is one head where the claim says that task is 2. Sessions and servers refuse another task, so
that a trace may freeze the head. The number counts as fixed only where it is read out of the input's own memory, which
nothing has written, or of a copy in another dtype.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trueline.bundle.signature import Array, Signature
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.model.eager import EagerSession
from trueline.recipe.eager_mode import as_trained
from trueline.runtime.tensors import to_tensors

_COPIES = frozenset({"_to_copy", "clone"})
_SHARES = frozenset("numpy __array__ __dlpack__ data_ptr storage untyped_storage".split())  # noqa: SIM905
"""With what these return, code writes into a tensor unseen."""


class FixedInputs:
    """The memory of these inputs during one call of the model."""

    def __init__(self, eager: EagerSession, claim: Signature) -> None:
        self._eager = eager
        self._names = {spec.name for spec in claim.inputs if _is_one_number(claim, spec.name)}
        self._memory: dict[int, torch.UntypedStorage] = {}

    def run(self, inputs: Mapping[str, Array]) -> None:
        """Calls the model. Raises what it raises."""
        if not self._names:
            self._eager.run(inputs)
            return
        tensors = to_tensors(self._eager.signature, inputs)
        with torch.no_grad(), as_trained(), self.following(tensors):
            self._eager.calling.call(self._eager.module, tensors)

    @contextmanager
    def following(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """While the model is called with `tensors`."""
        if not self._names:
            yield
            return
        for spec, tensor in zip(self._eager.signature.inputs, tensors, strict=True):
            if spec.name in self._names:
                self._follow(tensor)
        try:
            with _Copies(self), _Shares(self):
                yield
        finally:
            self._memory.clear()

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether all numbers of `tensor` are fixed."""
        return bool(self._memory) and tensor.layout is torch.strided and _memory_of(tensor)._cdata in self._memory

    def forget(self, value: Any) -> None:
        """Counts `value` as any other tensor from now on."""
        if isinstance(value, torch.Tensor) and self._memory and value.layout is torch.strided:
            self._memory.pop(_memory_of(value)._cdata, None)

    def _follow(self, tensor: torch.Tensor) -> None:
        memory = _memory_of(tensor)
        self._memory[memory._cdata] = memory


class _Copies(OperatorMode):  # type: ignore[no-untyped-call]
    """Follows copies, and forgets what is written."""

    def __init__(self, fixed: FixedInputs) -> None:
        super().__init__()
        self._fixed = fixed

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs)):
                self._fixed.forget(leaf)
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _COPIES and self._fixed.hold(args[0]) and _is_whole(args[0]):
            self._fixed._follow(result)
        return result


class _Shares(TorchFunctionMode):
    """Forgets what is given away."""

    def __init__(self, fixed: FixedInputs) -> None:
        super().__init__()
        self._fixed = fixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _SHARES and args:
            self._fixed.forget(args[0])
        return func(*args, **(kwargs or {}))


def _memory_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():  # no mode that watches the model takes this for the model's
        return tensor.untyped_storage()


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_one_number(claim: Signature, name: str) -> bool:
    """Whether the claim leaves one whole number for each element of the input."""
    spec = next(one for one in claim.inputs if one.name == name)
    values = spec.values
    return spec.dtype.kind in "iu" and not values.size and values.low is not None and values.low == values.high
