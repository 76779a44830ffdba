"""Where a loop may keep weights beside its model: another module, a collection of tensors, one flat tensor.

What is looked at is found by its shapes, among all objects that Python's collector knows and by the names of the loop,
since an average may be a new tensor after each step.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from trueline.train.rehearsal.kept import KeptNames

SEEN, NUDGE = 4096, 1.01
"""Elements of a tensor that are compared, or changed, and a factor for these."""
_STACKS = (list, dict, deque)
_ROOMS = (dict, OrderedDict, defaultdict, list)  # and no subclass of a user's, which may compute what it has


@dataclass(frozen=True, slots=True)
class Copy:
    """Tensors of a loop beside its model."""

    what: str
    values: Callable[[], Iterable[torch.Tensor]]
    weights: Callable[[], Iterable[torch.Tensor]]
    """Without buffers, which a forward may change."""


class Copies:
    """`look()`, and later `find_changed()`."""

    def __init__(self, model: torch.nn.Module, names: KeptNames) -> None:
        self._model, self._names = model, names
        self._known = list_copies(model)
        self._strange: list[torch.Tensor] = []
        self._looks = 0
        self._seen: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._stacks: dict[str, int] = {}

    def look(self, strange: list[torch.Tensor]) -> None:
        """Notes what is there now; `strange`: tensors that the loss trains and the model does not have."""
        self._looks += 1
        if 1 < self._looks < 4:  # what the first step that counted as applied has made
            self._known = list_copies(self._model) | self._known
        self._strange = strange
        self._seen = {
            name: ([glance(value) for value in one.values()], [glance(value) for value in one.weights()])
            for name, one in self._list_all()
        }
        self._stacks = dict(self._list_stacks())

    def find_changed(self, *, in_body: bool) -> str | None:
        """What has changed since the last look and is no copy of the model's weights; None: nothing has. `in_body`:
        while the loop computed its loss, which changes buffers."""
        now = list(self._model.parameters())
        whole = [glance(value) for value in now if value.is_floating_point() and value.is_contiguous()]
        for name, one in self._list_all():
            if name not in self._seen:
                continue
            before = self._seen[name][in_body]
            values = list(one.weights() if in_body else one.values())
            if not are_equal(before, values) and not are_equal(whole, values) and not _is_flat_copy(now, values):
                return one.what
        grown = (name for name, count in self._list_stacks() if count > max(1, self._stacks.get(name, count)))
        return next((f"{name}, a collection that grows by copies of the weights" for name in grown), None)

    def _list_stacks(self) -> Iterator[tuple[str, int]]:
        """Collections whose last item is a copy of the weights (a state, a list, a vector, a module), or that are
        empty, and how many items they have."""
        shapes = _shapes(self._model)
        total = sum(value.numel() for value in self._model.parameters() if value.requires_grad)
        for place in self._names.list_places():
            room = place.value
            if type(room) in _STACKS:
                last = next(reversed(room.values() if isinstance(room, dict) else room), None)
                if not room or _is_copy(last, shapes, total):
                    yield place.name, len(room)

    def _list_all(self) -> Iterator[tuple[str, Copy]]:
        yield from self._known.items()
        for number, value in enumerate(self._strange):
            what = f"a tensor of shape {list(value.shape)} that the loss trains and the model does not have"
            yield f"strange {number}", Copy(what, lambda value=value: [value], lambda value=value: [value])  # type: ignore[misc]
        ours = {id(value) for value in (*self._model.parameters(), *self._model.buffers())}
        shapes = _shapes(self._model)
        total = sum(value.numel() for value in self._model.parameters() if value.requires_grad)
        for place in self._names.list_places():
            value = place.value
            flat = isinstance(value, torch.Tensor | np.ndarray) and len(value.shape) == 1 and len(value) == total
            if (flat and len(shapes) > 1) or (_is_room(value, shapes) and _holds(value, shapes, ours)):
                values = partial(_values, [value] if flat else value)
                yield place.name, Copy(f"{place.name}, an average or copy of the weights", values, values)


def list_copies(model: torch.nn.Module) -> dict[str, Copy]:
    """What may hold weights beside `model`, as far as Python's collector knows it: other modules, and dicts and lists
    with at least the shapes of the model's trainable parameters. In a fork whose objects are frozen, new ones alone."""
    own, known = {id(module) for module in model.modules()}, gc.get_objects()
    kinds = {kind for kind in set(map(type, known)) if issubclass(kind, torch.nn.Module)}  # few, of a million objects
    others = [one for one in known if type(one) in kinds and "_parameters" in one.__dict__]
    inner = {id(part) for one in others for part in one._modules.values()}
    ours = {id(value) for value in (*model.parameters(), *model.buffers())}
    shapes = _shapes(model)
    found = {
        str(id(one)): Copy(f"another module ({type(one).__name__})", partial(_own_tensors, one, ours),
                           partial(_own_tensors, one, ours, buffers=False))
        for one in others
        if id(one) not in own | inner
    }  # fmt: skip
    found_rooms = [one for one in known if type(one) in _ROOMS]
    rooms = [one for one in found_rooms if _is_room(one, shapes) and _holds(one, shapes, ours)]
    copies = [Copy("a copy of the weights", partial(_values, room), partial(_values, room)) for room in rooms]
    return found | dict(zip(map(str, map(id, rooms)), copies, strict=True))


def list_strange(loss: torch.Tensor, model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that have a gradient by `loss` and are not of the model."""
    ours = {id(value) for value in model.parameters()}
    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    found: dict[int, torch.Tensor] = {}
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ours:
            found[id(variable)] = variable
        parents = {parent for parent, _ in node.next_functions} - seen
        seen |= parents
        nodes += parents
    return list(found.values())


def glance(value: torch.Tensor) -> torch.Tensor:
    """A copy of the first elements."""
    flat = value.detach()
    return (flat.view(-1) if flat.is_contiguous() else flat.flatten())[:SEEN].clone()


def list_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters that can be changed in place."""
    return (value for value in model.parameters() if value.is_floating_point() and value.is_contiguous())


@contextmanager
def nudge(model: torch.nn.Module, times: int = 1) -> Iterator[None]:
    """Changes the parameters a little while the block runs: an average that begins as what it averages moves then."""
    held = [(value, glance(value)) for value in list_weights(model)] if times else []
    with torch.no_grad():
        for value, part in held:
            value.view(-1)[:SEEN].copy_(part * NUDGE**times)
    try:
        yield
    finally:
        with torch.no_grad():
            for value, part in held:
                value.view(-1)[:SEEN].copy_(part)


def are_equal(before: Iterable[torch.Tensor], now: Iterable[torch.Tensor]) -> bool:
    """Whether glances are those of the tensors `now`."""
    glances, others = list(before), [glance(value) for value in now]
    same = len(glances) == len(others)
    return same and all(_is_same(one, other) for one, other in zip(glances, others, strict=True))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is what it was: memory before its first write, a mask."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return torch.equal(one, other) or (alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))


def _is_flat_copy(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> bool:
    if len(values) != 1 or values[0].dim() != 1:
        return False
    wanted, found = glance(values[0]), list[torch.Tensor]()
    for value in parameters:
        if value.requires_grad and sum(map(len, found)) < len(wanted):
            found.append(glance(value))
    whole = torch.cat(found)[: len(wanted)].to(wanted.dtype)
    return torch.equal(wanted[: len(whole)], whole)


def _shapes(model: torch.nn.Module) -> Counter[tuple[int, ...]]:
    return Counter(tuple(value.shape) for value in model.parameters() if value.requires_grad)


def can_look(value: torch.Tensor) -> bool:
    """Not at a parameter that has no shape yet, at one without values, nor at a tensor of another kind."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, torch.nn.Buffer)
    return plain and not value.is_meta and value.layout == torch.strided and not value.is_quantized


def _own_tensors(module: torch.nn.Module, ours: set[int], *, buffers: bool = True) -> list[torch.Tensor]:
    values = (*module.parameters(), *(module.buffers() if buffers else ()))
    return [value for value in values if id(value) not in ours and can_look(value)]


def _is_copy(item: Any, shapes: Counter[tuple[int, ...]], total: int) -> bool:
    if isinstance(item, torch.nn.Module):
        return shapes <= Counter(tuple(value.shape) for value in item.parameters())
    if isinstance(item, torch.Tensor | np.ndarray):
        return len(shapes) > 1 and len(item.shape) == 1 and len(item) == total
    room = type(item) in (*_ROOMS, tuple) and len(item) > 0
    return room and shapes <= Counter(tuple(value.shape) for value in _values(item))


def _values(room: Any) -> list[torch.Tensor]:
    found = list(room.values()) if isinstance(room, dict) else list(room)
    tensors = [torch.from_numpy(one) if type(one) is np.ndarray and one.dtype.kind == "f" else one for one in found]
    return [value for value in tensors if isinstance(value, torch.Tensor) and can_look(value)]


def _is_room(room: Any, shapes: Counter[tuple[int, ...]]) -> bool:
    return type(room) in _ROOMS and len(room) >= shapes.total() > 0


def _holds(room: Any, shapes: Counter[tuple[int, ...]], ours: set[int]) -> bool:
    """Whether a dict or list has tensors of its own of all `shapes`."""
    first = next(iter(room.values() if isinstance(room, dict) else room))
    if not isinstance(first, torch.Tensor | np.ndarray) or isinstance(first, torch.nn.Parameter):
        return False
    return shapes <= Counter(tuple(value.shape) for value in _values(room) if id(value) not in ours)
