"""A claim on a size ends where model and program were compared, unless the exported graph has the size free."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import Bundle, open_bundle
from trueline.bundle.describe import range_text
from trueline.bundle.signature import Dim
from trueline.capture import size_limits
from trueline.capture.api import capture
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof import far_sizes
from trueline.capture.proof.far_sizes import FarSizes
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes
from trueline.errors import NotProven, RequestError
from trueline.runtime.open import open_program
from worlds import recipes
from worlds.cases import few

pytestmark = pytest.mark.slow


class First(nn.Module):
    """The place in the batch decides."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * (i < 50) for i, row in enumerate(x)])


class Many(nn.Module):
    """The number of records decides, where they are taken one by one."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 if len(x) < 100 else row for row in x])


class Window(nn.Module):
    """Right at every power of two."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 if 70 < len(x) < 90 else row for row in x])


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, row in enumerate(x):
            if i == 64:
                break
            out[i] = row
        return out


class Pairs(nn.Module):
    """No comparison at all: an iterator runs out."""

    def forward(self, x: Tensor) -> Tensor:
        factors = itertools.chain([1.0] * 60, itertools.repeat(2.0))
        return torch.stack([row * factor for row, factor in zip(x, factors, strict=False)])


class Cached(nn.Module):
    """A cache by size hides the branch from the exporter."""

    @staticmethod
    @functools.lru_cache
    def factor(size: int) -> float:
        return 1.0 if size < 90 else 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(x.shape[0])


class Rows(nn.Module):
    """One by one, and no limit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


class Positions(nn.Module):
    """A table of 128 positions, which no guard contains and which is longer than any usual probe."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[1]))
        return found


class Records(nn.Module):
    """A table of 100 records."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.table(torch.arange(x.shape[0]))
        return found


class Counts(nn.Module):
    """Records of four numbers; a branch on the count of all numbers."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([torch.tanh(row) * (row.sum() + 1) for row in x])
        return rows * 2 if rows.numel() == 1500 else rows


@pytest.mark.long
def test_records_one_by_one_are_compared_where_all_their_numbers_are_a_number_of_the_code(tmp_path: Path) -> None:
    bundle = captured(Counts, tmp_path / "b")
    assert bundle.signature.dims["batch"].max == 374


class Digits(nn.Module):
    """TorchScript by trace makes a number of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * f"{x.shape[1]:04d}".count("0")


class Halved(nn.Module):
    """Twice as much from 65 records on, which only small values show: a loop halves large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([64]))

    def forward(self, x: Tensor) -> Tensor:
        h = x * [*map(float, (1, 2))][int(torch.searchsorted(self.edges, len(x)))]
        while h.abs().max() > 4:
            h = h / 2
        return h


class Branch(nn.Module):
    """Equal on both sides: the graph has the size free, and the code goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or x.shape[0] < 300:
            return x * 2
        return x + x


def captured(model: type[nn.Module], out: Path, *, lengths: bool = False) -> Bundle:
    torch.manual_seed(0)
    blanks: dict[str, Any] = {"examples": lambda: torch.randn(5, 4)}
    if lengths:
        blanks = {"examples": lambda: torch.randn(3, 5, 4), "dynamic_shapes": lambda: {"x": {1: "length"}}}
    capture(recipes.untrained(model, **blanks), None, out)
    return open_bundle(out)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "most"), few([(First, 50), (Many, 99), (Window, 70), (Breaks, 64), (Pairs, 60), (Cached, 89)], 2)
)
def test_records_that_are_traced_one_by_one_are_claimed_up_to_the_last_batch_that_agrees(
    model: type[nn.Module], most: int, tmp_path: Path
) -> None:
    bundle = captured(model, tmp_path / "b")
    assert bundle.signature.dims["batch"] == Dim(max=most)
    x = np.random.default_rng(0).standard_normal((most, 4)).astype(np.float32)
    for program in bundle.manifest.programs:
        session = open_program(bundle, program.format)
        expected = model()(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(session.run({"x": x})["output"], expected, rtol=1e-6)
        with pytest.raises(RequestError, match=f"at most {most}"):
            session.run({"x": np.resize(x, (most + 1, 4))})


@pytest.mark.jobs
def test_records_one_by_one_without_a_limit_are_claimed_as_far_as_they_were_compared(tmp_path: Path) -> None:
    bundle = captured(Rows, tmp_path / "b")
    batch = bundle.signature.dims["batch"]
    assert batch.probed
    assert batch.max is not None
    assert batch.max >= 64  # 4,096 where the machine is not busy
    assert range_text(bundle.signature) == f"batch from 1 to {batch.max} (probed so far)"
    for format in ("onnx", "torch_export"):
        asked = [one.shapes["x"][0] for one in bundle.evidence() if (one.format, one.verdict) == (format, "agrees")]
        assert max(asked) == batch.max
    with pytest.raises(RequestError, match=f"at most {batch.max}") as refused:
        open_program(bundle).run({"x": np.zeros((batch.max + 1, 4), np.float32)})
    assert "the largest size that capture compared" in refused.value.hint


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "lengths", "symbol", "most"),
    few([(Positions, True, "length", 128), (Records, False, "batch", 100)], 1, pytest.mark.jobs),
)
def test_a_claim_ends_where_the_model_itself_does_far_beyond_the_usual_probes(
    model: type[nn.Module], lengths: bool, symbol: str, most: int, tmp_path: Path
) -> None:
    bundle = captured(model, tmp_path / "b", lengths=lengths)
    assert bundle.signature.dims[symbol] == Dim(max=most)
    shape = (2, most + 1, 4) if lengths else (most + 1, 4)
    with pytest.raises(RequestError, match=f"at most {most}"):
        open_program(bundle).run({"x": np.zeros(shape, np.float32)})


@pytest.mark.jobs
def test_a_trace_is_claimed_up_to_the_last_size_that_agrees(tmp_path: Path) -> None:
    bundle = captured(Digits, tmp_path / "b", lengths=True)
    assert bundle.signature.dims["length"] == Dim(max=10)  # 5 and 10 have three zeros here, 11 has two
    assert bundle.signature.dims["batch"].probed


@pytest.mark.long
def test_a_factor_by_size_that_a_loop_over_large_values_hides_is_refused_with_the_loop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = torch.randn(5, 4).clamp(-3.5, 3.5)
    example[0, 0] = 3.5
    with pytest.raises(NotProven, match=r"while h.abs\(\).max\(\) > 4"):
        capture(recipes.untrained(Halved, examples=lambda: example), None, tmp_path / "b", formats=["torchscript"])


@pytest.mark.jobs
def test_a_free_size_at_which_the_code_goes_another_way_is_claimed_as_far_as_it_was_compared(tmp_path: Path) -> None:
    bundle = captured(Branch, tmp_path / "b")
    batch = bundle.signature.dims["batch"]
    assert batch.probed
    assert batch.max is not None
    assert batch.max >= 300  # 4,096 where the machine is not busy


def test_a_free_size_without_a_guard_has_no_bound(tmp_path: Path) -> None:
    bundle = captured(lambda: nn.Linear(4, 2), tmp_path / "b")  # type: ignore[arg-type]
    assert bundle.signature.dims["batch"] == Dim()


class Cancels(nn.Module):
    """Its answers are what rounding leaves of two nearly equal numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.tanhshrink(x * 0.01)


@pytest.mark.jobs
def test_what_rounding_does_to_a_model_ends_no_claim_at_far_sizes(tmp_path: Path) -> None:
    assert captured(Cancels, tmp_path / "b").signature.dims["batch"] == Dim()


class Remainder(nn.Module):
    """A guard that holds at all small sizes, and at powers of two."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x.shape[1] // 7) % 100 != 50 else x


class Root(nn.Module):
    """torch writes its guard with a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.sym_sqrt(x.shape[1]) < 9 else x  # type: ignore[no-untyped-call]


class Both(nn.Module):
    """Each size alone may be large."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 if i * len(row) < 12_000 else row for i, row in enumerate(x)])


@pytest.mark.jobs
def test_a_guard_that_fails_only_at_some_large_sizes_is_kept(tmp_path: Path) -> None:
    signature = captured(Remainder, tmp_path / "b", lengths=True).signature
    allowed = [signature.allows({"batch": 1, "length": length}) for length in (349, 350, 356, 357, 1050, 9000)]
    assert allowed == [True, False, False, True, False, True]


@pytest.mark.jobs
def test_a_guard_in_functions_of_torch_is_read(tmp_path: Path) -> None:
    assert captured(Root, tmp_path / "b", lengths=True).signature.dims["length"] == Dim(max=80)


@pytest.mark.long
def test_sizes_that_are_large_together_are_compared_too(tmp_path: Path) -> None:
    bundle = captured(Both, tmp_path / "b", lengths=True)
    for size in (64, 110, 128, 200):
        x = np.ones((size, size, 4), np.float32)
        if bundle.signature.allows({"batch": size, "length": size}):
            expected = Both()(torch.from_numpy(x)).numpy()
            np.testing.assert_allclose(open_program(bundle).run({"x": x})["output"], expected)
    assert not bundle.signature.allows({"batch": 200, "length": 200})


class Volume(nn.Module):
    """A loop over records hides one of three sizes whose product decides; the trace has a guard on the other two."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sum(len(row) for row in x) * x.shape[2] < 3000 else x


@pytest.mark.jobs
def test_three_sizes_are_compared_together_beside_a_guard_on_two(tmp_path: Path) -> None:
    examples = [torch.randn(3, 5, 6), torch.randn(2, 8, 4)]
    recipe = recipes.untrained(Volume, examples=lambda: iter(examples))
    bundle = open_bundle(capture(recipe, None, tmp_path / "b").path)
    (name,) = [spec.name for spec in bundle.signature.inputs]
    sizes = (1, 2, 3, 5, 8, 10, 14, 20, 50, 100, 200, 290)
    for shape in itertools.product(sizes, repeat=3):
        x = np.ones(shape, np.float32)
        if bundle.signature.allows(bundle.signature.sizes({name: x})):
            assert x.size < 3000, shape


class Shorter(nn.Module):
    """The shorter side of an image ends at 64."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        side = min(x.shape[1], x.shape[2])
        return (x[:, :side, :side] + self.rows[:side]).sum((1, 2))


def test_what_is_claimed_together_does_not_depend_on_the_time_that_another_claim_took() -> None:
    eager = EagerSession(Shorter(), torch.randn(2, 8, 8), others=[torch.randn(3, 10, 12)])
    far = FarSizes(eager)
    spent = far.allowance(far_sizes.TOGETHER)
    spent.spent_s, spent.counted = 1e9, far_sizes.CHEAP_CALLS
    claim, _ = size_limits.cut_to_compared(far, eager, observe(eager, make_probes(eager.example)), branches=False)
    assert [claim.dims[symbol].max for symbol in eager.signature.symbols] == [64, 64, 64]


class At(nn.Module):
    """Another way at two sizes together; the trace leaves a guard on one of them, at which alone nothing changes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x.shape[0], x.shape[1]) == (93, 1871) else x


class Between(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 31 and 300 < x.shape[1] < 450:
            return x * 2
        return x


class Keyed(nn.Module):
    """A table by two sizes: the trace looks up those of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {(33, 450): 2.0, (70, 11): 3.0}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales.get((x.shape[0], x.shape[1]), 1.0)


class Spelt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if f"{x.shape[0]}x{x.shape[1]}" == "33x450" else x


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("model", "batch", "length"),
    [*few([(At, 93, 1871)], 0, pytest.mark.jobs), *few([(Between, 31, 400), (Spelt, 33, 450), (Keyed, 33, 450)], 1)],
)
def test_two_sizes_that_agree_alone_are_compared_together(
    tmp_path: Path, model: type[nn.Module], batch: int, length: int
) -> None:
    bundle = captured(model, tmp_path / "b", lengths=True)
    assert not bundle.signature.allows({"batch": batch, "length": length})
    assert bundle.signature.allows({"batch": batch, "length": 200})


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : round(x.shape[1] * 0.5)].sum(1)


@pytest.mark.jobs
def test_a_rounded_share_of_a_size_is_proven_in_both_formats_without_a_bound(tmp_path: Path) -> None:
    bundle = captured(Half, tmp_path / "b", lengths=True)
    assert bundle.signature.dims["length"] == Dim()
    assert [program.format for program in bundle.manifest.programs] == ["onnx", "torch_export"]


def test_far_sizes_of_several_dimensions_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 records of 2,048 by 2,048 are 64 GiB, which no machine is asked for."""
    eager = EagerSession(nn.Identity(), torch.randn(2, 2, 4, 5), dynamic_shapes={"input": {2: "height", 3: "width"}})
    claim = eager.calling.presumed
    monkeypatch.setattr(far_sizes, "resize", lambda *_: pytest.fail("the inputs were made"))
    sizes = dict.fromkeys(claim.symbols, 2048)
    assert FarSizes(eager).ask(claim, far_sizes.TOGETHER, sizes) is None


class Shown(nn.Module):
    """Positions count what a mask shows, after a first one for padding: fairseq's, in a table of 50."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = x + self.table(mask.long().cumsum(1) * mask)
        return found


class Words(nn.Module):
    """The same of the ids that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(9, 4), nn.Embedding(50, 4)

    def forward(self, ids: Tensor) -> Tensor:
        shown = ids.ne(1).int()
        found: Tensor = self.words(ids) + self.table((shown.cumsum(1) * shown).long())
        return found


def mask_of(length: int) -> tuple[Tensor, Tensor]:
    shown = torch.tensor([[length // 2], [length - 3], [1]])
    return torch.randn(3, length, 4), torch.arange(length) < shown


def ids_of(length: int) -> Tensor:
    return torch.arange(3 * length).reshape(3, length) % 3


@pytest.mark.jobs
@pytest.mark.parametrize(("model", "make"), few([(Shown, mask_of), (Words, ids_of)], 1))
def test_a_length_ends_where_positions_that_values_count_do_when_all_of_it_is_shown(
    model: type[nn.Module], make: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    blanks: dict[str, Any] = {"examples": lambda: iter([make(9), make(12)])}
    capture(recipes.untrained(model, **blanks), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert bundle.signature.dims["length" if "length" in bundle.signature.dims else "x.1"] == Dim(max=49)
    assert {one.format for one in bundle.manifest.programs} == {"onnx", "torch_export"}


class Picks(nn.Module):
    """The boxes of the best scores: an index into the one is made of the other."""

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        best = scores.flatten(1).topk(3, 1).indices // 2
        return boxes.gather(1, best.unsqueeze(-1).expand(-1, -1, 4))


@pytest.mark.jobs
def test_sizes_that_have_to_be_equal_are_claimed_as_equal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [{"boxes": torch.randn(3, n, 4), "scores": torch.randn(3, n, 2)} for n in (6, 9)]
    capture(recipes.untrained(Picks, examples=lambda: iter(batches)), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    session = open_program(bundle, "torch_export")  # ONNX Runtime takes other ones of equal scores
    given = {"boxes": np.random.rand(2, 40, 4).astype("f"), "scores": np.random.rand(2, 40, 2).astype("f")}
    expected = Picks()(*map(torch.from_numpy, given.values())).numpy()
    np.testing.assert_array_equal(session.run(given)["output"], expected)
    with pytest.raises(RequestError, match="equals"):
        session.run({**given, "scores": given["scores"][:, :20]})


class Resized(nn.Module):
    """A table for the usual length, which the first example has, and interpolated for others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        table: Tensor = self.table
        if x.shape[1] != table.shape[1]:
            table = nn.functional.interpolate(table.mT, size=x.shape[1], mode="linear").mT
        return x + table


@pytest.mark.jobs
def test_where_the_first_example_takes_a_special_way_the_program_is_traced_at_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(3, n, 4) for n in (8, 12)]
    capture(recipes.untrained(Resized, examples=lambda: iter(batches)), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert {one.format for one in bundle.manifest.programs} == {"onnx", "torch_export"}
    sizes = bundle.signature.sizes({"x": batches[0].numpy()})
    assert all(bundle.signature.allows({**sizes, symbol: 8}) for symbol in sizes)


class Cut(nn.Module):
    """Its table of 40 positions ends where the longest record does, not where the padding does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        most = int(lengths.max())
        return x[:, :most] + self.table(torch.arange(most))


def test_lengths_grow_with_their_size_at_far_sizes() -> None:
    first, other = ((torch.randn(2, size, 4), torch.tensor([size, 1])) for size in (5, 9))
    eager = EagerSession(Cut().eval(), first, others=[other])
    claim = eager.calling.presumed
    base = claim.sizes(eager.example)
    answers = [FarSizes(eager).ask(claim, "length", {**base, "length": size}) for size in (40, 64)]
    assert [answer is not None and answer.answered for answer in answers] == [True, False]
