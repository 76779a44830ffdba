"""State made explicit: what a model keeps in its buffers comes in as an input and goes out as an output.

    the user's model     y = model(x)                                  and model.total has changed
    Explicit(model)      y, next.total = model(x, state.total)         and nothing has

A program has no memory of its own then: who asks it keeps the state, and two who ask it do not share one. A state may
grow in one dimension (a cache of what was said so far). Buffers alone can be lifted; what a model keeps in plain Python
attributes no exporter sees, and it is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trueline.capture.model.dynamic_dims import resized
from trueline.errors import CaptureError, join_names

GIVEN, NEXT = "state.", "next."
"""Before the name of a buffer: the input that brings it, the output that takes it on."""
GROWN, AT_MOST = 3, 8
"""Calls after which a state that grows is known by its sizes; calls that it is given to grow for the example."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Positional and keyword arguments of one call, where a tuple or a dict alone cannot say both."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class Explicit(torch.nn.Module):
    """`module` as a function of its inputs and of the buffers `names`, which it leaves as they were."""

    def __init__(
        self,
        module: torch.nn.Module,
        names: Sequence[str],
        records: Mapping[str, int] | None = None,
        grows: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._users = module
        self.names = tuple(names)
        self.records = dict(records or {})
        """Buffers that have a row for each record, and in which dimension."""
        self.grows = dict(grows or {})
        """Buffers whose size changes from call to call, and in which dimension."""
        self._owners = _owners(module, self.names)

    @property
    def initial(self) -> dict[str, torch.Tensor]:
        """The state as the model has it, by the name of the input."""
        return {GIVEN + name: owners[0][0]._buffers[owners[0][1]] for name, owners in self._owners.items()}  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """The answer of the user's model, and the state that it leaves, by the name of the output."""
        given = {name: kwargs.pop(GIVEN + name).clone() for name in self.names}
        with _holding(self._owners, given):
            found = self._users(*args, **kwargs)
            left = _held(self._owners)
        return found, {NEXT + name: value.clone() for name, value in left.items()}

    @contextmanager
    def living(self, state: Mapping[str, torch.Tensor]) -> Iterator[torch.nn.Module]:
        """The user's own model, with a memory that begins as `state`, by input, and lives as long as the block."""
        with _holding(self._owners, {name: state[GIVEN + name].clone() for name in self.names}):
            yield self._users

    def beginning(self, num_records: int) -> dict[str, torch.Tensor]:
        """The state that the model begins with, by input, for a batch of so many records."""
        return {
            name: resized(value, {self.records[name.removeprefix(GIVEN)]: num_records})
            if name.removeprefix(GIVEN) in self.records
            else value
            for name, value in self.initial.items()
        }

    def state(self) -> dict[str, torch.Tensor]:
        """The state as it is now, by the name of the output. Within `living`: what the calls made of it."""
        return {NEXT + name: value.clone() for name, value in _held(self._owners).items()}


@contextmanager
def sheltered(module: torch.nn.Module) -> Iterator[None]:
    """Whatever the block makes of the buffers of `module`, afterwards they are as before."""
    owners = _owners(module, [name for name, _ in module.named_buffers()])
    with _holding(owners, {name: value.clone() for name, value in _held(owners).items()}):
        yield


def users_own(module: torch.nn.Module) -> torch.nn.Module:
    """The user's model, without what stands around it."""
    return module._users if isinstance(module, Explicit) else module


def lifted(module: torch.nn.Module, calls: Sequence[Asked]) -> Explicit | None:
    """`module` with the buffers explicit that it writes on any of `calls`; None when it writes none.

    Raises CaptureError for a state that changes its dtype, or its shape in more than one dimension: it could not be
    handed back.
    """
    names = written(module, calls)
    if not names:
        return None
    found = Explicit(module, names)
    forms = list(_lived(found, calls[0], GROWN))
    wrong = _misfits(found, forms)
    if wrong:
        raise CaptureError(
            f"the state does not keep its form: {wrong}",
            hint="give the buffer the dtype and the dimensions that it has after a call, of size 0 where it grows; it "
            "may grow in one dimension",
        )
    grows = {name: axes[0] for name in names if (axes := _changing([form[NEXT + name] for form in forms]))}
    found = Explicit(module, names, grows=grows)
    return Explicit(module, names, _records(found, calls[0]), grows)


def asked(module: torch.nn.Module, call: Asked) -> Asked:
    """`call` with the model's own state, as an Explicit is called.

    A state that grows is given as some calls have left it: of what is empty no exporter learns a thing.
    """
    if not isinstance(module, Explicit):
        return call
    state = module.beginning(_num_records(call))
    if module.grows:
        taken = {size for leaf in _tensors(call) for size in leaf.shape}
        for left in _lived(module, call, AT_MOST, state):
            state = {GIVEN + name: left[NEXT + name] for name in module.names}
            sizes = {state[GIVEN + name].shape[axis] for name, axis in module.grows.items()}
            if min(sizes) > 2 and not sizes & taken:
                break
    return Asked(call.args, {**call.kwargs, **state})


def _lived(
    module: Explicit, call: Asked, count: int, state: Mapping[str, torch.Tensor] | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """The state, by output, before the first and after each of `count` calls of a model that remembers."""
    with torch.no_grad(), module.living(module.initial if state is None else state) as users:
        yield module.state()
        for _ in range(count):
            users(*call.args, **call.kwargs)
            yield module.state()


def written(module: torch.nn.Module, calls: Sequence[Asked]) -> tuple[str, ...]:
    """The buffers that `module` writes when it is called, in its own order. The module is left as it was."""
    owners = _owners(module, [name for name, _ in module.named_buffers()])
    names: dict[str, None] = {}
    for call in calls:
        given = {name: value.clone() for name, value in _held(owners).items()}
        kept = {name: value.clone() for name, value in given.items()}
        versions = {name: value._version for name, value in given.items()}
        with torch.no_grad(), _holding(owners, given):
            module(*call.args, **call.kwargs)
            left = _held(owners)
        names |= dict.fromkeys(
            name
            for name, value in left.items()
            if value is not given[name] or value._version != versions[name] or not equal(value, kept[name])
        )
    return tuple(name for name in owners if name in names)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two buffers are alike to the bit, a NaN being like another."""
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def _misfits(module: Explicit, lived: Sequence[Mapping[str, torch.Tensor]]) -> str:
    return join_names(
        f"'{name}' is {_form(values[0])} and after a call {_form(values[1])}"
        for name in module.names
        if not _one_form(values := [state[NEXT + name] for state in lived])
    ).removeprefix("none")


def _one_form(values: Sequence[torch.Tensor]) -> bool:
    """Whether all have one dtype and number of dimensions, and differ in the size of one at most."""
    return len({(value.dtype, value.ndim) for value in values}) == 1 and len(_changing(values)) < 2


def _changing(values: Sequence[torch.Tensor]) -> list[int]:
    """The dimensions in which equally many-dimensional `values` differ."""
    return [axis for axis in range(values[0].ndim) if len({value.shape[axis] for value in values}) > 1]


def _form(value: torch.Tensor) -> str:
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def _records(module: Explicit, call: Asked) -> dict[str, int]:
    """The state that follows the batch: empty when the model takes another batch without it."""
    count = _num_records(call)
    more = Asked(*torch.utils._pytree.tree_map(lambda leaf: _grown(leaf, 0, count), (call.args, call.kwargs)))
    follows = {
        name: list(value.shape).index(count)
        for name, value in zip(module.names, module.initial.values(), strict=True)
        if count in value.shape
    }
    for records in _fewest_first(follows):
        state = {
            GIVEN + name: _grown(value, records[name], count) if name in records else value
            for name, value in zip(module.names, module.initial.values(), strict=True)
        }
        try:
            with torch.no_grad():
                _, left = module(*more.args, **more.kwargs, **state)
        except Exception:  # noqa: BLE001 - the user's forward at a batch it may not know: then the other is tried
            continue
        if all(_keeps(left[NEXT + name], state[GIVEN + name], module.grows.get(name)) for name in module.names):
            return records
    return {}


def _keeps(after: torch.Tensor, before: torch.Tensor, grows: int | None) -> bool:
    """Whether a state has the form that it had, but for the dimension in which it `grows`."""
    return after.dtype == before.dtype and _changing([before, after]) in ([], [grows])


def _fewest_first(follows: dict[str, int]) -> Iterator[dict[str, int]]:
    """None, then each alone, then all: who need not follow the batch is left as it is."""
    yield {}
    yield from ({name: axis} for name, axis in follows.items())
    kinds = {name.rpartition(".")[2] for name in follows}
    yield from ({name: axis for name, axis in follows.items() if name.rpartition(".")[2] == kind} for kind in kinds)
    yield follows


def _num_records(call: Asked) -> int:
    return next((leaf.shape[0] for leaf in _tensors(call) if leaf.ndim), 0)


def _tensors(call: Asked) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((call.args, call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _grown(leaf: Any, axis: int, count: int) -> Any:
    """One more record, the first again."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim <= axis or leaf.shape[axis] != count or not count:
        return leaf
    return torch.cat([leaf, leaf.narrow(axis, 0, 1)], axis)


Owners = dict[str, list[tuple[torch.nn.Module, str]]]
"""Name of a buffer -> the modules that have it, and what they call it: a tied buffer has several."""


def _owners(module: torch.nn.Module, names: Sequence[str]) -> Owners:
    first = {id(value): name for name, value in module.named_buffers()}
    found: Owners = {name: [] for name in names}
    for part in module.modules():
        for key, value in part._buffers.items():
            name = "" if value is None else first.get(id(value), "")
            if name in found:
                found[name].append((part, key))
    return found


def _held(owners: Owners) -> dict[str, torch.Tensor]:
    return {name: where[0][0]._buffers[where[0][1]] for name, where in owners.items()}  # type: ignore[misc]


@contextmanager
def _holding(owners: Owners, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Gives the buffers other values while the block runs."""
    before = _held(owners)
    try:
        _put(owners, state)
        yield
    finally:
        _put(owners, before)


def _put(owners: Owners, state: Mapping[str, torch.Tensor]) -> None:
    for name, where in owners.items():
        for part, key in where:
            part._buffers[key] = state[name]
