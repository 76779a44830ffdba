"""What a refusal advises fits its cause: values, a size, or neither."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.api import _advice
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.attempt import Attempt
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import make_probes
from trueline.capture.rung import OTHER_SIZES, _parting_line
from worlds.models import Branch, ShapeBranch


def attempt(line: str, why: str = "it differs", hint: str = "") -> Attempt:
    return Attempt(
        format="onnx", verdict="refused", emitted=False, why=why, line=line, seconds=1.0, hint=hint
    )  # fmt: skip


def parting(model: nn.Module, example: Tensor) -> str:
    eager = EagerSession(model.eval(), example)
    return _parting_line(observe(eager, make_probes(eager.example)))


def test_a_branch_on_values_is_told_from_one_on_sizes() -> None:
    values = parting(Branch(), torch.randn(4, 8))
    assert "goes another way for" in values
    assert OTHER_SIZES not in values
    assert parting(ShapeBranch(), torch.randn(4, 8)).endswith(f"{OTHER_SIZES})")


@pytest.mark.parametrize(
    ("line", "why", "advice"),
    [
        ("m.py:3: if x.sum() > 0: (goes another way for 'a' than for 'b')", "it differs", "torch.where"),
        ("m.py:3: if x.any():", "Could not guard on data-dependent expression Eq(u0, 1)", "torch.where"),
        (f"m.py:3: for t in range(n): (another way, {OTHER_SIZES})", "it works for a 'length' of 5", "goes by a size"),
        (
            "m.py:3: return self.bag(ids, at) (goes another way for 'a' than for 'b')",
            "on probe 'batch 2, at: -1': the eager model raises RuntimeError: offsets[0] has to be 0, and the program "
            "answers",
            "the model refuses these values",
        ),
        (
            f"m.py:3: return self.n(x) (goes another way for 'a' than for 'b', {OTHER_SIZES})",
            "on probe 'batch 1, length 5, as given': the eager model raises ValueError: Expected more than 1 value per "
            "channel when training",
            "BatchNorm with track_running_stats answers it",
        ),
        (
            "m.py:3: n = np.int64(x.shape[1])",
            "the exported program works for a 'length' of 7 only (dimension 1 of input 'x')",
            "that line makes a number of the size",
        ),
        ("m.py:3: n = x.untyped_storage().nbytes()", "Cannot call numel()", "compute with the sizes of the tensor"),
        ("m.py:3: self.n += 1", "the model keeps a state", "`trueline doctor` looks for a rewrite of that line"),
    ],
)  # fmt: skip
def test_torch_where_is_advised_only_where_values_choose(line: str, why: str, advice: str) -> None:
    said = _advice(attempt(line, why), [])
    assert advice in said
    assert ("torch.where" in said) == (advice == "torch.where")


def test_a_refusal_with_advice_of_its_own_keeps_it() -> None:
    assert _advice(attempt("m.py:3: if x:", hint="make it a buffer"), []) == "make it a buffer"
