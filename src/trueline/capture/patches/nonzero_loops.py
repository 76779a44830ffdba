"""A loop over the places where a mask holds, `for expert in hit.nonzero()`: traced as a loop over all places.

How many places there are the values decide, and no exporter follows a loop of that length. Where there are so many at
most as the mask is long, and that is a number (the experts of a layer), each place can have its step: one that selects
nothing computes nothing, and adds nothing. Whether that is so is for the proof, and a proof can only show it where some
call leaves a place out; so this is done only where one does, at every such loop.

Source: the documentation of torch.nonzero, and of torch.overrides.TorchFunctionMode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from trueline.capture.model import code_paths
from trueline.capture.model.code_paths import users_functions
from trueline.capture.patches import Patch
from trueline.capture.patches.size_lists import within

PATCH = Patch(
    issue="https://github.com/huggingface/transformers/issues/38518",
    versions="torch 2.13",
    cost="a second export, after the first one failed; each place has a step in the program",
    helps=("switch_transformers", "nllb_moe"),
)

MOST = 64
"""Steps that a loop may have: each is written out in the program."""
_FINDERS = ("nonzero", "argwhere", "where")
_SAME = ("squeeze", "flatten", "ravel", "view", "reshape", "to", "cpu", "long", "int", "detach", "clone")
"""Methods after which a tensor still names the same places."""


class Places(TorchFunctionMode):
    """While a model is called in the block: loops over places go over `all` of them, or it is noted which do not."""

    def __init__(self, *, all: bool) -> None:
        super().__init__()
        self.all = all
        self.skipped: dict[str, bool] = {}
        """The line of each loop that was met -> whether it left a place out."""
        self._most = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        of = args[0] if args else None
        most: int | None = self._most[of] if isinstance(of, torch.Tensor) and of in self._most else None
        if most is not None and name in ("unbind", "tolist"):
            return self._steps(name, of, most, lambda: func(*args, **kwargs))
        if self.all and name == "__format__" and isinstance(of, torch.Tensor) and not of.ndim:
            return format(of.item(), *args[1:])  # as torch does outside of a trace
        found = func(*args, **kwargs)
        if most is not None and (name in _SAME or (name == "__getitem__" and _column(args[1]))):
            self._note([found], most)
        elif most is None and name in _FINDERS and (name != "where" or len(args) + len(kwargs) == 1):
            self._note(tree_leaves(found), _static_length(of))
        return found

    def _note(self, tensors: Sequence[Any], most: int | None) -> None:
        for tensor in tensors:
            if most is not None and tensor.ndim and (tensor.ndim == 1 or tensor.shape[1:] == (1,)):
                self._most[tensor] = most

    def _steps(self, name: str, places: Any, most: int, as_it_is: Any) -> Any:
        if not self.all:
            line = str(code_paths.current_line())
            self.skipped[line] = self.skipped.get(line, False) or len(places) < most
            return as_it_is()
        numbers: list[Any] = [*range(most)] if places.ndim == 1 else [[one] for one in range(most)]
        if name == "tolist":
            return numbers
        return tuple(torch.tensor(one, dtype=places.dtype, device=places.device) for one in numbers)


def _static_length(mask: Any) -> int | None:
    """How many places a mask of one dimension has, where that is a number."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 1 or not isinstance(mask.shape[0], int):
        return None
    return mask.shape[0] if mask.shape[0] <= MOST else None


def _column(place: Any) -> bool:
    """Whether an index takes the only column: `places[:, 0]`."""
    return isinstance(place, tuple) and len(place) == 2 and place[0] == slice(None) and place[1] in (0, -1)


def may_help(module: torch.nn.Module, said: str) -> bool:
    """Whether torch.export failed, with the message `said`, over a number that values decide, in code that may loop
    over places."""
    finds = any(not set(_FINDERS).isdisjoint(one.__code__.co_names) for one in users_functions(module))
    return "data-dependent" in said and finds


def left_out(flat: torch.nn.Module, calls: Iterable[tuple[torch.Tensor, ...]]) -> bool:
    """Whether `flat` loops over places, and each of its loops leaves one out on some call."""
    watch = Places(all=False)
    for tensors in calls:
        try:
            with torch.no_grad(), watch:
                flat(*(tensor.clone() for tensor in tensors))
        except Exception:  # noqa: BLE001 (blind except): a call that the model refuses shows nothing
            continue
    return bool(watch.skipped) and all(watch.skipped.values())


@contextmanager
def all_of_them(module: torch.nn.Module) -> Iterator[None]:
    """While `module` is traced in the block, its loops over places go over all of them."""
    with within(module, Places(all=True)):
        yield
