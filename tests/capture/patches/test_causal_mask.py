"""A transformer of torch's that is given a mask is captured: whether the mask is causal is not looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

from trueline.capture.export import torch_export
from trueline.capture.export.torch_export import LoadedProgram
from trueline.capture.model.eager import EagerSession
from trueline.capture.patches import causal_mask
from trueline.capture.proof.probes import make_probes
from trueline.capture.proof.prove import prove

pytestmark = pytest.mark.slow


class Masked(nn.Module):
    """Its mask is causal, or hides the neighbour on the left: only the mask says which."""

    def __init__(self, *, ahead: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.body, self.ahead = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), ahead

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.ones(x.shape[1], x.shape[1])
        hidden = seen.triu(1) if self.ahead else seen.tril(-1)
        found: Tensor = self.body(x, mask=hidden.bool())
        return found


@pytest.mark.parametrize("ahead", [True, False])
def test_the_mask_that_was_given_is_used_for_every_length(ahead: bool) -> None:
    torch.manual_seed(0)
    eager = EagerSession(Masked(ahead=ahead).eval(), torch.randn(3, 5, 8), dynamic_shapes={"x": {1: "length"}})
    exported = torch_export.export(eager.module, eager.calling)
    proof = prove(LoadedProgram(exported), eager, make_probes(eager.example, signature=exported.signature))
    assert proof.reason == ""
    assert sum(one.verdict == "agrees" for one in proof.evidence) > 10


def test_torch_looks_at_masks_as_before_once_the_model_is_traced() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    with causal_mask.skip_causal_check():
        assert transformer._detect_is_causal_mask(mask) is False
        assert transformer._detect_is_causal_mask(mask, is_causal=True) is True
    assert transformer._detect_is_causal_mask(mask) is True
