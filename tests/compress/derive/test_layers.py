"""A ready student has some of the teacher's layers, with their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trueline.compress.derive.layers import choose_kept, drop_layers
from trueline.errors import UsageError


class Tower(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.heads = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.heads(x)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("0.5", {"blocks": [0, 2, 5]}),
        ("blocks=0.3", {"blocks": [0, 1, 3, 5]}),
        ("0.01", {"blocks": [0, 1, 2, 3, 5]}),
        ("0.99", {"blocks": [0, 5]}),
        ("heads=0.5", {"heads": [0, 2]}),
    ],
)
def test_the_first_and_the_last_layer_stay_and_the_others_are_spread(text: str, kept: dict[str, list[int]]) -> None:
    assert choose_kept(Tower(), text) == kept


def test_a_student_computes_with_the_layers_that_stayed() -> None:
    teacher = Tower().eval()
    blocks = list(teacher.blocks)
    student = drop_layers(teacher, {"blocks": [0, 2, 5]})
    assert [id(one) for one in student.blocks] == [id(blocks[at]) for at in (0, 2, 5)]
    x = torch.randn(3, 4)
    expected = student.stem(x)
    for at in (0, 2, 5):
        expected = expected + blocks[at](expected).tanh()
    torch.testing.assert_close(student(x), student.heads(expected))


def test_an_encoder_of_torch_loses_layers_and_still_takes_a_mask() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    assert choose_kept(encoder, "0.5") == {"layers": [0, 3]}
    student = drop_layers(encoder, {"layers": [0, 3]})
    hidden = torch.tensor([[False, False, True]])
    assert student(torch.randn(1, 3, 8), src_key_padding_mask=hidden).shape == (1, 3, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2", "expected a share between 0 and 1"),
        ("block=0.5", r"drop names 'block'.*'blocks'"),
        ("x", "expected a share"),
    ],
)
def test_a_share_or_a_stack_that_is_none_is_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose_kept(Tower(), text)


def test_a_model_without_a_stack_is_told_to_write_a_student() -> None:
    with pytest.raises(UsageError, match="no stack of three or more equal layers") as none:
        choose_kept(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "0.5")
    assert "--distill" in none.value.hint
