"""Several free dimensions: found, named, exported, and kept to by every program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle.signature import Dim
from trueline.capture.export import torch_export
from trueline.capture.export.exported import Exported
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import emit as onnx_emit
from trueline.errors import CaptureError, RequestError
from trueline.runtime.compare import compare
from trueline.runtime.open import open_session

pytestmark = pytest.mark.slow

EMITTERS = {"onnx": onnx_emit.emit, "torch_export": torch_export.emit}


class Masked(nn.Module):
    """Ids and a mask of one length; the mean of what the mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        shown = mask.unsqueeze(-1).float()
        found: Tensor = (self.embed(ids) * shown).sum(1) / shown.sum(1).clamp(min=1)
        return found


class Stride(nn.Module):
    """Every other step of b beside a: b is twice as long."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b[:, ::2]


class Blocks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1] // 4, 4).sum(2)


class Halving(nn.Module):
    """Pads as the size asks, before each of three strides; sizes in multiples of eight take one way."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(2, 2, 3, stride=2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            below, right = (1 if size % 2 == 0 else 2 for size in x.shape[2:])
            x = convolution(nn.functional.pad(x, (0, right, 0, below)))
        return x.mean((2, 3))


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(6, 2)


def masked(length: int, batch: int = 3) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 20, (batch, length)), "mask": torch.ones(batch, length, dtype=torch.bool)}


def exported(module: nn.Module, example: Any, **free: Any) -> tuple[EagerSession, Exported]:
    eager = EagerSession(module.eval(), example, **free)
    return eager, torch_export.export(eager.module, eager.calling)


def test_a_dimension_in_which_examples_differ_is_free_and_one_symbol_where_the_program_ties_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager, found = exported(Masked(), masked(5), others=[masked(7), masked(2, batch=1)])
    assert [spec.shape for spec in found.signature.inputs] == [("batch", "length"), ("batch", "length")]
    assert found.signature.dims == {"batch": Dim(), "length": Dim()}
    for format, emit in EMITTERS.items():
        session = open_session(format, emit(found, tmp_path / format), found.signature)
        for length in (1, 4, 9):
            asked = {name: tensor.numpy() for name, tensor in masked(length, batch=2).items()}
            assert compare(eager.run(asked), session.run(asked)).agrees
        with pytest.raises(RequestError, match=r"input 'mask' has size 4 .*\(length\).* they must be equal"):
            session.run({"ids": np.zeros((2, 5), np.int64), "mask": np.ones((2, 4), np.bool_)})


def test_the_example_that_is_traced_has_no_length_of_one() -> None:
    eager = EagerSession(Masked(), masked(1), others=[masked(6)])
    assert eager.example["ids"].shape == (3, 6)


def test_what_is_declared_is_free_under_its_name_and_within_its_range() -> None:
    shapes = {"ids": {1: torch.export.Dim("steps", min=2, max=40)}, "mask": {-1: "steps"}}
    _, found = exported(Masked(), masked(5), dynamic_shapes=shapes)
    assert found.signature.inputs[1].shape == ("batch", "steps")
    assert found.signature.dims["steps"] == Dim(min=2, max=40)


def test_a_relation_between_lengths_is_a_guard_of_every_program() -> None:
    example = (torch.randn(3, 4), torch.randn(3, 8))
    _, found = exported(Stride(), example, others=[(torch.randn(3, 5), torch.randn(3, 10))])
    assert [guard.text for guard in found.signature.guards] == ["a.1 == (1 + b.1) // 2"]
    found.signature.check({"a": np.zeros((1, 3), np.float32), "b": np.zeros((1, 6), np.float32)})
    with pytest.raises(RequestError, match=r"a.1 = 3, b.1 = 9 .* in which a.1 is half of b.1, rounded up"):
        found.signature.check({"a": np.zeros((1, 3), np.float32), "b": np.zeros((1, 9), np.float32)})


def test_a_length_that_has_to_divide_is_a_multiple_in_the_signature() -> None:
    _, found = exported(Blocks(), torch.randn(3, 8), dynamic_shapes={"x": {1: "length"}})
    assert found.signature.dims["length"] == Dim(min=4, multiple_of=4)
    with pytest.raises(RequestError, match="a multiple of 4"):
        found.signature.check({"x": np.zeros((1, 6), np.float32)})


def test_a_free_dimension_for_which_the_program_is_fixed_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"works for a 'length' of 6 only \(dimension 1 of input 'x'\)") as refused:
        exported(Fixed(), torch.randn(3, 6), dynamic_shapes={"x": {1: "length"}})
    assert re.match(r".*\.py:\d+: return ", refused.value.hint), "the line that fixes it"


class Positioned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm([6, 4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x)
        return found


def test_a_length_that_a_module_of_torch_fixes_is_refused_with_the_line_that_calls_it() -> None:
    with pytest.raises(CaptureError, match="works for a 'length' of 6 only") as refused:
        exported(Positioned(), torch.randn(3, 6, 4), dynamic_shapes={"x": {1: "length"}})
    assert refused.value.hint.endswith(": found: torch.Tensor = self.norm(x)")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"idz": {1: "length"}}, "dynamic_shapes declares 'idz'"),
        ({"ids": {2: "length"}}, "axis 2 of 'ids', which has 2 axes"),
        ({"ids": {1: 3.5}}, "expected a name such as 'length'"),
        ({"ids": "length"}, "expected {input: {axis: name}}"),
    ],
)
def test_a_declaration_that_names_no_dimension_is_refused_in_words(shapes: Any, words: str) -> None:
    with pytest.raises(CaptureError) as refused:
        EagerSession(Masked(), masked(5), dynamic_shapes=shapes)
    assert words in refused.value.message


def test_examples_that_are_called_otherwise_are_refused() -> None:
    with pytest.raises(CaptureError, match="example 2 has the inputs"):
        EagerSession(Masked(), masked(5), others=[{"ids": torch.zeros(3, 5, dtype=torch.int64)}])


def test_a_padded_encoder_is_held_against_the_model_as_it_was_trained() -> None:
    """torch's fused path answers zeros where the mask is set; training never took it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    x, pad = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    pad[1:, 3:] = True
    eager = EagerSession(encoder, {"src": x, "src_key_padding_mask": pad})
    trained = encoder(x, src_key_padding_mask=pad).detach().numpy()  # with gradients: no fused path
    found = eager.run({"src": x.numpy(), "src_key_padding_mask": pad.numpy()})["output"]
    np.testing.assert_allclose(found, trained, atol=1e-5)
    assert (found[1, 3:] != 0).all()


@pytest.mark.parametrize("format", EMITTERS)
def test_a_size_that_is_fixed_by_what_divides_it_is_free_in_multiples(format: str, tmp_path: Path) -> None:
    shapes = {"x": {0: "batch", 2: "height", 3: "width"}}
    eager = EagerSession(Halving().eval(), (torch.rand(2, 2, 32, 48),), dynamic_shapes=shapes)
    exported = torch_export.export(eager.module, eager.calling)
    assert exported.signature.dims["height"] == exported.signature.dims["width"] == Dim(min=8, multiple_of=8)
    assert exported.signature.dims["batch"].multiple_of == 1
    session = open_session(format, EMITTERS[format](exported, tmp_path), exported.signature)
    for height, width in ((8, 8), (8, 40), (64, 24)):
        x = {"x": torch.rand(3, 2, height, width).numpy()}
        assert compare(eager.run(x), session.run(x)).agrees
    with pytest.raises(RequestError, match=r"size 12 in dimension 2 \(height\), proven only for .* a multiple of 8"):
        session.run({"x": np.zeros((1, 2, 12, 8), np.float32)})


class ExpertsChoose(nn.Module):
    """Each of three experts takes two thirds of the records, and at least one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = x[:, :3].softmax(-1).t().topk(max(1, len(x) * 2 // 3), -1)
        made = torch.einsum("ekd,edf->ekf", x[chosen], self.weight) * share[..., None]
        return torch.zeros_like(x).index_add(0, chosen.reshape(-1), made.reshape(-1, 6))


@pytest.mark.parametrize("format", EMITTERS)
def test_a_share_of_the_batch_that_torch_takes_for_more_than_one_may_be_one(format: str, tmp_path: Path) -> None:
    eager = EagerSession(ExpertsChoose().eval(), (torch.randn(8, 6),))
    exported = torch_export.export(eager.module, eager.calling)
    assert exported.signature.dims["batch"] == Dim(min=1)
    session = open_session(format, EMITTERS[format](exported, tmp_path), exported.signature)
    for batch in (1, 2, 3, 11):
        x = {"x": torch.randn(batch, 6).numpy()}
        assert compare(eager.run(x), session.run(x)).agrees


@pytest.mark.parametrize("size", [6, 7, 9, 10])
def test_a_size_that_stays_fixed_in_multiples_is_refused_as_before(size: int) -> None:
    class Exact(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(size, 2)

    eager = EagerSession(Exact(), (torch.rand(2, size),), dynamic_shapes={"x": {0: "batch", 1: "length"}})
    with pytest.raises(CaptureError, match=f"works for a 'length' of {size} only"):
        torch_export.export(eager.module, eager.calling)
