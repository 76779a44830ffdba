"""torch's multi-head attention in the layout of its inputs, with a matrix each for queries, keys and values.

torch's own puts the sequence first, multiplies by one matrix for all three, takes the product apart and merges batch
and heads: nine moves of whole tensors in each layer of an exported program. In eager mode most are views; a runtime
copies, and it finds no pattern of attention to fuse or to quantize. Here heads are split from each projection by one
view and one transpose. The mathematics and the refusals are torch's; rows that a mask hides completely are zeros
without weights and NaN with them, as there. Source: torch.nn.functional.multi_head_attention_forward.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("torch_encoder", "torch_transformer", "nn.MultiheadAttention"),
)

Call = SimpleNamespace
"""The arguments of torch's function, by name."""
_torch: Any = functional
_function: Any = functional.multi_head_attention_forward
_forward: Any = nn.MultiheadAttention.forward
_OF_FUNCTION, _OF_FORWARD = inspect.signature(_function), inspect.signature(_forward)


@contextmanager
def keep_layout() -> Iterator[None]:
    """In the block, `nn.MultiheadAttention` and the function behind it compute without moves of whole tensors."""
    functional.multi_head_attention_forward = _attend_sequence_first
    nn.MultiheadAttention.forward = _attend_module  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        functional.multi_head_attention_forward = _function
        nn.MultiheadAttention.forward = _forward  # type: ignore[method-assign]


def _attend_sequence_first(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    bound = _OF_FUNCTION.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    given = (call.query, call.key, call.value)
    if call.static_k is not None or call.static_v is not None or any(one.is_nested for one in given):
        found: tuple[Tensor, Tensor | None] = _function(*args, **kwargs)
        return found
    return attend(call, batch_first=False)


def _attend_module(module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    bound = _OF_FORWARD.bind(module, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if not module.batch_first or given["query"].dim() != 3 or any(given[name].is_nested for name in _INPUTS):
        found: tuple[Tensor, Tensor | None] = _forward(module, *args, **kwargs)  # which calls the function
        return found
    del given["self"]
    own = {name: getattr(module, name) for name in _OF_MODULE}
    separate = not module._qkv_same_embed_dim
    return attend(
        SimpleNamespace(
            **given, **own, embed_dim_to_check=module.embed_dim, dropout_p=module.dropout,
            out_proj_weight=module.out_proj.weight, out_proj_bias=module.out_proj.bias,
            use_separate_proj_weight=separate,
        ),
        batch_first=True,
    )  # fmt: skip


_INPUTS = ("query", "key", "value")
_OF_MODULE = (
    "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "training",
    "q_proj_weight", "k_proj_weight", "v_proj_weight",
)  # fmt: skip


def attend(call: Call, *, batch_first: bool) -> tuple[Tensor, Tensor | None]:
    """The answer and, where `call` needs them, the weights. Raises what torch's function raises."""
    batched = _torch._mha_shape_check(
        call.query, call.key, call.value, call.key_padding_mask, call.attn_mask, call.num_heads
    )
    axis = 0 if batch_first else 1
    inputs = [one if batched else one.unsqueeze(axis) for one in (call.query, call.key, call.value)]
    batch, length, width = inputs[0].shape[axis], inputs[0].shape[1 - axis], inputs[0].shape[2]
    _check(call, inputs)
    mask, padding, is_causal = _masks(call, batched)
    if mask is not None:
        mask = _by_head(mask, (batch, call.num_heads, length, inputs[1].shape[1 - axis]))
    parts = _project(call, inputs)
    extra = 0
    if call.bias_k is not None:
        parts[1:] = [_append(one, bias, axis) for one, bias in zip(parts[1:], (call.bias_k, call.bias_v), strict=True)]
        extra += 1
    if call.add_zero_attn:
        parts[1:] = [_append(one, one.new_zeros(1, 1, width), axis) for one in parts[1:]]
        extra += 1
    if extra:
        mask, padding = (None if one is None else functional.pad(one, (0, extra)) for one in (mask, padding))
    if padding is not None:
        _torch._check_key_padding_mask(padding, parts[1].shape[1 - axis], batch)
        padding = padding[:, None, None, :]
        mask = padding if mask is None else mask + padding
    to_heads = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
    heads = [one.view(*one.shape[:2], call.num_heads, width // call.num_heads).permute(to_heads) for one in parts]
    mixed, weights = _mix(heads, mask, is_causal, call)
    mixed = mixed.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2)
    answer = functional.linear(mixed, call.out_proj_weight, call.out_proj_bias)
    if weights is not None and call.average_attn_weights:
        weights = weights.mean(dim=1)
    if batched:
        return answer, weights
    return answer.squeeze(axis), None if weights is None else weights.squeeze(0)


def _check(call: Call, inputs: list[Tensor]) -> None:
    query, key, value = inputs
    width = query.shape[2]
    if width != call.embed_dim_to_check or width % call.num_heads:
        raise AssertionError(
            f"was expecting embedding dimension of {call.embed_dim_to_check}, divisible by {call.num_heads} heads, "
            f"but got {width}"
        )
    same = key.shape[:2] == value.shape[:2] if call.use_separate_proj_weight else key.shape == value.shape
    if not same:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    if (call.bias_k is None) != (call.bias_v is None):
        raise AssertionError("bias_k and bias_v are given together")


def _masks(call: Call, batched: bool) -> tuple[Tensor | None, Tensor | None, bool]:
    """Both masks in the dtype of the query, to be added, and whether attention is causal without one."""
    mask, padding, is_causal = call.attn_mask, call.key_padding_mask, call.is_causal
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if padding is not None and not batched:
        padding = padding.unsqueeze(0)
    dtype = call.query.dtype
    padding = _torch._canonical_mask(padding, "key_padding_mask", _torch._none_or_dtype(mask), "attn_mask", dtype)
    if is_causal and padding is None and not call.need_weights:
        return None, None, True
    return _torch._canonical_mask(mask, "attn_mask", None, "", dtype, check_other=False), padding, False


def _by_head(mask: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """[1, 1, queries, keys], or [batch, heads, queries, keys] for a mask of three dimensions."""
    batch, num_heads, length, keys = sizes
    if mask.dim() == 2:
        if mask.shape != (length, keys):
            raise RuntimeError(f"The shape of the 2D attn_mask is {mask.shape}, but should be {(length, keys)}.")
        return mask[None, None]
    if mask.shape != (batch * num_heads, length, keys):
        expected = (batch * num_heads, length, keys)
        raise RuntimeError(f"The shape of the 3D attn_mask is {mask.shape}, but should be {expected}.")
    return mask.view(batch, num_heads, length, keys)


def _project(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values."""
    biases = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
    weights = (
        (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        if call.use_separate_proj_weight
        else call.in_proj_weight.chunk(3)
    )
    return [functional.linear(*of) for of in zip(inputs, weights, biases, strict=True)]


def _append(keys: Tensor, one: Tensor, axis: int) -> Tensor:
    """`keys` with `one` [1, 1, width] behind the last of each record."""
    return torch.cat([keys, one.expand_as(keys.narrow(1 - axis, 0, 1))], dim=1 - axis)


def _mix(heads: list[Tensor], mask: Tensor | None, is_causal: bool, call: Call) -> tuple[Tensor, Tensor | None]:
    """[batch, heads, queries, size] and, where they are needed, the weights."""
    query, key, value = heads
    dropout = call.dropout_p if call.training else 0.0
    if not call.need_weights:
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal), None
    scores = query * math.sqrt(1.0 / query.shape[3]) @ key.transpose(-2, -1)
    weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, p=dropout) if dropout else weights
    return weights @ value, weights
