"""Decoders that call a recurrent layer of torch once in each step are scans."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.examine import prove_onnx
from trueline.doctor.patch import patch_module
from trueline.doctor.survey import survey
from worlds import TESTS

pytestmark = pytest.mark.slow


class Attending(nn.Module):
    """Each word is read as a column of one, beside what it attends to in the text."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.GRU(12, 6, batch_first=True)
        self.score, self.out = nn.Linear(12, 1), nn.Linear(6, 9)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        length = x.shape[1]
        state = x.mean(1).unsqueeze(0)
        outputs = torch.zeros(x.shape[0], words.shape[1], 9)
        for t in range(words.shape[1]):
            asked = state[-1].unsqueeze(1).repeat(1, length, 1)
            weights = self.score(torch.cat([asked, x], -1)).softmax(1)
            read = (weights * x).sum(1, keepdim=True)
            row, state = self.decoder(torch.cat([words[:, t : t + 1], read], -1), state)
            outputs[:, t : t + 1] = self.out(row)
        return outputs


class Stacked(nn.Module):
    """Two layers of LSTM, whose state has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 6, num_layers=2, dropout=0.1), nn.Linear(6, 6)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = torch.zeros(2, x.shape[0], 6)
        c = torch.zeros(2, x.shape[0], 6)
        last = x.mean(1).unsqueeze(0)
        rows = []
        for t in range(words.shape[1]):
            row, (h, c) = self.cells(last + words[:, t].unsqueeze(0), (h, c))
            last = torch.tanh(self.out(row))
            rows.append(last.squeeze(0))
        return torch.stack(rows, 1)


class Plain(nn.Module):
    """A layer with one part of state and another nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(6, 6, nonlinearity="relu", batch_first=True, bias=False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        state = x.mean(1).unsqueeze(0)
        rows = []
        for word in words.unbind(1):
            row, state = self.cell(word[:, None], state)
            rows.append(row[:, 0])
        return torch.stack(rows, 1)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        pytest.param(Attending, "gru"),
        pytest.param(Stacked, "lstm", marks=pytest.mark.long),
        pytest.param(Plain, "rnn_relu", marks=pytest.mark.long),
    ],
)
def test_a_recurrent_layer_in_a_step_is_a_function_of_the_same_weights(kind: type[nn.Module], function: str) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    free = {"x": {1: "length"}, "words": {1: "number"}}
    eager = EagerSession(copy.deepcopy(model), (torch.randn(2, 5, 6), torch.randn(2, 4, 6)), dynamic_shapes=free)
    done = survey(model, calls_of(eager), onnx=prove_onnx, base=TESTS)
    row = done.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    assert row.rewrite.onnx == "proven"
    assert f"torch.{function}(" in row.rewrite.diff
    edited = patch_module(model, done.texts)
    for length, number in ((7, 3), (1, 1), (4, 9)):
        given = torch.randn(3, length, 6), torch.randn(3, number, 6)
        with torch.no_grad():
            torch.testing.assert_close(edited(*given), model(*given))
