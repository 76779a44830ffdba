"""A program that is run by two runtimes keeps the laws of a Session, and says what runs where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.session import *  # noqa: F403 - the shared tests
from trueline.capture.export import torch_export
from trueline.capture.model.eager import EagerSession
from trueline.capture.onnx import offload as offload_emit
from trueline.errors import BundleError, CaptureError, RequestError, UsageError
from trueline.runtime import graph, offload
from trueline.runtime.compare import compare
from trueline.runtime.open import open_session
from trueline.runtime.session import Session, SessionSettings

pytestmark = pytest.mark.slow


def missing(x: Tensor) -> Tensor:
    """An operator that torch.onnx has no translation for; if it gets one, the first test says so."""
    return torch.special.bessel_j0(x)


class Middle(nn.Module):
    """The batch size is used on both sides of the operator that nobody translates."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.after = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        found: Tensor = self.after((missing(hidden) + hidden).reshape(x.shape[0], -1))
        return found


class Only(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return missing(x)


class Several(nn.Module):
    """A result that is one of several crosses from part to part; what comes in is used on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = self.mixed(x).relu().chunk(2, 1)
        other = missing(left.sin()).cos()
        return {"both": torch.cat([other, right], 1).tanh() + x, "right": right.exp()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offload")


@pytest.fixture(scope="module")
def mlp(folder: Path) -> tuple[Session, Session]:
    return made(Middle(), torch.randn(5, 8), folder)


def made(module: nn.Module, example: Tensor, folder: Path) -> tuple[Session, Session]:
    eager = EagerSession(module.eval(), example)
    exported = torch_export.export(eager.module, eager.calling)
    path = offload_emit.emit(exported, folder)
    return open_session("offload", path, exported.signature), eager


@pytest.mark.long
def test_the_operator_that_is_refused_stays_in_torch_and_its_neighbours_do_not(tmp_path: Path) -> None:
    session, eager = made(Several(), torch.randn(3, 6), tmp_path)
    plan = offload.read(tmp_path / offload.FILE)
    assert [one.operator for one in plan.kept] == ["aten.special_bessel_j0.default"]
    assert plan.kept[0].why
    there = sum(len(part.nodes) for part in plan.parts)
    assert plan.operators - 4 <= there < plan.operators
    for records in (1, 2, 9):
        x = {"x": np.random.default_rng(records).standard_normal((records, 6)).astype(np.float32)}
        assert compare(eager.run(x), session.run(x)).agrees
    told = graph.text("offload", tmp_path / offload.FILE)
    assert str(plan) in told
    assert "special_bessel_j0" in told


@pytest.mark.long
def test_a_result_that_nobody_reads_does_not_hold_its_operator_back(tmp_path: Path) -> None:
    class Normed(nn.Module):
        """Of three results of a batch norm one is read."""

        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
            self.after = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.after(missing(self.before(x)))
            return found

    session, eager = made(Normed(), torch.randn(3, 3, 9, 9), tmp_path)
    plan = offload.read(tmp_path / offload.FILE)
    assert [one.operator for one in plan.kept] == ["aten.special_bessel_j0.default"]
    assert sum(len(part.nodes) for part in plan.parts) == plan.operators - 1
    assert compare(eager.run(eager.example), session.run(eager.example)).agrees


def test_a_model_of_which_nothing_can_be_handed_over_is_refused_with_the_reason(tmp_path: Path) -> None:
    eager = EagerSession(Only(), torch.randn(3, 6))
    with pytest.raises(CaptureError, match=r"takes no part .*special_bessel_j0"):
        offload_emit.emit(torch_export.export(eager.module, eager.calling), tmp_path)


def test_a_setting_that_the_parts_cannot_keep_is_refused(mlp: tuple[Session, Session], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="runs on the CPU"):
        open_session("offload", path, mlp[0].signature, settings=SessionSettings(device="cuda"))
    with pytest.raises(UsageError, match="no precision 'bf16'"):
        open_session("offload", path, mlp[0].signature, settings=SessionSettings(precision="bf16"))


def test_a_plan_that_does_not_fit_its_program_or_leaves_its_folder_is_refused(
    mlp: tuple[Session, Session], folder: Path, tmp_path: Path
) -> None:
    session, _ = mlp
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / offload.FILE
    plan = json.loads(path.read_text())

    def reopened(**changed: object) -> None:
        path.write_text(json.dumps(plan | changed))
        open_session("offload", path, session.signature)

    part = plan["parts"][0]
    for wrong, words in (
        ({"program": "../elsewhere.pt2"}, "no file beside it"),
        ({"version": 2}, "version 2"),
        ({"runtime": "other"}, "for other"),
        ({"more": 1}, "torn or no offload plan"),
        ({"parts": [part | {"nodes": ["absent"]}]}, "names values that the program does not have"),
        ({"parts": [part | {"inputs": []}]}, "its plan says otherwise"),
        ({"parts": [part | {"nodes": part["nodes"][:-1]}]}, "wait for each other|does not fit"),
    ):
        with pytest.raises(BundleError, match=words):
            reopened(**wrong)
    reopened()


@pytest.mark.long
def test_an_id_that_a_part_refuses_is_the_requests_fault(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(10, 4)
            self.mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, ids: Tensor) -> Tensor:
            return missing(self.mixed(self.rows(ids).mean(1)))

    session, _ = made(Table(), torch.randint(0, 10, (3, 5)), tmp_path)
    with pytest.raises(RequestError, match="refuses these values"):
        session.run({"ids": np.full((2, 5), 99)})
