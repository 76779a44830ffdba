"""A claim takes the user's examples, or says which it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline import events
from trueline.bundle import Bundle, open_bundle
from trueline.bundle.describe import range_text
from trueline.bundle.signature import Dim
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.attempt import Captured
from trueline.errors import RequestError
from trueline.runtime.open import open_program
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow


class Trimmed(nn.Module):
    """At length 5 nothing is trimmed, and torch makes a constant of the 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, int(x.shape[1] * 0.15) :].mean(1)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : int(x.shape[1] ** 0.5)].sum(1)


class Leading(nn.Module):
    """Batch 1 too."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x[: max(1, int(x.shape[0] * 0.2))].mean(0)


class Counted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if int(x.numel()) < 3000 else x


class Bucketed(nn.Module):
    """Another graph for each bucket; TorchScript keeps the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        bucket = 0
        for i, end in enumerate((4, 8, 16, 32, 64, 128, 256)):
            if x.shape[1] > end:
                bucket = i + 1
        return x * self.scale[bucket]


def examples(*shapes: tuple[int, ...]) -> Callable[[], Iterator[Tensor]]:
    def yielded() -> Iterator[Tensor]:
        torch.manual_seed(0)
        for shape in shapes:
            yield torch.randn(shape)

    return yielded


def captured(model: nn.Module, out: Path, *shapes: tuple[int, ...], **options: Any) -> tuple[Bundle, Captured]:
    made = capture(recipes.untrained(lambda: model.eval(), examples=examples(*shapes)), None, out, **options)
    return open_bundle(out), made


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "shapes"),
    few(
        [
            (Trimmed, ((3, 5, 4), (2, 9, 4), (1, 40, 4))),
            (Root, ((3, 5, 4), (2, 40, 4), (1, 17, 4))),
            (Leading, ((5, 4), (1, 4), (40, 4))),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_what_is_a_constant_at_the_examples_sizes_is_traced_at_larger_ones(
    model: type[nn.Module], shapes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    bundle, _ = captured(model(), tmp_path / "b", *shapes)
    assert set(bundle.signature.dims.values()) == {Dim()}
    for format in ("onnx", "torch_export"):
        session = open_program(bundle, format)
        for size in (1, 2, 6, 7, 13, 14, 20, 99, 100, 1000):
            x = np.random.default_rng(size).standard_normal((size, size, 4)[-len(shapes[0]) :]).astype(np.float32)
            expected = model()(torch.from_numpy(x)).numpy()
            np.testing.assert_allclose(session.run({"x": x})["output"], expected, rtol=1e-4, atol=1e-4)


def test_a_number_that_is_made_of_all_sizes_stays_a_function_of_them(tmp_path: Path) -> None:
    bundle, _ = captured(Counted(), tmp_path / "b", (3, 5, 4), (2, 9, 4))
    assert [guard.text for guard in bundle.signature.guards] == ["4 * length * batch < 3000"]


@pytest.mark.jobs
def test_a_program_of_few_sizes_gives_way_to_torchscript_that_takes_all_examples(tmp_path: Path) -> None:
    model = Bucketed()
    bundle, made = captured(model, tmp_path / "b", (3, 5, 4), (2, 40, 4))
    assert bundle.manifest.serve == "torchscript"
    refused = next(one for one in made.programs if one.format == "onnx")
    assert "which leaves out example 2 (batch 2, length 40)" in refused.why
    for length in (1, 5, 40, 300):
        x = np.ones((2, length, 4), np.float32)
        expected = model(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(open_program(bundle).run({"x": x})["output"], expected)


@pytest.mark.jobs
def test_a_format_that_leaves_out_an_example_is_sealed_with_a_warning(tmp_path: Path) -> None:
    seen: list[str] = []
    with events.listening(lambda name, fields: seen.append(name)):
        bundle, made = captured(Bucketed(), tmp_path / "b", (3, 5, 4), (2, 40, 4), formats=["torch_export"])
    assert bundle.signature.dims["length"] == Dim(min=5, max=8)
    assert "warning: it refuses your example 2 (batch 2, length 40)" in made.programs[0].summary
    assert "example.excluded" in seen


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[..., None]


@pytest.mark.jobs
def test_an_example_with_one_row_for_all_records_is_left_out_with_a_warning(tmp_path: Path) -> None:
    """torch.export takes the rows of both inputs for one size."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch, rows, length in ((2, 1, 9), (4, 4, 12)):
            yield torch.ones(batch, length, 3), torch.ones(rows, length)

    made = capture(recipes.untrained(lambda: Scaled().eval(), examples=pairs), None, tmp_path / "b")
    said = "refuses your example 1 (x [2, 9, 3], scale [1, 9])"
    assert all(said in one.summary or one.verdict == "refused" for one in made.programs), made.programs
    with pytest.raises(RequestError):
        open_program(open_bundle(tmp_path / "b")).run(
            {"x": np.ones((2, 9, 3), np.float32), "scale": np.ones((1, 9), np.float32)}
        )


class Cached(nn.Module):
    """torch's attention answers keys and values of different lengths, and no other runtime does."""

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        keys, values = (torch.cat([one, x], 2) for one in past)
        return nn.functional.scaled_dot_product_attention(x, keys, values), (keys, values)


def test_attention_never_reads_memory_behind_its_values() -> None:
    first, *others = caches()
    eager = EagerSession(Cached().eval(), first, others=others)
    x, kept = np.zeros((1, 2, 1, 8), np.float32), [np.zeros((1, 2, size, 8), np.float32) for size in (9, 5)]
    for keys, values in (kept, reversed(kept)):
        with pytest.raises(ValueError, match=r"attention has (10 keys and 6|6 keys and 10) values"):
            eager.run({"x": x, "past.0": keys, "past.1": values})


class Accepted(nn.Module):
    """How many drafted words are those that the larger model says, which says one more."""

    def forward(self, draft: Tensor, logits: Tensor) -> Tensor:
        return (draft == logits.argmax(-1)[:, :-1]).int().cumprod(1).sum(1)


class Beams(nn.Module):
    def forward(self, logits: Tensor, scores: Tensor) -> Tensor:
        batch, beams = scores.shape
        words = logits.log_softmax(-1).view(batch, beams, logits.shape[1])
        return (scores[..., None] + words).flatten(1).exp().cumsum(-1)


def caches() -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for batch, length in ((4, 5), (3, 9)):
        yield {"x": torch.randn(batch, 2, 1, 8), "past": tuple(torch.randn(batch, 2, length, 8) for _ in "kv")}


def drafts() -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    for batch, length in ((4, 4), (3, 6)):
        yield torch.randint(0, 3, (batch, length)), torch.randn(batch, length + 1, 3)


def beams() -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    for batch in (4, 3):
        yield torch.randn(batch * 3, 7), torch.randn(batch, 3)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "given", "guard"),
    few(
        [
            (Beams, beams, "logits.0 is three times batch"),
            (Accepted, drafts, "logits.1 is draft.1 plus 1"),
            (Cached, caches, "past.0.2 equals past.1.2"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_sizes_that_follow_from_each_other_in_all_examples_are_claimed_together(
    model: type[nn.Module], given: Callable[[], Iterator[Any]], guard: str, tmp_path: Path
) -> None:
    capture(recipes.untrained(lambda: model().eval(), examples=given), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert bundle.manifest.serve in ("onnx", "torch_export")
    assert guard in range_text(bundle.signature)
    assert len(bundle.signature.guards) == 1
    assert all(dim.max is None for dim in bundle.signature.dims.values())
