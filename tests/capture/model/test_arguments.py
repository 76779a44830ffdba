"""Dataclasses go in and come out field by field, without a word of the user to torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.bundle import open_bundle
from trueline.capture.api import capture
from trueline.runtime.open import open_program
from worlds.recipes import untrained

pytestmark = pytest.mark.slow


@dataclass
class Inner:
    bias: Tensor


@dataclass
class Question:
    x: Tensor
    inner: Inner
    mask: Tensor | None = None


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    hidden: list[Tensor]
    loss: Tensor | None = None


class Model(nn.Module):
    def forward(self, question: Question) -> Answer:
        hidden = question.x + question.inner.bias
        return Answer(logits=hidden * 2, hidden=[hidden])


def test_fields_are_named_and_what_is_none_stays_out(tmp_path: Path) -> None:
    def examples() -> Iterator[Any]:
        yield (Question(x=torch.randn(3, 4), inner=Inner(bias=torch.randn(3, 1))),)

    capture(untrained(Model, name="d", examples=examples), None, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert [spec.name for spec in bundle.signature.inputs] == ["question.x", "question.inner.bias"]
    asked = {"question.x": np.ones((2, 4), np.float32), "question.inner.bias": np.ones((2, 1), np.float32)}
    for format in ("onnx", "torch_export"):
        found = open_program(bundle, format).run(asked)
        assert list(found) == ["logits", "hidden.0"]
        assert (found["logits"] == 4).all()
