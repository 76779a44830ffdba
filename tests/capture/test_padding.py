"""Sequences are filled up only where the model was seen to obey the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trueline.bundle.padding import Padding, cut, fill_up
from trueline.bundle.signature import DATATYPES, Dim, Signature, TensorSpec
from trueline.capture.claims import prove_padding

MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
X = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(np.float32)
EXAMPLE: dict[str, Any] = {"x": X, "mask": MASK}


def signature(example: dict[str, Any] = EXAMPLE, *, each: bool = False, **dims: Dim) -> Signature:
    """The first dimension of each input is the batch, the second the length."""
    specs = tuple(
        TensorSpec(name=name, datatype=DATATYPES[one.dtype], shape=("batch", "length", *one.shape[2:]))
        for name, one in example.items()
    )
    shape = ("batch", "length", 2) if each else ("batch", 2)
    outputs = (TensorSpec(name="y", datatype="FP32", shape=shape),)
    return Signature(inputs=specs, outputs=outputs, dims={"batch": Dim(), "length": Dim(), **dims})


class Model:
    format = "eager"

    def __init__(self, answer: Callable[..., Any], claim: Signature) -> None:
        self.answer, self.signature = answer, claim

    def run(self, inputs: Any) -> dict[str, Any]:
        self.signature.check(inputs)
        return {"y": self.answer(inputs["x"], inputs["mask"]).astype(np.float32)}


def masked_mean(x: Any, mask: Any) -> Any:
    return (x * mask[..., None]).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)[:, None]


def hidden_mean(x: Any, mask: Any) -> Any:
    return masked_mean(x, 1 - mask)  # as nn.Transformer's key_padding_mask: 1 hides


def plain_mean(x: Any, mask: Any) -> Any:
    return x.mean(axis=1)


def each_doubled(x: Any, mask: Any) -> Any:
    return 2 * x * mask[..., None]


def from_the_end(x: Any, mask: Any) -> Any:
    return x[:, -1]


def normalised(x: Any, mask: Any) -> Any:
    return masked_mean(x, mask) * x.shape[1]


@pytest.mark.parametrize(
    ("answer", "padded", "fill"),
    [
        (masked_mean, ("length",), 0),
        (hidden_mean, ("length",), 1),
        (plain_mean, (), 0),
        (from_the_end, (), 0),
        (normalised, (), 0),
    ],
)
def test_a_length_may_be_filled_up_if_the_mask_hides_what_was_added(answer: Any, padded: Any, fill: int) -> None:
    found = prove_padding(Model(answer, signature()), signature(), EXAMPLE)
    assert found.padded == padded
    assert [spec.fill for spec in found.inputs] == [0, fill]


def test_answers_for_each_place_are_cut_to_what_was_asked() -> None:
    claim = signature(each=True)
    found = prove_padding(Model(each_doubled, claim), claim, EXAMPLE)
    assert found.padded == ("length",)
    longer = fill_up(found, EXAMPLE, {"length": 9})
    assert longer["x"].shape == (3, 9, 2)
    assert not longer["mask"][:, 4:].any()
    answer = cut(found, Model(each_doubled, found).run(longer), {"length": 4})
    np.testing.assert_array_equal(answer["y"], each_doubled(X, MASK).astype(np.float32))


def test_without_a_mask_or_room_nothing_is_filled_up() -> None:
    ids = {"x": X, "mask": MASK + 3}  # no mask: values are 3 and 4
    assert prove_padding(Model(masked_mean, signature(ids)), signature(ids), ids).padded == ()
    tight = signature(length=Dim(min=4, max=4))
    assert prove_padding(Model(masked_mean, tight), tight, EXAMPLE).padded == ()


def test_a_length_keeps_to_its_divisor() -> None:
    claim = signature(length=Dim(min=4, multiple_of=4))
    asked: list[int] = []

    def answer(x: Any, mask: Any) -> Any:
        asked.append(x.shape[1])
        return masked_mean(x, mask)

    assert prove_padding(Model(answer, claim), claim, EXAMPLE).padded == ("length",)
    assert set(asked) == {4, 8}


def test_lengths_of_a_bucket_share_a_run_and_others_do_not() -> None:
    padding = Padding(prove_padding(Model(masked_mean, signature()), signature(), EXAMPLE))

    def of(length: int, rows: int = 1) -> Any:
        return {"x": np.zeros((rows, length, 2), np.float32), "mask": np.ones((rows, length), np.int64)}

    assert padding.key(of(3)) == padding.key(of(16, rows=7))
    assert padding.key(of(17)) == padding.key(of(32))
    assert padding.key(of(16)) != padding.key(of(17))
    even = padding.even([of(3), of(7)])
    assert [one["x"].shape[1] for one in even] == [7, 7]
    assert even[0]["mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0]]


def test_a_model_that_draws_or_keeps_a_state_is_never_filled_up() -> None:
    claim = signature()
    assert prove_padding(Model(masked_mean, claim), claim, EXAMPLE).padded == ("length",)
    drawing = Signature(inputs=claim.inputs, outputs=claim.outputs, dims=claim.dims, random=True)
    assert prove_padding(Model(masked_mean, drawing), drawing, EXAMPLE) == drawing
    state = TensorSpec(name="state.h", datatype="FP32", shape=("batch", 2), role="state")
    left = TensorSpec(name="next.h", datatype="FP32", shape=("batch", 2), role="state")
    keeping = Signature(inputs=(*claim.inputs, state), outputs=(*claim.outputs, left), dims=claim.dims)

    class Remembering(Model):
        def run(self, inputs: Any) -> dict[str, Any]:
            return {**super().run(inputs), "next.h": inputs["state.h"]}

    example = {**EXAMPLE, "state.h": np.zeros((3, 2), np.float32)}
    assert prove_padding(Remembering(masked_mean, keeping), keeping, example) == keeping
