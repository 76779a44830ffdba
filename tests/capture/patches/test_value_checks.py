"""A check of values in the user's code is in the programs: they refuse what the model refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.capture.export import torch_export, tracing
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches import value_checks
from trueline.errors import RequestError
from trueline.runtime.open import open_program
from worlds import recipes


class Masked(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        assert not x.isnan().any(), "missing values"
        if (lengths > x.shape[1]).any() or (lengths < 1).any():
            raise ValueError("lengths have to lie in the sequence")
        shown = torch.arange(x.shape[1])[None] < lengths[:, None]
        return (x * shown).sum(1) / lengths


def sequences() -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    for batch, length in ((4, 7), (3, 12)):
        yield torch.randn(batch, length), torch.randint(1, length + 1, (batch,))


@pytest.mark.jobs
@pytest.mark.slow
def test_a_program_refuses_the_values_that_a_check_of_the_model_refuses(tmp_path: Path) -> None:
    capture(recipes.untrained(lambda: Masked().eval(), examples=sequences), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    x, nan = np.ones((2, 5), np.float32), np.full((2, 5), np.nan, np.float32)
    for format in ("onnx", "torch_export"):
        session = open_program(bundle, format)
        assert session.run({"x": x, "lengths": np.array([1, 5])})["output"].tolist() == [1, 1]
        for lengths in ([0, 5], [1, 6], [-1, 1]):
            with pytest.raises(RequestError, match=r"model refuses .* INT64 \[2\]\): lengths have to|proven only for"):
                session.run({"x": x, "lengths": np.array(lengths)})
        with pytest.raises(RequestError, match=r"model refuses .*: missing values|proven only for"):
            session.run({"x": nan, "lengths": np.array([1, 5])})


@pytest.mark.slow
def test_the_check_is_an_operator_of_the_program() -> None:
    first, *others = sequences()
    eager = EagerSession(Masked().eval(), first, others=others, dynamic_shapes={})
    program = torch_export.LoadedProgram(torch_export.export(eager.module, eager.calling))
    x = np.ones((2, 5), np.float32)
    assert program.run({"x": x, "lengths": np.array([1, 5])})["output"].tolist() == [1, 1]
    for given in ({"x": x, "lengths": np.array([0, 5])}, {"x": x * np.nan, "lengths": np.array([1, 5])}):
        with pytest.raises(RuntimeError, match="the model refuses these values"):
            program.run(given)


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        ("assert a.all()", True),
        ("assert not a.any() and b is not None", False),
        ("assert a.all() and b.all()", True),
        ("assert not (a.any() or b.any())", False),
        ("if not a.all():\n    raise ValueError", True),
        ("if a.any() or b.any():\n    raise ValueError", False),
        ("if careful and a.any():\n    raise ValueError", False),
        ("assert a.any() or b.any()", None),
        ("assert a.all() and not b.any()", None),
        ("if a.any() and b.any():\n    raise ValueError", None),
        ("if a.any():\n    a = b", None),
        ("if a.any():\n    raise ValueError\nelse:\n    a = b", None),
        ("c = a.any()", None),
        ("assert all(one.any() for one in a)", None),
        ("assert 0 < a.min() < 1", None),
    ],
)
def test_a_line_that_only_checks_says_what_its_values_have_to_be(
    code: str, passes: bool | None, tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"{code}\n")
    assert value_checks.find_passing(str(file), 1) is passes
    inside = "\n".join(f"    {line}" for line in code.splitlines())
    (tmp_path / "caught.py").write_text(f"try:\n{inside}\nexcept ValueError:\n    pass\n")
    assert value_checks.find_passing(str(tmp_path / "caught.py"), 2) is None


def test_a_tensor_is_as_true_as_before_after_the_block() -> None:
    with tracing.tracing():
        assert torch.tensor(1)
    assert "__bool__" not in vars(torch.Tensor)
