"""A program that disagrees only where a mask hides a whole row is sealed with that as a condition, and keeps to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.bundle.signature import DATATYPES, Dim, Rows, Signature, TensorSpec
from trueline.capture.api import capture
from trueline.capture.cpp import export as cpp_export
from trueline.capture.onnx import translations
from trueline.capture.proof import narrowing
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import judge
from trueline.capture.verify import verify
from trueline.errors import NotProven, RequestError
from trueline.runtime.open import open_program, replay
from worlds.recipes import untrained

MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
LEFT = np.flip(MASK, 1).copy()


def signature(inputs: dict[str, Any]) -> Signature:
    specs = tuple(
        TensorSpec(name=name, datatype=DATATYPES[one.dtype], shape=("batch", *one.shape[1:]))
        for name, one in inputs.items()
    )
    return Signature(inputs=specs, outputs=(), dims={"batch": Dim()})


class Answers:
    """A Session that answers with how much each row shows, and otherwise where `wrong` says so."""

    format = "fake"

    def __init__(self, claim: Signature, wrong: Any = lambda mask: np.zeros(mask.shape[:-1], bool)) -> None:
        self.signature = claim
        self.wrong = wrong

    def run(self, inputs: Any) -> dict[str, Any]:
        self.signature.check(inputs)
        shown = inputs["mask"].sum(axis=-1).astype(np.float32)
        return {"y": np.where(self.wrong(inputs["mask"]), np.float32(-9), shown)}


def claimed(wrong: Any, mask: Any = MASK) -> Signature | None:
    """What a program that is `wrong` there may claim."""
    example = {"mask": mask}
    whole = signature(example)
    observations = observe(Answers(whole), make_probes(example, signature=whole))
    proof = judge(Answers(whole, wrong), observations)
    found = narrowing.narrow(whole, [example], observations, proof.evidence)
    if found is not None:
        assert not proof.proven
        assert judge(Answers(found, wrong), observations).proven
    return found


def hidden(mask: Any) -> Any:
    return ~mask.any(axis=-1)


def hidden_at_first(mask: Any) -> Any:
    return mask[..., 0] == 0


def test_a_program_that_disagrees_nowhere_claims_everything() -> None:
    assert claimed(lambda mask: np.zeros(len(mask), bool)) is None


def test_one_that_disagrees_on_hidden_rows_claims_rows_that_show_something() -> None:
    found = claimed(hidden)
    assert found is not None
    assert found.rows == {"mask": "some"}


def test_one_that_disagrees_on_rows_that_begin_hidden_claims_rows_that_show_their_first() -> None:
    found = claimed(hidden_at_first)
    assert found is not None
    assert found.rows == {"mask": "first"}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda mask: mask.sum(axis=-1) == 1, id="rows that show one value"),
        pytest.param(lambda mask: mask.all(axis=-1), id="rows that show all"),
        pytest.param(lambda mask: np.full(len(mask), len(mask) == 1), id="a single record"),
    ],
)
def test_one_that_disagrees_elsewhere_is_not_saved_by_a_mask(wrong: Any) -> None:
    assert claimed(wrong) is None


def test_how_the_user_pads_is_never_excluded() -> None:
    assert claimed(hidden_at_first, LEFT) is None  # padding in front is in the example
    both = LEFT | (np.arange(3)[:, None] == 1) * 0
    both[1] = 0
    assert claimed(hidden, both) is None  # and here a row that is hidden


def test_ids_and_booleans_for_each_record_are_no_masks_of_rows() -> None:
    ids = {"ids": np.array([[1, 5], [0, 2]]), "flag": np.array([True, False])}
    assert narrowing.narrowings(signature(ids), ids) == ()


@pytest.mark.parametrize(
    ("rows", "mask", "said"),
    [
        ("some", [[1, 0], [0, 0]], r"'mask' hides row \[1\].*each row of mask has a value other than 0"),
        ("first", [[0, 1], [1, 0]], r"'mask' hides row \[0\].*each row of mask begins with a value other than 0"),
    ],
)
def test_a_request_that_breaks_the_condition_is_refused_with_the_row(rows: Rows, mask: Any, said: str) -> None:
    given = {"mask": np.array(mask)}
    whole = signature(given)
    whole.check(given)
    with pytest.raises(RequestError, match=said):
        whole.with_rows({"mask": rows}).check(given)
    whole.with_rows({"mask": rows}).check({"mask": np.array([[1, 0], [1, 1]])})


def test_rows_of_a_mask_with_several_dimensions_lie_along_the_last() -> None:
    given = {"mask": np.ones((2, 1, 3, 4), bool)}
    claim = signature(given).with_rows({"mask": "some"})
    claim.check(given)
    given["mask"][1, 0, 2] = False
    with pytest.raises(RequestError, match=r"hides row \[1, 0, 2\]"):
        claim.check(given)


def test_the_condition_goes_into_the_tables_of_a_cpp_project() -> None:
    text = cpp_export.signature_text(signature({"mask": MASK}).with_rows({"mask": "first"}))
    assert '{"mask", at::kLong, "INT64", {{-1, 0}, {4, -1}}, Rows::first},' in text


def hiding(mask: Tensor) -> Tensor:
    """What is added to scores."""
    return torch.zeros(mask.shape).masked_fill(mask == 0, float("-inf"))


@pytest.fixture
def as_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in ONNX as torch.onnx writes it: no number where a row is hidden whole, and torch says zero."""
    monkeypatch.delitem(translations.TRANSLATIONS, torch.ops.aten.scaled_dot_product_attention.default)


class Attends(nn.Module):
    """Attention whose answer for a row that is hidden whole lies in how softmax is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        found = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=hiding(mask)[:, None, None])
        answer: Tensor = self.out(found[:, 0])
        return answer


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.usefixtures("as_exported")
def test_an_encoder_keeps_its_onnx_program_and_every_other_part_of_the_line_knows_the_condition(tmp_path: Path) -> None:
    def examples() -> Any:
        yield {"ids": torch.arange(12).reshape(3, 4) % 10, "mask": torch.as_tensor(MASK)}

    recipe = untrained(Attends, name="encoder", examples=examples)
    captured = capture(recipe, None, tmp_path / "b")
    assert [one.verdict for one in captured.programs] == ["proven", "proven"]
    bundle = open_bundle(captured.path)
    assert bundle.program("onnx").rows == {"mask": "some"}
    assert bundle.program("torch_export").rows == {}
    assert bundle.signature.rows == {}
    text = describe(bundle)
    assert "onnx: only where each row of mask has a value other than 0" in text
    carried = {one.key: one.value for one in onnx.load(bundle.program_path("onnx")).metadata_props}
    assert msgspec.json.decode(carried["trueline.signature"], type=Signature).rows == {"mask": "some"}

    onnx_session, torch_session = open_program(bundle, "onnx"), open_program(bundle, "torch_export")
    replay(bundle, onnx_session)
    asked: dict[str, Any] = {"ids": np.zeros((1, 4), np.int64), "mask": np.zeros((1, 4), np.int64)}
    with torch.no_grad():
        wanted = Attends()(*map(torch.as_tensor, asked.values())).numpy()
    (answer,) = torch_session.run(asked).values()
    np.testing.assert_allclose(answer, wanted, rtol=1e-5)
    with pytest.raises(RequestError, match="hides row"):
        onnx_session.run(asked)


class LooksBack(Attends):
    """Each position sees what stands before it: one that begins hidden sees nothing."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        seen = hiding(mask[:, None, None] * torch.ones(ids.shape[1], ids.shape[1]).tril())
        answer: Tensor = self.out(nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen)[:, 0])
        return answer


@pytest.mark.slow
@pytest.mark.usefixtures("as_exported")
@pytest.mark.long
def test_a_program_that_is_proven_for_fewer_masks_speaks_against_no_other_when_a_bundle_is_verified(
    tmp_path: Path,
) -> None:
    recipe = untrained(
        LooksBack, name="decoder",
        examples=lambda: {"ids": torch.arange(12).reshape(3, 4) % 10, "mask": torch.as_tensor(MASK)},
        dynamic_shapes=lambda: {"ids": {1: "length"}, "mask": {1: "length"}},
    )  # fmt: skip
    captured = capture(recipe, None, tmp_path / "b")
    bundle = open_bundle(captured.path)
    assert (bundle.program("onnx").rows, bundle.program("torch_export").rows) == ({"mask": "first"}, {})
    verified = verify(
        captured.path
    )  # it asks the rows backwards: padding comes first, of which the oracle says nothing
    assert [(one.format, one.why) for one in verified.programs] == [("onnx", ""), ("torch_export", "")]
    assert verified.programs[1].probes > 15


@pytest.mark.slow
@pytest.mark.long
def test_a_row_that_an_added_mask_hides_whole_is_zero_in_onnx_too(tmp_path: Path) -> None:
    recipe = untrained(
        LooksBack, name="decoder",
        examples=lambda: {"ids": torch.arange(12).reshape(3, 4) % 10, "mask": torch.as_tensor(MASK)},
        dynamic_shapes=lambda: {"ids": {1: "length"}, "mask": {1: "length"}},
    )  # fmt: skip
    bundle = open_bundle(capture(recipe, None, tmp_path / "b", formats=["onnx"]).path)
    assert bundle.program("onnx").rows == {}
    asked = {"ids": np.arange(6).reshape(2, 3), "mask": np.array([[0, 0, 0], [0, 1, 0]])}
    with torch.no_grad():
        wanted = LooksBack()(*map(torch.as_tensor, asked.values())).numpy()
    (answer,) = open_program(bundle, "onnx").run(asked).values()
    np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.jobs
@pytest.mark.slow
@pytest.mark.usefixtures("as_exported")
def test_a_hidden_row_in_the_users_own_example_refuses_the_program(tmp_path: Path) -> None:
    def examples() -> Any:
        yield {"ids": torch.arange(8).reshape(2, 4) % 10, "mask": torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])}

    recipe = untrained(Attends, name="encoder", examples=examples)
    with pytest.raises(NotProven, match=r"onnx program .* on probe .* (differs|NaN)"):
        capture(recipe, None, tmp_path / "b", formats=["onnx"])
