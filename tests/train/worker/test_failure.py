"""What a worker reports of the error that ends it."""

from __future__ import annotations

import pytest
import torch

from trueline.train.worker import failure


def test_an_error_of_torch_is_told_without_the_list_of_its_kernels() -> None:
    with pytest.raises(NotImplementedError) as raised:
        torch.eye(3).to_sparse().view(-1)
    assert len(str(raised.value)) > 3000
    code, what, hint = failure.describe(raised.value, "script_raised")
    assert code == "script_raised"
    assert what.startswith(
        "NotImplementedError: Could not run 'aten::view' with arguments from the 'SparseCPU' backend."
    )
    assert len(what) < 700
    assert "test_failure.py" in hint


def test_the_first_paragraph_of_a_message_is_kept_whole() -> None:
    with pytest.raises(ValueError, match="two") as raised:
        raise ValueError("two\nlines\n\nand more")
    assert failure.describe(raised.value, "failed")[1] == "ValueError: two\nlines"
