"""State made explicit: what a model keeps in its buffers comes in as an input and goes out as an output.

    the user's model     y = model(x)                                  and model.total has changed
    Explicit(model)      y, next.total = model(x, state.total)         and nothing has

The program then has no state of its own: each client keeps its state, and two clients do not share one. A state may
grow in one dimension (a cache of earlier tokens). Only buffers can be lifted; no exporter sees plain Python attributes,
and `proof/determinism.py` refuses a model that keeps a state in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch

from trueline.capture.model.arguments import Arguments
from trueline.capture.model.dynamic_dims import resize_tensor
from trueline.errors import CaptureError, join_names

GIVEN, NEXT = "state.", "next."
"""Prefixes of a buffer's name: as an input, and as an output."""
SUBSETS = 6
"""Buffers with as many rows as the batch of which each selection is tried: keys and values follow it, a position that
happens to have one element does not."""
GROWN, AT_MOST = 3, 8
"""Calls after which the sizes show that a state grows; calls in which it may grow for the example."""


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
        """Buffers with a row for each record, and the dimension of the rows."""
        self.grows = dict(grows or {})
        """Buffers that grow from call to call, and the dimension that does."""
        self._owners = _owners(module, self.names)

    @property
    def initial(self) -> dict[str, torch.Tensor]:
        """The model's own state, by the name of the input."""
        return {GIVEN + name: owners[0][0]._buffers[owners[0][1]] for name, owners in self._owners.items()}  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """The answer of the user's model, and the state after it, by the name of the output."""
        given = {name: kwargs.pop(GIVEN + name).clone() for name in self.names}
        with _with_buffers(self._owners, given):
            answer = self._users(*args, **kwargs)
            left = _values(self._owners)
        return answer, {NEXT + name: value.clone() for name, value in left.items()}

    @contextmanager
    def living(self, state: Mapping[str, torch.Tensor]) -> Iterator[torch.nn.Module]:
        """The user's own model, with a state that begins as `state`, by input, and is kept between calls in the
        block."""
        with _with_buffers(self._owners, {name: state[GIVEN + name].clone() for name in self.names}):
            yield self._users

    def initial_for(self, num_records: int) -> dict[str, torch.Tensor]:
        """The initial state, by input, for a batch of that many records."""
        return {
            name: resize_tensor(value, {self.records[name.removeprefix(GIVEN)]: num_records})
            if name.removeprefix(GIVEN) in self.records
            else value
            for name, value in self.initial.items()
        }

    def state(self) -> dict[str, torch.Tensor]:
        """The present state, by the name of the output."""
        return {NEXT + name: value.clone() for name, value in _values(self._owners).items()}


@contextmanager
def preserve_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restores the buffers of `module` after the block, those that are None among them."""
    unmade = _unmade_buffers(module)
    owners = _owners(module, [name for name, _ in module.named_buffers()])
    try:
        with _with_buffers(owners, {name: value.clone() for name, value in _values(owners).items()}):
            yield
    finally:
        for part, name in unmade:
            part._buffers[name] = None


def _unmade_buffers(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    return [(part, name) for part in module.modules() for name, value in part._buffers.items() if value is None]


def users_own(module: torch.nn.Module) -> torch.nn.Module:
    """The user's model, without a wrapper."""
    return module._users if isinstance(module, Explicit) else module


def lift_state(module: torch.nn.Module, calls: Sequence[Arguments]) -> Explicit | None:
    """`module` with the buffers explicit that it writes on any of `calls`; None when it writes none. Raises
    CaptureError for a state that changes its dtype, or its shape in more than one dimension: it could not be handed
    back."""
    _refuse_unmade(module, calls[0])
    names = written_buffers(module, calls)
    if not names:
        return None
    explicit = Explicit(module, names)
    forms = list(_run_alive(explicit, calls[0], GROWN))
    wrong, grows = [], {}
    for name in names:
        values = [state[NEXT + name] for state in forms]
        axes = _changing(values) if len({(value.dtype, value.ndim) for value in values}) == 1 else [0, 1]
        if len(axes) > 1:
            wrong.append(f"'{name}' is {_form(values[0])} and after a call {_form(values[1])}")
        elif axes:
            grows[name] = axes[0]
    if wrong:
        raise CaptureError(
            f"the state does not keep its form: {join_names(wrong)}",
            hint="give the buffer the dtype and the dimensions that it has after a call, of size 0 where it grows; it "
            "may grow in one dimension",
        )
    explicit = Explicit(module, names, grows=grows)
    return Explicit(module, names, _find_records(explicit, calls[0]), grows)


def _refuse_unmade(module: torch.nn.Module, call: Arguments) -> None:
    """Raises CaptureError for a state that is None before the first call. A table that the first call makes, and no
    later one writes, is no state."""
    unmade = _unmade_buffers(module)
    if not unmade:
        return
    paths = {id(part): path for path, part in module.named_modules()}
    states = []
    with torch.no_grad(), preserve_buffers(module):
        module(*call.args, **call.kwargs)
        made = [part._buffers.get(name) for part, name in unmade]
        before = [None if value is None else value.clone() for value in made]
        module(*call.args, **call.kwargs)
        for (part, name), first in zip(unmade, before, strict=True):
            now = part._buffers.get(name)
            if first is not None and now is not None and not equal(now, first):
                states.append(f"{paths[id(part)]}.{name}".lstrip("."))
    if states:
        raise CaptureError(
            f"the state is None before the first call ({join_names(states)}), and a client has to begin with a tensor",
            hint="register the buffer as a tensor, of size 0 in the dimension in which it grows: "
            "register_buffer('cache', torch.zeros(0, 8))",
        )


def with_state(module: torch.nn.Module, call: Arguments) -> Arguments:
    """`call` with the model's own state; one that grows is taken after some calls, since an exporter learns nothing
    from an empty one."""
    if not isinstance(module, Explicit):
        return call
    state = module.initial_for(_num_records(call))
    if module.grows:
        taken = {size for leaf in _tensors(call) for size in leaf.shape}
        for left in _run_alive(module, call, AT_MOST, state):
            state = {GIVEN + name: left[NEXT + name] for name in module.names}
            sizes = {state[GIVEN + name].shape[axis] for name, axis in module.grows.items()}
            if min(sizes) > 2 and not sizes & taken:
                break
    return Arguments(call.args, {**call.kwargs, **state})


def _run_alive(
    module: Explicit, call: Arguments, count: int, state: Mapping[str, torch.Tensor] | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """The state, by output, before the first and after each of `count` calls of a model that keeps its state."""
    with torch.no_grad(), module.living(module.initial if state is None else state) as users:
        yield module.state()
        for _ in range(count):
            users(*call.args, **call.kwargs)
            yield module.state()


def written_buffers(module: torch.nn.Module, calls: Sequence[Arguments]) -> tuple[str, ...]:
    """The buffers that `module` writes during the calls, in its own order. The module is left as it was."""
    owners = _owners(module, [name for name, _ in module.named_buffers()])
    names: dict[str, None] = {}
    for call in calls:
        given = {name: value.clone() for name, value in _values(owners).items()}
        kept = {name: value.clone() for name, value in given.items()}
        versions = {name: value._version for name, value in given.items()}
        with torch.no_grad(), preserve_buffers(module), _with_buffers(owners, given):
            module(*call.args, **call.kwargs)
            left = _values(owners)
        names |= dict.fromkeys(
            name
            for name, value in left.items()
            if value is not given[name] or value._version != versions[name] or not equal(value, kept[name])
        )
    return tuple(name for name in owners if name in names)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two buffers are equal to the bit; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def _changing(values: Sequence[torch.Tensor]) -> list[int]:
    """The dimensions in which equally many-dimensional `values` differ."""
    return [axis for axis in range(values[0].ndim) if len({value.shape[axis] for value in values}) > 1]


def _form(value: torch.Tensor) -> str:
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def _find_records(module: Explicit, call: Arguments) -> dict[str, int]:
    """The state that follows the batch: empty when the model accepts another batch without it."""
    count = _num_records(call)
    more = Arguments(*torch.utils._pytree.tree_map(lambda leaf: _one_more(leaf, 0, count), (call.args, call.kwargs)))
    follows = {
        name: list(value.shape).index(count)
        for name, value in zip(module.names, module.initial.values(), strict=True)
        if count in value.shape
    }
    kinds = {name.rpartition(".")[2] for name in follows}
    alike = [{name: axis for name, axis in follows.items() if name.rpartition(".")[2] == kind} for kind in kinds]
    # none, then each alone, then more: a buffer that need not follow the batch is left as it is
    names = list(follows)[:SUBSETS]
    some = (dict.fromkeys(chosen) for size in range(2, len(names)) for chosen in combinations(names, size))
    subsets = ({name: follows[name] for name in chosen} for chosen in some)
    for records in ({}, *({name: axis} for name, axis in follows.items()), *alike, follows, *subsets):
        state = {
            GIVEN + name: _one_more(value, records[name], count) if name in records else value
            for name, value in zip(module.names, module.initial.values(), strict=True)
        }
        try:
            with torch.no_grad():
                _, left = module(*more.args, **more.kwargs, **state)
        except Exception:  # noqa: BLE001 - the user's forward at a batch it may not accept: the next guess is tried
            continue
        pairs = {name: (state[GIVEN + name], left[NEXT + name]) for name in module.names}
        if all(
            after.dtype == before.dtype and _changing([before, after]) in ([], [module.grows.get(name)])
            for name, (before, after) in pairs.items()
        ):
            return records
    return {}


def _num_records(call: Arguments) -> int:
    return next((leaf.shape[0] for leaf in _tensors(call) if leaf.ndim), 0)


def _tensors(call: Arguments) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((call.args, call.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _one_more(leaf: Any, axis: int, count: int) -> Any:
    """`leaf` with its first record once more at the end."""
    if not isinstance(leaf, torch.Tensor) or leaf.ndim <= axis or leaf.shape[axis] != count or not count:
        return leaf
    return torch.cat([leaf, leaf.narrow(axis, 0, 1)], axis)


Owners = dict[str, list[tuple[torch.nn.Module, str]]]
"""Name of a buffer -> the modules that have it, and its name there: a tied buffer has several."""


def _owners(module: torch.nn.Module, names: Sequence[str]) -> Owners:
    first = {id(value): name for name, value in module.named_buffers()}
    owners: Owners = {name: [] for name in names}
    for part in module.modules():
        for key, value in part._buffers.items():
            name = "" if value is None else first.get(id(value), "")
            if name in owners:
                owners[name].append((part, key))
    return owners


def _values(owners: Owners) -> dict[str, torch.Tensor]:
    return {name: where[0][0]._buffers[where[0][1]] for name, where in owners.items()}  # type: ignore[misc]


@contextmanager
def _with_buffers(owners: Owners, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Gives the buffers other values while the block runs."""
    before = _values(owners)

    def assign(state: Mapping[str, torch.Tensor]) -> None:
        for name, where in owners.items():
            for part, key in where:
                part._buffers[key] = state[name]

    try:
        assign(state)
        yield
    finally:
        assign(before)
