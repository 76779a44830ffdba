"""The optimizer's settings (learning rate, momentum, ...) as words of a step's account.

A loop of a user's own may set them by itself, and a member without records does not run that line. So every member with
records sends what it has, bit by bit, and all members apply that, also those that apply the step later. If members
differ, none applies the step.

An optimizer of a user's own may keep more than its `state_dict()` has: these attributes are a part of the job's state.
"""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trueline.errors import UsageError

PIECES, BITS = 6, 11
"""Words of a float64, and bits of a word: sums over 4096 members are exact in float32."""
_SHIFTS = np.arange(PIECES, dtype=np.uint64) * np.uint64(BITS)
_MASK = np.uint64((1 << BITS) - 1)


class OptimizerSettings:
    """The numbers in the groups of `optimizer`, as they were named when this object was made.

    `shared`: whether they travel with a step; only a loop of a user's own changes them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, shared: bool) -> None:
        self._optimizer = optimizer  # and not its groups: loading a state replaces them
        self._slots = list(_slots(optimizer.param_groups)) if shared else []
        """Group, name, and the index in a tuple or -1."""
        self._sent: npt.NDArray[np.float64] | None = None
        self._marked: list[float] | None = None
        self._packed: tuple[list[float], list[float]] = ([], [])
        self._held: list[float] = []
        """In the first batch of the step."""
        self.width = 1 + PIECES * len(self._slots) if self._slots else 0

    def values(self) -> list[float]:
        """The numbers as they are now."""
        return [self._get(*slot) for slot in self._slots]

    @contextmanager
    def vary(self) -> Iterator[None]:
        """Other numbers while the block runs."""
        values = self.values()
        self._set([0.5 * value for value in values])
        try:
            yield
        finally:
            self._set(values)

    def run_hooks(self) -> None:
        """Calls the hooks of the optimizer as after a step."""
        for part in (self._optimizer, *getattr(self._optimizer, "parts", ())):
            for hook in list(part._optimizer_step_post_hooks.values()):
                hook(part, (), {})

    def mark(self) -> None:
        """A step begins: `rewind` returns to these settings."""
        self._marked = self.values()

    def keep(self) -> None:
        """The step that had begun was applied, or another state was taken: nothing to rewind."""
        self._marked = None

    def rewind(self) -> None:
        """The step that had begun was not applied: its code runs again."""
        if self._marked is not None:
            self._set(self._marked)

    def expect_one_rule(self, step: int, *, first: bool) -> None:
        """Raises UsageError if they have changed since the `first` batch of `step` that this member has: members with
        more batches would change them more often."""
        if not self._slots:
            return
        values = self.values()
        if first:
            self._held = values
        elif values != self._held:
            at = next(at for at, pair in enumerate(zip(values, self._held, strict=True)) if pair[0] != pair[1])
            group, name, _ = self._slots[at]
            raise UsageError(
                f"the loop changes '{name}' of the optimizer's group {group} from {self._held[at]:g} to "
                f"{values[at]:g} between two batches of step {step}",
                hint="a step may have several batches: give the scheduler to Elastic(scheduler=...), or compute the "
                "value from batch.step before job.step(loss)",
            )

    def pack(self, *, own: bool) -> list[float]:
        """[width] This member's words; zeros unless it has run the loop's code for the step (`own`)."""
        self._sent = None
        if not own or not self._slots:
            return [0.0] * self.width
        values = self.values()
        if values != self._packed[0]:
            bits = np.array(values, dtype=np.float64).view(np.uint64)
            pieces = (bits[:, None] >> _SHIFTS) & _MASK
            self._packed = values, [1.0, *pieces.reshape(-1).astype(np.float64).tolist()]
        self._sent = np.array(self._packed[1])
        return self._packed[1]

    def take(self, sums: Sequence[float], step: int) -> None:
        """Sets what the members with records sent for `step`. `sums`: of their words; empty or zeros: none sent any.

        Raises UsageError if they differ.
        """
        if not self._slots or not sums or sums[0] < 0.5:
            return
        words = np.rint(np.asarray(sums, dtype=np.float64))
        if self._sent is not None and np.array_equal(words, words[0] * self._sent):
            return  # the usual case: these are its own
        pieces, rest = np.divmod(words[1:].reshape(-1, PIECES), words[0])
        other = rest.any(axis=1)
        if self._sent is not None:
            other |= (pieces != self._sent[1:].reshape(-1, PIECES)).any(axis=1)
        if other.any():
            group, name, _ = self._slots[int(other.argmax())]
            own = "" if self._sent is None else f" (here {self._optimizer.param_groups[group][name]})"
            raise UsageError(
                f"the workers set '{name}' of the optimizer's group {group} to different values in step {step}{own}; "
                "the step was not applied",
                hint="compute it from batch.step, since a counter of the loop begins again in a worker that joins; or "
                "give Elastic a scheduler",
            )
        bits = np.bitwise_or.reduce(pieces.astype(np.uint64) << _SHIFTS, axis=1)
        self._set(bits.view(np.float64).tolist())

    def _get(self, group: int, name: str, index: int) -> float:
        value = self._optimizer.param_groups[group].get(name, 0.0)
        return float(value if index < 0 else value[index])

    def _set(self, values: Sequence[float]) -> None:
        for (group, name, index), value in zip(self._slots, values, strict=True):
            if value == self._get(group, name, index):
                continue
            settings = self._optimizer.param_groups[group]
            found: Any = settings.get(name)
            if isinstance(found, torch.Tensor):
                found.fill_(value)
            elif index < 0:
                settings[name] = _as(found, value)
            else:
                settings[name] = (*found[:index], _as(found[index], value), *found[index + 1 :])


def _as(found: Any, value: float) -> Any:
    """`value` in the type of `found` where that holds it."""
    return type(found)(value) if isinstance(found, bool | int) and value == int(value) else value


def _slots(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, int]]:
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                yield number, name, -1
            elif isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
                yield from ((number, name, index) for index in range(len(value)))


def read_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps in attributes and not in its `state_dict()`: numbers, text and tensors, also in lists and
    dicts. Empty for torch's own, and for one that writes its `state_dict()` itself."""
    if type(optimizer).__module__.startswith("torch.") or type(optimizer).state_dict is not _USUAL:
        return {}
    usual = _name_usual()
    own = {name: value for name, value in vars(optimizer).items() if name not in usual}
    return {
        name: list(value) if isinstance(value, deque) else value
        for name, value in own.items()
        if not name.startswith("_optimizer_") and _is_plain(value)
    }


def set_attributes(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    """Sets what `read_attributes` has read of another one."""
    for name, value in values.items():
        held = vars(optimizer).get(name)
        setattr(optimizer, name, deque(value, held.maxlen) if isinstance(held, deque) else value)


_USUAL = torch.optim.Optimizer.state_dict


@functools.cache
def _name_usual() -> frozenset[str]:
    """The attributes of torch's own optimizers. torch imports its compiler when one is made, so no import makes one."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "parts"}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | deque):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) in (str, int) and _is_plain(item) for key, item in value.items())
    tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return tensor or value is None or isinstance(value, bool | int | float | str)
