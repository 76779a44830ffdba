"""A loop over the places where a mask holds, `for expert in hit.nonzero()`, is traced with a step for every place.

A mask of fixed length bounds the steps, and a step that selects nothing adds nothing. The proof can only show that
where some call leaves a place out, so the patch is used only where every such loop leaves one out on some call.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import users_functions
from trueline.capture.patches import Patch, enter_at_calls

PATCH = Patch(
    issue="huggingface/transformers#38518",
    versions="torch 2.13",
    cost="a second export; a step for each place",
    helps=("switch_transformers", "nllb_moe"),
)

MAX_STEPS = 64
"""Each step of a loop is written out in the program."""
_FINDERS = ("nonzero", "argwhere", "where")
_SAME = ("squeeze", "flatten", "ravel", "view", "reshape", "to", "cpu", "long", "int", "detach", "clone")
"""Methods after which a tensor still names the same places."""


class PlaceLoops(TorchFunctionMode):
    """Makes loops over places go over `all` of them, or records which loops leave places out."""

    def __init__(self, *, all: bool) -> None:
        super().__init__()
        self.all = all
        self.skipped: dict[str, bool] = {}
        """Line of each loop -> whether it left a place out."""
        self._lengths = WeakTensorKeyDictionary()
        """Tensor of places -> length of its mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first: Any = args[0] if args else None
        length = self._lengths[first] if isinstance(first, torch.Tensor) and first in self._lengths else None
        if length is not None and name in ("unbind", "tolist"):
            if self.all:
                return _all_places(name, first, length)
            line = str(code_paths.current_line())
            self.skipped[line] = self.skipped.get(line, False) or len(first) < length
        if self.all and name == "__format__" and isinstance(first, torch.Tensor) and not first.ndim:
            return format(first.item(), *args[1:])  # as torch does outside a trace
        result = func(*args, **kwargs)
        if length is not None and (name in _SAME or (name == "__getitem__" and _is_column(args[1]))):
            self._note([result], length)
        elif length is None and name in _FINDERS and (name != "where" or len(args) + len(kwargs) == 1):
            self._note(tree_leaves(result), _mask_length(first))
        return result

    def _note(self, tensors: Sequence[Any], length: int | None) -> None:
        for tensor in tensors:
            if length is not None and tensor.ndim and (tensor.ndim == 1 or tensor.shape[1:] == (1,)):
                self._lengths[tensor] = length


def _all_places(name: str, places: torch.Tensor, length: int) -> Any:
    numbers: list[Any] = [*range(length)] if places.ndim == 1 else [[place] for place in range(length)]
    if name == "tolist":
        return numbers
    return tuple(torch.tensor(number, dtype=places.dtype, device=places.device) for number in numbers)


def _mask_length(mask: Any) -> int | None:
    if not isinstance(mask, torch.Tensor) or mask.ndim != 1 or not isinstance(mask.shape[0], int):
        return None
    return mask.shape[0] if mask.shape[0] <= MAX_STEPS else None


def _is_column(index: Any) -> bool:
    """Whether `index` takes the only column: `places[:, 0]`."""
    return isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and index[1] in (0, -1)


def may_help(module: torch.nn.Module, message: str) -> bool:
    """Whether torch.export failed with a data-dependent `message` on code that may loop over places."""
    finds = any(not set(_FINDERS).isdisjoint(one.__code__.co_names) for one in users_functions(module))
    return "data-dependent" in message and finds


def leave_places_out(flat: torch.nn.Module, calls: Iterable[tuple[torch.Tensor, ...]]) -> bool:
    """Whether `flat` loops over places, and each of its loops leaves one out on some call."""
    mode = PlaceLoops(all=False)
    for tensors in calls:
        try:
            with torch.no_grad(), mode:
                flat(*(tensor.clone() for tensor in tensors))
        except Exception:  # noqa: BLE001 (blind except): a call that the model refuses shows nothing
            continue
    return bool(mode.skipped) and all(mode.skipped.values())


@contextmanager
def trace_all_places(module: torch.nn.Module) -> Iterator[None]:
    """In the block, loops over places go over all of them when `module` is called."""
    with enter_at_calls(module, PlaceLoops(all=True)):
        yield
