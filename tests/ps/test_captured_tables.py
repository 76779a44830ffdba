"""Tables leave training as part of a proven bundle."""

import numpy as np
import pytest
import torch
from torch import nn

from trueline.bundle import open_bundle
from trueline.bundle.describe import describe
from trueline.capture.api import capture
from trueline.checkpoint import checkpoint
from trueline.ps.model.embedding import Embedding, EmbeddingBag
from trueline.runtime.open import open_program
from worlds.recipes import untrained

KNOWN = np.unique(np.random.default_rng(0).integers(-(2**62), 2**62, size=1000))


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.words, self.tags = Embedding(4), EmbeddingBag(4, "mean", padding_idx=0), EmbeddingBag(4, "max")

    def forward(self, user, words, tags):
        return torch.cat([self.user(user), self.words(words), self.tags(tags)], dim=1)


def examples():
    random = np.random.default_rng(1)
    user, words, tags = (torch.from_numpy(random.choice(KNOWN, size)) for size in (5, (5, 3), (5, 2)))
    words[1, 1:] = 0
    user[2], tags[3, 1] = 7, -9  # without rows
    return {"user": user, "words": words, "tags": tags}


@pytest.mark.slow
@pytest.mark.long
def test_tables_are_proven_in_every_format_and_answer_zeros_for_unknown_ids(tmp_path):
    model = Tabled()
    state = model.state_dict()
    for name in ("user", "words", "tags"):
        state[f"{name}.ids"] = torch.from_numpy(KNOWN)
        state[f"{name}.rows"] = torch.randn(len(KNOWN), 4, generator=torch.Generator().manual_seed(len(name)))
    made = checkpoint.write(tmp_path, step=1, state={"model": dict(state)}, facts={})
    formats = ["onnx", "torch_export"]
    capture(untrained(Tabled, examples=examples), made, tmp_path / "bundle", formats=formats)
    bundle = open_bundle(tmp_path / "bundle")
    inputs = {name: value.numpy() for name, value in examples().items()}
    places = np.searchsorted(KNOWN, inputs["user"])
    for format in formats:
        (answer,) = open_program(bundle, format).run(inputs).values()
        np.testing.assert_array_equal(answer[[0, 1, 3, 4], :4], state["user.rows"].numpy()[places[[0, 1, 3, 4]]])
        assert not answer[2, :4].any()
        np.testing.assert_array_equal(answer[1, 4:8], state["words.rows"].numpy()[inputs["words"][1, 0] == KNOWN][0])
        known = state["tags.rows"].numpy()[inputs["tags"][3, 0] == KNOWN][0]
        np.testing.assert_array_equal(answer[3, 8:], np.maximum(known, 0.0))
    assert bundle.lineage()["tables"][0].items() >= {"name": "user", "rows": len(KNOWN), "dim": 4}.items()
    assert "tables.1.largest_norm" in describe(bundle)
