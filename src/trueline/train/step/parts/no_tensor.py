"""The errors for a loss that is no tensor: a dict or a tuple of losses, a number, nothing; and for no step."""

from __future__ import annotations

from typing import Any

import torch

from trueline.errors import RecipeError, UsageError


def refuse(loss: Any) -> RecipeError:
    """The error, with what was found and what to give."""
    return RecipeError(f"the loss is a {_describe(loss)}, expected a tensor", hint=_choose_hint(loss))


def _describe(loss: Any) -> str:
    """Its type, and what of it may be the loss."""
    keys = list(loss)[:4] if isinstance(loss, dict) else []
    inside = f" with the keys {', '.join(map(repr, keys))}" if keys else ""
    size = f" of {len(loss)}" if isinstance(loss, tuple | list) else ""
    return f"{type(loss).__name__}{size or inside or (f' ({loss:.6g})' if isinstance(loss, float) else '')}"


def _choose_hint(loss: Any) -> str:
    if isinstance(loss, dict):
        key = next((key for key, value in loss.items() if isinstance(value, torch.Tensor)), "loss")
        return f"give the one tensor that is minimized, e.g. found[{key!r}], or the sum of several; log the others"
    if isinstance(loss, tuple | list):
        return "give the one tensor that is minimized, e.g. found[0], or the sum of several; log the others"
    return "return the loss at the end of the function" if loss is None else "return the tensor, without .item()"


def refuse_no_step() -> UsageError:
    """The error of a loop that takes the next batch without a step."""
    return UsageError(
        "the loop did not call job.step(loss)",
        hint="call it once for every batch. One that does not count has a weight of 0, if each has its weight: "
        "job.step(loss, weight=...); gradients of several batches are accumulated by a larger global_batch with "
        "Options(micro_batch=N)",
    )
