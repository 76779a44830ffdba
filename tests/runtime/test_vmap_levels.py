"""A program that fails inside a torch.vmap leaves the thread as it was."""

import pytest
import torch
from torch import nn

from trueline.runtime.tensors import restored_vmap_levels

depth = torch._C._functorch.get_dynamic_layer_stack_depth


class Ranked(nn.Module):
    """[n, 4] -> [n, 4]; raises inside the vmap for an index beyond the row."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row, one: row + row.gather(0, one.reshape(1)))(x, at)


def test_a_failed_call_of_an_exported_vmap_does_not_change_what_runs_after_it() -> None:
    example = torch.randn(3, 4), torch.tensor([0, 3, 1])
    program = torch.export.export(Ranked(), example).module(check_guards=False)
    assert "_vmap_increment_nesting" in program.code, "exports without levels need no restoring"
    with pytest.raises(RuntimeError), restored_vmap_levels():
        program(example[0], torch.tensor([0, 9, 1]))
    assert depth() == 0
    nn.Linear(2, 2)
    torch.testing.assert_close(program(*example), Ranked()(*example))


def test_levels_that_were_open_before_stay_open() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with restored_vmap_levels():
            assert depth() == 1
        assert depth() == 1
        return x * 2

    torch.testing.assert_close(torch.vmap(inner)(torch.ones(3)), torch.full((3,), 2.0))
    assert depth() == 0
