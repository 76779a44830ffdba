"""TorchScript keeps every way of the code, or is refused; its archive runs nothing but arithmetic."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.export import torchscript
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.torchscript import FROZEN, climb_scripted
from trueline.errors import BundleError, CaptureError
from trueline.runtime import torchscript_archive
from trueline.runtime.open import open_session
from worlds.models import Branch, Mlp, Nested, Pair

pytestmark = pytest.mark.slow  # exports programs


class Halving(nn.Module):
    """A loop whose length depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while bool(x.abs().sum() > 1.0) and steps < 20:
            x = self.linear(x) * 0.5
            steps += 1
        return x


class Around(nn.Module):
    """Cannot be scripted (*args), and calls what must be."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Halving()

    def forward(self, *given: Tensor) -> Tensor:
        found: Tensor = self.loop(given[0])
        return found + 1


class Star(nn.Module):
    def forward(self, *given: Tensor) -> Tensor:
        return given[0] * 2


class Inside(nn.Module):
    """Branches, and calls what cannot be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.star = Star()

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.star(x)  # type: ignore[no-any-return]
        return self.star(x) - 1  # type: ignore[no-any-return]


class Guarded(nn.Module):
    """Cannot be scripted (*args); a branch that only large values take."""

    def forward(self, *given: Tensor) -> Tensor:
        x = given[0]
        if x.abs().max() > 1e30:  # large values
            x = x / x.abs().max()
        return x * 2


class Decided(nn.Module):
    """The same by way of a number with a name; the number differs from probe to probe, the way does not."""

    def forward(self, *given: Tensor) -> Tensor:
        largest = given[0].abs().max().item()
        scale = 2.0 if largest < 1e30 else 1 / largest
        return given[0] * scale


class Listed(nn.Module):
    """And by way of a list."""

    def forward(self, *given: Tensor) -> Tensor:
        return given[0] * sum((given[0] > 1e30).flatten().tolist())


class Sided(nn.Module):
    """Takes a number whose both values the probes show, and answers the same either way."""

    def forward(self, *given: Tensor) -> Tensor:
        if given[0].sum() > 0:
            return given[0] * 2
        return given[0] + given[0]


class FarSize(nn.Module):
    """Longer than any probe it answers otherwise; a wrong size is only checked."""

    def forward(self, *given: Tensor) -> Tensor:
        x = given[0]
        if x.shape[1] > 4:
            raise ValueError("too wide")
        if x.shape[0] > 5000:  # far
            return x * 3
        return x * 2


def captured(module: nn.Module, example: object, folder: Path) -> tuple[str, str]:
    torch.manual_seed(0)
    eager = EagerSession(module.eval(), example)
    found = climb_scripted(eager, None, observe(eager, make_probes(eager.example)), folder)
    return found.how, found.why


@pytest.mark.parametrize(
    ("module", "how"),
    [
        (Mlp(), "by trace"),
        (Branch(), "by script"),
        (Halving(), "by script"),
        (Around(), "by a mix (scripted: loop; traced: the model)"),
        (Inside(), "by a mix (scripted: the model; traced: star)"),
    ],
)
def test_the_way_that_is_proven_is_taken_and_recorded(tmp_path: Path, module: nn.Module, how: str) -> None:
    size = 8 if isinstance(module, Mlp) else 4
    assert captured(module, torch.randn(5, size), tmp_path) == (how, "")


def test_a_trace_of_a_branch_is_refused_by_the_probes_that_show_it(tmp_path: Path) -> None:
    eager = EagerSession(Inside().eval(), torch.ones(3, 4))
    path, _ = torchscript.emit(eager.module, eager.calling, tmp_path, "trace")
    session = open_session("torchscript", path, eager.signature)
    x = np.full((2, 4), -1, np.float32)
    assert not np.allclose(session.run({"x": x})["output"], eager.run({"x": x})["output"])


@pytest.mark.parametrize(
    ("module", "word"),
    [(Guarded(), "1e30:"), (Decided(), "largest < 1e30"), (Listed(), "tolist"), (FarSize(), "# far")],
)
def test_a_trace_is_refused_where_no_probe_changes_what_a_number_out_of_a_tensor_decides(
    tmp_path: Path, module: nn.Module, word: str
) -> None:
    torch.manual_seed(0)
    eager = EagerSession(module.eval(), torch.randn(5, 4))
    found = climb_scripted(eager, None, observe(eager, make_probes(eager.example)), tmp_path)
    assert FROZEN in found.why
    assert found.path is None
    assert "test_torchscript.py" in found.line
    assert word in found.line


def test_a_trace_is_taken_where_the_probes_went_both_ways_and_it_agrees_on_all(tmp_path: Path) -> None:
    assert captured(Sided(), torch.randn(5, 4), tmp_path) == ("by trace", "")


@pytest.mark.parametrize("way", ["trace", "script"])
def test_nested_inputs_and_outputs_become_flat_ones_in_the_signatures_order(
    tmp_path: Path, way: torchscript.Way
) -> None:
    example = {"features": {"a": torch.ones(3, 2), "b": torch.ones(3, 2)}, "pair": (torch.ones(3, 2),) * 2}
    for module, given in ((Nested(), example), (Pair(), (torch.randn(3, 8), torch.randint(0, 10, (3, 4))))):
        eager = EagerSession(module.eval(), given)
        path, _ = torchscript.emit(eager.module, eager.calling, tmp_path / type(module).__name__, way)
        session = open_session("torchscript", path, eager.signature)
        wanted, found = eager.run(eager.example), session.run(eager.example)
        assert list(found) == list(wanted)
        assert all(np.allclose(found[name], wanted[name]) for name in wanted)


def test_what_the_compiler_cannot_read_is_a_capture_error_with_its_words(tmp_path: Path) -> None:
    eager = EagerSession(Star().eval(), torch.ones(3, 2))
    with pytest.raises(CaptureError, match="variable number of arguments"):
        torchscript.emit(eager.module, eager.calling, tmp_path, "script")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    eager = EagerSession(Branch().eval(), torch.ones(3, 8))
    return torchscript.emit(eager.module, eager.calling, tmp_path, "script")[0]


def test_a_program_names_no_path_of_the_machine_that_made_it(program: Path) -> None:
    with zipfile.ZipFile(program) as archive:
        assert not [name for name in archive.namelist() if "debug" in name or "traced" in name]
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert b"worlds" not in content
    assert b"models.py" not in content
    assert b"site-packages" not in content
    assert "if bool" in torchscript_archive.source(program)


@pytest.mark.parametrize(
    ("member", "change"),
    [
        ("code", lambda text: text.replace(b"torch.mul(", b"torch.from_file(")),
        ("code", lambda text: text + b"  def more(self, x: Tensor) -> None:\n    x.save('pwned')\n"),
        ("code", lambda text: text + b"  def more(self) -> None:\n    ops.mine.run()\n"),
        ("code", lambda text: text + b"  def ("),
        ("data.pkl", lambda _: b"cos\nsystem\n(S'touch pwned'\ntR."),
        ("data.pkl", lambda _: b"\x80\x02c__torch__.torch.classes.mine Holder\n."),
        ("extra/setup.py", lambda _: b"print()"),
    ],
)
def test_an_archive_that_does_more_than_compute_is_refused_before_torch_reads_it(
    program: Path, monkeypatch: pytest.MonkeyPatch, member: str, change: object
) -> None:
    with zipfile.ZipFile(program) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    target = next((name for name in found if name.endswith(".py" if member == "code" else member)), f"model/{member}")
    found[target] = change(found.get(target, b""))  # type: ignore[operator]
    with zipfile.ZipFile(program, "w") as archive:
        for name, content in found.items():
            archive.writestr(name, content)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("torch was given the archive"))
    with pytest.raises(BundleError, match=r"model\.ts"):
        open_session("torchscript", program, EagerSession(Branch().eval(), torch.ones(3, 8)).signature)
