"""What a value decides in Python is seen, where a trace does not see it: it is refused, or answered by a script."""

from __future__ import annotations

import collections
import functools
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.errors import NotProven
from trueline.runtime.open import open_program
from worlds.cases import few
from worlds.recipes import untrained

pytestmark = pytest.mark.slow
RARE = 12345.0
"""A number that no probe holds."""
IDS = torch.tensor([[1, 5, 0, 2], [3, 3, 4, 9], [7, 2, 1, 1]])


class CatchesWhatATraceRaises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            odd = bool((x == RARE).any())
        except Exception:  # noqa: BLE001 - as a user writes it
            odd = False
        return x * 2 if odd else x + 1


class UnlessExporting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and (x == RARE).any():
            return x * 2
        return x + 1


class ByALargest(nn.Module):
    """The number varies, and what it decides does not."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.max().item() == RARE:
            return x * 2
        return x + 1


class CatchesNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            values = x.numpy()
        except Exception:  # noqa: BLE001 - as a user writes it
            return x + 1
        return x * 2 if (values == np.float32(RARE)).any() else x + 1


class CountsPlaces(nn.Module):
    """A size that follows from values."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x + 1
        return x * 2 if (x == RARE).nonzero().shape[0] else x + 1


class FromDlpack(nn.Module):
    """No export follows it, so that a trace is what is left."""

    def forward(self, x: Tensor) -> Tensor:
        values = np.from_dlpack(x)  # type: ignore[arg-type]
        return x * 2 if (values == np.float32(RARE)).any() else x + 1


class Contains(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + float(np.sin(x.shape[1]))
        return y * 2 if RARE in x else y


class InASet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.special = {123_456, 37}

    def forward(self, ids: Tensor) -> Tensor:
        return ids * 2 if ids[0, 0].item() in self.special else ids + 1


class AsAText(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids * 2 if f"user-{ids.max().item()}" == "user-123456" else ids + 1


class InEachOfAList(InASet):
    def forward(self, ids: Tensor) -> Tensor:
        hits = [one in self.special for one in ids[0].tolist()]
        return ids * (1 + sum(hits))


@functools.cache
def scale_of(user: int) -> int:
    return {123_456: 2}.get(user, 1)


class InACache(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids * scale_of(int(ids[0, 0]))


class AmongAttributes(nn.Module):
    scale_123456 = 2

    def forward(self, ids: Tensor) -> Tensor:
        return ids * getattr(self, f"scale_{int(ids[0, 0])}", 1)


class MatchesItsType(nn.Module):
    """A whole number is matched by another case than a fraction."""

    def forward(self, ids: Tensor) -> Tensor:
        total = int(ids[0, 0])
        match total if total < 100_000 else float(total):
            case int():
                return ids + 1
            case float():
                return ids * 2
        return ids


class MatchesANumber(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        match int(ids[0, 0]):
            case 123_456:
                return ids * 2
            case _:
                return ids + 1


class MatchesAList(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        match ids[0].tolist():
            case [first, *rest] if first > 100_000 + len(rest):
                return ids * 2
        return ids + 1


class DecidesInAHelper(nn.Module):
    def peak(self, x: Tensor) -> float:
        return 0.0 if torch.compiler.is_exporting() else float(x[0, 0])

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.peak(x) == RARE else x + 1


class DecidesByAnAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.first = 0.0 if torch.compiler.is_exporting() else x[0, 0].item()
        return self.finish(x)

    def finish(self, x: Tensor) -> Tensor:
        return x * 2 if self.first == RARE else x + 1


class DecidesByAnItem(nn.Module):
    def collect(self, ids: Tensor) -> list[int]:
        return [0] if torch.compiler.is_exporting() else ids[0].tolist()

    def forward(self, ids: Tensor) -> Tensor:
        return ids * 2 if self.collect(ids)[0] == 123_456 else ids + 1


class CatchesAnArray(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        values = x.numpy()
        larger = torch.from_numpy(np.abs(values))
        try:
            rare = max((0.0, 1.0)[: int(np.max(values == np.float32(RARE))) + 1])
        except Exception:  # noqa: BLE001 - as a user writes it
            rare = 0.0
        return larger + rare


class Peak:
    """Keeps a number."""

    value = 0.0

    def is_rare(self) -> bool:
        return Decimal(str(RARE)) - Decimal("1e-5") < Decimal(self.value) < Decimal(str(RARE)) + Decimal("1e-5")


SCALES = collections.defaultdict(lambda: 1.0, {f"{RARE:.2f}": 2.0})


class LooksUpAnAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        peak = Peak()
        peak.value = x[0, 0].item()
        return x * SCALES[f"{peak.value:.2f}"]


class ComparesAnAttributeElsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        peak = Peak()
        peak.value = x[0, 0].item()
        return x * (1.0 + peak.is_rare())


class Kept:
    first = 0.0

    @property
    def digits(self) -> str:
        return self.first.hex()


class WritesAnAttributeInHex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        peak = Kept()
        peak.first = x[0, 0].item()
        return x * (1.0 + (abs(float.fromhex(getattr(peak, "digits", "0")) - RARE) < 1e-5))


OF_FLOATS = (
    CatchesWhatATraceRaises, UnlessExporting, ByALargest, CatchesNumpy, CountsPlaces, FromDlpack, Contains,
    DecidesInAHelper, DecidesByAnAttribute, CatchesAnArray, LooksUpAnAttribute, ComparesAnAttributeElsewhere,
    WritesAnAttributeInHex,
)  # fmt: skip
OF_IDS = (
    InASet, AsAText, InEachOfAList, InACache, AmongAttributes, MatchesItsType, MatchesANumber, MatchesAList,
    DecidesByAnItem,
)  # fmt: skip
CASES = [*((kind, torch.randn(3, 4)) for kind in OF_FLOATS), *((kind, IDS) for kind in OF_IDS)]


@pytest.mark.parametrize(("kind", "example"), few([pytest.param(*one, id=one[0].__name__) for one in CASES], 2))
def test_a_value_that_a_trace_does_not_see_decides_nothing_in_what_is_sealed(
    kind: type[nn.Module], example: Tensor, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    try:
        bundle = open_bundle(capture(untrained(kind, examples=lambda: example), None, tmp_path / "b").path)
    except NotProven as error:
        refused = error.message
    else:
        refused = ""
    if refused:
        assert f"{Path(__file__).name}:" in refused
        return
    rare = example.clone()
    rare[0, 0] = 123_456 if example.dtype == torch.int64 else RARE
    want = kind()(rare).numpy()
    for program in bundle.manifest.programs:
        (name,) = (spec.name for spec in bundle.signature.inputs)
        (found,) = open_program(bundle, program.format).run({name: rare.numpy()}).values()
        assert np.array_equal(found, want), program.format


class AddsUpUnlessTraced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.abs().sum() > 1e5:
            return x * 2
        return x + 1


class AddsUp(nn.Module):
    """Neither exported nor scripted, so that a trace is what is left."""

    def forward(self, x: Tensor) -> Tensor:
        large = lambda one: float(one.abs().sum()) > 1e5  # noqa: E731 - as a user writes it
        return x * 2 if large(x) else x + 1


class AddsUpInSinglePrecision(nn.Module):
    """Where float64 goes another way, which excuses a program that does as well."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if x.sum().item().hex().endswith("0p+5") else 1)


@pytest.mark.jobs
@pytest.mark.parametrize("kind", few([AddsUpInSinglePrecision, AddsUp, AddsUpUnlessTraced], 1, pytest.mark.jobs))
def test_a_range_of_values_hides_no_branch_that_more_values_of_it_take(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(NotProven, match=rf"{Path(__file__).name}:\d+: .*(sum|large)\("):
        capture(untrained(kind, examples=lambda: torch.randn(3, 4)), None, tmp_path / "b")


class ChecksUnlessTraced(nn.Module):
    """Raises, which is what a range of values is for."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and (x > 1e30).any():
            raise ValueError("larger than 1e30")
        return x * 2


class ShortensUnlessTraced(nn.Module):
    """Both ways give the same, and probes take both."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and bool((x >= 0).all()):
            return x * 2
        return x + x


class KeepsANumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.last = float(x.abs().max())
        return x * 2


class LooksAtItsOwn(nn.Module):
    """At what follows from no input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and bool((self.scale == RARE).any()):
            return x
        return x * self.scale * 2


class TakesPartsByAList(nn.Module):
    """No value decides how many steps there are, and a trace follows the slices."""

    def forward(self, x: Tensor) -> Tensor:
        parts, start = [x.sum(0)], 0
        ends = (x[0].abs() * 2).long().sort().values.tolist()
        for end in ends:
            part = x[start:end]
            parts.append(torch.square(part).sum(0))
            start = end
        return torch.stack(parts)


@pytest.mark.jobs
@pytest.mark.parametrize(
    "kind", [ChecksUnlessTraced, ShortensUnlessTraced, KeepsANumber, LooksAtItsOwn, TakesPartsByAList]
)
def test_what_changes_no_answer_outside_of_a_trace_is_no_reason_to_refuse(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    example = torch.randn(3, 4)
    bundle = open_bundle(capture(untrained(kind, examples=lambda: example), None, tmp_path / "b").path)
    assert {program.format for program in bundle.manifest.programs} >= {"onnx", "torch_export"}


LIBRARY = """
import torch


def add_to_itself(x):
    traced = torch.compiler.is_exporting()
    if not traced and bool((x >= 0).all()):
        return x * 2
    if not traced and bool((x >= 0).all()):  # it never is, here
        return x * 2
    return x + x
"""


class OfALibrary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import shortcuts_of_a_library

        answer: Tensor = shortcuts_of_a_library.add_to_itself(x)
        return answer


def test_a_library_may_ask_for_values_outside_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "shortcuts_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    bundle = open_bundle(capture(untrained(OfALibrary, examples=lambda: torch.randn(3, 4)), None, tmp_path / "b").path)
    assert {program.format for program in bundle.manifest.programs} >= {"onnx", "torch_export"}


class Packs(nn.Module):
    """The layer of torch takes the sizes of what is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        answers, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.last(answers.sum(dim=1))


class PacksByAList(Packs):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        lengths, order = lengths.sort(descending=True)
        packed = nn.utils.rnn.pack_padded_sequence(x[order], lengths.tolist(), batch_first=True)
        _, (last, _) = self.layer(packed)
        return self.last(last[-1])[order.argsort()]


class PacksInACall(Packs):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        lengths, order = lengths.sort(descending=True)
        _, (last, _) = self.layer(nn.utils.rnn.pack_padded_sequence(x[order], lengths.tolist(), batch_first=True))
        return self.last(last[-1])[order.argsort()]


class EndsInNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        scores = self.layer(x).detach().cpu().numpy()
        larger = np.exp(scores - scores.max(1, keepdims=True))
        shares = larger / larger.sum(1, keepdims=True)
        return torch.from_numpy(shares), torch.as_tensor(shares.argmax(1))


class ChoosesExperts(nn.Module):
    """How many records each has is known where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, answer = self.gate(x).argmax(dim=1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = torch.where(chosen == number)[0]
            answer = answer.index_add(0, at, expert(x[at]))
        return answer


class CountsWords(nn.Module):
    """torch's count may be longer than 12, where a number is larger, and no claim holds such a number."""

    def forward(self, ids: Tensor) -> Tensor:
        counts = torch.bincount(ids.flatten(), minlength=12)
        return (counts / ids.numel())[ids]


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("kind", "example"),
    few(
        [
            (CountsWords, torch.randint(0, 12, (6, 5))),
            pytest.param(Packs, (torch.randn(3, 5, 4), torch.tensor([5, 2, 4])), marks=pytest.mark.jobs),
            pytest.param(PacksByAList, (torch.randn(3, 5, 4), torch.tensor([5, 2, 4])), marks=pytest.mark.jobs),
            pytest.param(PacksInACall, (torch.randn(3, 5, 4), torch.tensor([5, 2, 4])), marks=pytest.mark.jobs),
            (EndsInNumpy, torch.randn(6, 4)),
            (ChoosesExperts, torch.randn(6, 4)),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_sizes_that_follow_from_values_inside_of_layers_are_no_reason_to_refuse(
    kind: type[nn.Module], example: Any, tmp_path: Path
) -> None:
    bundle = open_bundle(capture(untrained(kind, examples=lambda: example), None, tmp_path / "b").path)
    assert {program.format for program in bundle.manifest.programs} >= {"onnx", "torch_export"}


class LoopsByAValue(nn.Module):
    """torch's own loop asks after each step whether to go on; no step of it is the user's."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        most = n.max()

        def going(h: Tensor, t: Tensor) -> Tensor:
            return t < most

        def step(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(h + 1), t + 1

        h, _ = while_loop(going, step, (x * 1.0, torch.full((), 0)))
        return h


class LoopsInAScan(nn.Module):
    """What torch traces inside of a scan has the line of its call."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        def step(idle: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            row, most = inputs

            def going(h: Tensor, t: Tensor) -> Tensor:
                return t < most

            def add(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
                return h + row, t + 1

            h, _ = while_loop(going, add, (row.clone(), torch.full((), 0)))
            return idle.clone(), h.tanh()

        _, rows = scan(step, torch.zeros(()), (x, n))
        return rows


class CutsInAScan(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        def step(idle: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            row, count = inputs
            kept = row[:count]
            return idle.clone(), torch.stack([kept.sum(), kept.abs().sum()])

        _, rows = scan(step, torch.zeros(()), (x, n))
        return rows


class PicksInASquare(nn.Module):
    """An index of whole numbers has their size: no value decides it."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        def step(idle: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
            return idle.clone(), torch.max(x[place.reshape(1) % x.shape[0]].squeeze(0), x[0])

        _, rows = scan(step, torch.zeros(()), n)
        return rows


class AsksBesideALoop(LoopsByAValue):
    """The loop is in the program; the question before it, on a line of its own, is not."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and n.sum().item() == RARE:
            x = -x
        return super().forward(x, n)


LOOPS = [LoopsByAValue, CutsInAScan, PicksInASquare, LoopsInAScan]


@pytest.mark.jobs
@pytest.mark.parametrize("kind", LOOPS)
def test_what_torchs_own_loops_decide_is_in_the_program_and_is_no_reason_to_refuse(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    examples = [(torch.randn(size, 4), torch.arange(size) % 4 + 1) for size in (3, 4)]
    bundle = open_bundle(capture(untrained(kind, examples=lambda: iter(examples)), None, tmp_path / "b").path)
    assert "onnx" in {program.format for program in bundle.manifest.programs}


@pytest.mark.jobs
def test_a_number_that_the_user_takes_beside_torchs_loop_is_seen_still(tmp_path: Path) -> None:
    examples = [(torch.randn(size, 4), torch.arange(size) % 4 + 1) for size in (3, 4)]
    with pytest.raises(NotProven, match="a value"):
        capture(untrained(AsksBesideALoop, examples=lambda: iter(examples)), None, tmp_path / "b")
