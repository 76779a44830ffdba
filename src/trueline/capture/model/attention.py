"""torch's attention reads beyond its values where they are fewer than its keys.

`scaled_dot_product_attention` on a processor checks neither length against the other (torch 2.13): memory that is
another's decides the answer, or ends the process with SIGSEGV. What no size of an example shows, a probe's does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CheckedAttention(TorchFunctionMode):
    """Raises ValueError where attention gets keys and values of different lengths."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            keys, values = named["key"].shape[-2], named["value"].shape[-2]
            if keys != values:
                raise ValueError(f"attention has {keys} keys and {values} values: each key needs one value")
        return func(*args, **kwargs)
