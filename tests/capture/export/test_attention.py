"""An exported nn.MultiheadAttention answers as torch's own, refuses as it does, and moves few whole tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueline.capture.export import attention, torch_export
from trueline.capture.export.attention import keep_layout
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit
from trueline.recipe.eager_mode import as_trained

BATCH, QUERIES, KEYS, WIDTH = 3, 4, 5, 8
MASKS = ("", "2 float", "3 float", "2 bool", "3 bool")
LAYERS = tuple(product((False, True), repeat=5))
"""Batch first, a bias of keys and values, a zero behind them, other widths of keys and values, biases."""


def layer(first: bool, append: bool, zero: bool, widths: bool, bias: bool, heads: int) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(
        WIDTH, heads, dropout=0.5, bias=bias, add_bias_kv=append, add_zero_attn=zero, kdim=5 if widths else None,
        vdim=6 if widths else None, batch_first=first,
    )  # fmt: skip
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.double().eval()


def inputs(of: nn.MultiheadAttention, batched: bool) -> list[Tensor]:
    sizes = ((QUERIES, WIDTH), (KEYS, of.kdim), (KEYS, of.vdim))
    made = [torch.randn(BATCH if batched else 1, *size, dtype=torch.float64) for size in sizes]
    if not batched:
        return [one[0] for one in made]
    return made if of.batch_first else [one.transpose(0, 1) for one in made]


def mask_of(kind: str, *sizes: int) -> Tensor | None:
    if not kind:
        return None
    drawn = torch.randn(sizes, dtype=torch.float64)
    return drawn > 0.8 if kind.endswith("bool") else drawn


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What `call` returns or raises with torch's own attention, and with ours."""
    found = []
    with torch.no_grad(), as_trained():
        for ours in (False, True):
            try:
                if ours:
                    with keep_layout():
                        found.append(call())
                else:
                    found.append(call())
            except Exception as error:  # noqa: BLE001 - the kind of each is compared
                found.append(type(error))
    return found[0], found[1]


def assert_same(expected: Any, found: Any) -> None:
    if isinstance(expected, type):
        assert found is expected
        return
    for theirs, ours in zip(expected, found, strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.jobs
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: "".join("01"[one] for one in kind))
def test_every_kind_of_call_has_the_answer_and_the_weights_of_torchs_own(kind: tuple[bool, ...]) -> None:
    for heads, batched in ((4, True), (1, True), (4, False), (1, False)):
        one = layer(*kind, heads=heads)
        given = inputs(one, batched)
        records = BATCH if batched else 1
        for mask, padding, weights in product(
            MASKS, ("", "float", "bool"), ((False, True), (True, True), (True, False))
        ):
            sizes = (QUERIES, KEYS) if mask.startswith("2") else (records * heads, QUERIES, KEYS)
            how: dict[str, Any] = {
                "attn_mask": mask_of(mask, *sizes),
                "key_padding_mask": mask_of(padding, *((BATCH, KEYS) if batched else (KEYS,))),
                "need_weights": weights[0],
                "average_attn_weights": weights[1],
            }
            expected, found = both(partial(one, *given, **how))
            assert not isinstance(expected, type), expected
            assert_same(expected, found)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_causal_attention_of_a_sequence_to_itself_is_torchs(first: bool, weights: bool, padding: bool) -> None:
    one = layer(first, False, False, False, True, 4)
    x = inputs(one, True)[0]
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)
    hidden = torch.zeros(BATCH, QUERIES, dtype=torch.float64) if padding else None
    how = {"attn_mask": mask, "is_causal": True, "need_weights": weights, "key_padding_mask": hidden}
    assert_same(*both(lambda: one(x, x, x, **how)))
    assert_same(*both(lambda: one(x, x, x, is_causal=True, need_weights=weights)))  # refused: without a mask


@pytest.mark.parametrize("weights", [False, True])
def test_a_row_that_a_mask_hides_completely_is_what_it_is_in_torch(weights: bool) -> None:
    one = layer(True, False, False, False, True, 4)
    x = inputs(one, True)[0]
    hidden = torch.ones(BATCH, QUERIES, dtype=torch.bool)
    expected, found = both(lambda: one(x, x, x, key_padding_mask=hidden, need_weights=weights))
    assert expected[0].isnan().all() == weights
    assert_same(expected, found)


REFUSED: Mapping[str, Callable[[nn.MultiheadAttention, Tensor], Any]] = {
    "a mask of other sizes": lambda one, x: one(x, x, x, attn_mask=torch.zeros(QUERIES, QUERIES + 1).double()),
    "a mask for other heads": lambda one, x: one(x, x, x, attn_mask=torch.zeros(2, QUERIES, QUERIES).double()),
    "padding of another length": lambda one, x: one(x, x, x, key_padding_mask=torch.zeros(BATCH, 2).double()),
    "values of another length": lambda one, x: one(x, x, x[:, :2]),
    "another width": lambda one, x: one(x[..., :4], x[..., :4], x[..., :4]),
    "a mask of whole numbers": lambda one, x: one(x, x, x, attn_mask=torch.zeros(QUERIES, QUERIES).int()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_refuses_is_refused(what: str) -> None:
    one = layer(True, False, False, False, True, 4)
    x = inputs(one, True)[0]
    expected, found = both(lambda: REFUSED[what](one, x))
    assert isinstance(expected, type)
    assert found is expected


def test_the_function_itself_is_torchs_with_keys_of_its_own_too() -> None:
    one = layer(False, False, False, False, True, 4)
    x = inputs(one, True)[0]
    usual = (WIDTH, 4, one.in_proj_weight, one.in_proj_bias, None, None, False, 0.0, one.out_proj.weight, None)
    static = torch.randn(BATCH * 4, KEYS, WIDTH // 4, dtype=torch.float64)
    assert_same(*both(lambda: F.multi_head_attention_forward(x, x, x, *usual, training=False)))
    assert_same(
        *both(lambda: F.multi_head_attention_forward(x, x, x, *usual, training=False, static_k=static, static_v=static))
    )


def test_torchs_own_attention_is_back_after_an_error() -> None:
    before = F.multi_head_attention_forward, nn.MultiheadAttention.forward
    with pytest.raises(AssertionError), keep_layout():
        nn.MultiheadAttention(4, 2)(torch.ones(1, 1, 4), torch.ones(1, 4), torch.ones(1, 4))
    assert (F.multi_head_attention_forward, nn.MultiheadAttention.forward) == before


def emitted(model: nn.Module, example: Sequence[Tensor], folder: Path) -> onnx.ModelProto:
    names = ("x", "memory")[: len(example)]
    shapes = {name: {0: "batch", 1: "length" if name == "x" else "other"} for name in names}
    calling = EagerSession(model, tuple(example), dynamic_shapes=shapes).calling
    return onnx.load(emit.emit(torch_export.export(model, calling), folder))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(one, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        found: Tensor = self.layers(x, memory)
        return found


@pytest.mark.parametrize(
    ("make", "attentions"),
    [
        pytest.param(Encoder, 3, id="encoder", marks=pytest.mark.jobs),
        pytest.param(Decoder, 2, id="decoder with cross-attention"),
    ],
)
def test_an_attention_layer_moves_four_tensors_and_takes_nothing_apart(
    make: type[nn.Module], attentions: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    example = [torch.randn(2, 6, 16), torch.randn(2, 9, 16)][: 1 if make is Encoder else 2]
    graph = emitted(model, example, tmp_path).graph
    count = Counter(node.op_type for node in graph.node)
    # queries, keys (turned in the same move, or in the next), values, and what the heads answer
    weights = {one.name for one in graph.initializer}
    moved = [node for node in graph.node if node.op_type == "Transpose" and node.input[0] not in weights]
    assert len(moved) <= 5 * attentions
    assert not {"Gather", "Split", "Slice", "Squeeze"} & count.keys(), count
    session = onnxruntime.InferenceSession(str(tmp_path / emit.FILE), providers=["CPUExecutionProvider"])
    others = [torch.randn(3, 7, 16), torch.randn(3, 4, 16)][: len(example)]
    with torch.no_grad(), as_trained():
        expected = model(*others).numpy()
    feeds = dict(zip([one.name for one in session.get_inputs()], [one.numpy() for one in others], strict=True))
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_arguments_of_torchs_function_are_the_known_ones() -> None:
    """A new one would be ignored."""
    of_forward = """
        query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal
    """
    of_function = """
        embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p out_proj_weight
        out_proj_bias training use_separate_proj_weight q_proj_weight k_proj_weight v_proj_weight static_k static_v
    """
    assert attention._OF_FORWARD.parameters.keys() == {"self", *of_forward.split()}
    assert attention._OF_FUNCTION.parameters.keys() == {*of_forward.split(), *of_function.split()}
