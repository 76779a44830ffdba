"""How a recipe's blanks are called with what a Source reads."""

from __future__ import annotations

from typing import Any

import torch


def call(model: torch.nn.Module, inputs: Any) -> Any:
    """The model on `inputs`: a tuple or list are positional arguments, a dict keywords, all else one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)
