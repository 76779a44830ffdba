"""Watches the modes of a model's parts (`train()`, `eval()`), which no state has: one that joins begins with its own.

A loop may set them by the step: `if batch.step > 1000: model.norm.eval()`. If it sets them once, or forgets `train()`
after an evaluation, it trains another model from then on, and a worker that joins does not. Both look alike where the
mode changes. So the loop gets that batch and the next one again, with the modes from before, and has to set the same
ones.
"""

from __future__ import annotations

import torch

from trueline.errors import UsageError

HINT = "call model.train() after an evaluation, and set modes that change while training by batch.step, in each batch"
_JOINS = "a worker that joins does not know of it"


class ModuleModes:
    """`compare()` says whether the loop has to get its batch again, after `reset()`; `begin()` comes before each."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._parts = model, list(model.modules())
        self._usual = self._read()
        self._turned: list[int] = []
        """The parts that the last change has turned."""
        self._doubted: list[bool] | None = None
        self._left = 0
        self.repeats = self._again = False

    def begin(self) -> None:
        """A batch is handed out: unless that is the one that was doubted, its step was given up."""
        self._doubted = self._doubted if self._again else None
        self._again = False

    def compare(self) -> bool:
        """Called when a batch has its loss. Raises UsageError if its modes are left over from an earlier batch."""
        modes, doubted = self._read(), self._doubted
        if doubted is not None:
            self._doubted = None
            if modes != doubted:
                raise UsageError(f"{describe_left(self._model, doubted, modes)}: {_JOINS}", hint=HINT)
            return False
        if modes != self._usual:
            self._turned = [at for at, pair in enumerate(zip(modes, self._usual, strict=True)) if pair[0] != pair[1]]
            self._usual, self._left = modes, 2  # what the step sets is set in the next one, too
        self.repeats = self._left > 0
        self._left = max(0, self._left - 1)
        self._doubted = modes if self.repeats else None
        return self.repeats

    def reset(self) -> None:
        """Turns these parts back, before the batch is handed out again."""
        self.repeats, self._again = False, True
        for at in self._turned:
            self._parts[at].training = not self._usual[at]

    def _read(self) -> list[bool]:
        return [part.training for part in self._parts]


class LeftModes:
    """Whether modes that a batch of a trial has left behind are set in the batch of the next step, as by a loop that
    evaluates after an epoch and calls `train()` where the next one begins: they are then no matter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parts = list(model.modules())
        self._begun = [part.training for part in self._parts]

    def are_left(self) -> bool:
        now, begun = self.compare()
        return now != begun

    def compare(self) -> tuple[list[bool], list[bool]]:
        """The modes now, and those that the trial began with."""
        return [part.training for part in self._parts], self._begun

    def reset(self) -> None:
        for part, begun in zip(self._parts, self._begun, strict=True):
            part.training = begun


def describe_left(model: torch.nn.Module, kept: list[bool], own: list[bool]) -> str:
    """The first part of `model` whose mode an earlier batch has left behind: the modes that were `kept`, and the loop's
    `own`, in the order of its modules."""
    at = next(at for at, pair in enumerate(zip(kept, own, strict=True)) if pair[0] != pair[1])
    name, _ = list(model.named_modules())[at]
    what = f"'{name}' is" if name else "the model is"
    return f"{what} in {'training' if kept[at] else 'evaluation'} mode, which an earlier batch has left behind"
