"""Promises of the copy that a step waits for."""

import numpy as np
import torch

from trueline.checkpoint.snapshot import StateCopy


def addresses(tree):
    return {name: tensor.data_ptr() for name, tensor in tree.items() if isinstance(tensor, torch.Tensor)}


def test_a_copy_is_the_state_of_its_moment():
    live = {"w": torch.ones(3), "half": torch.ones(2, dtype=torch.bfloat16), "tally": np.arange(3), "lr": [0.1]}
    copied = StateCopy().take(live)
    live["w"].zero_()
    live["tally"][:] = 7
    live["lr"][0] = 0.2
    assert copied.state["w"].tolist() == [1.0, 1.0, 1.0]
    assert copied.state["tally"].tolist() == [0, 1, 2]
    assert (copied.state["lr"], copied.state["half"].dtype) == ([0.1], torch.bfloat16)


def test_memory_that_was_released_is_used_again():
    copies = StateCopy()
    first = copies.take({"w": torch.ones(5)})
    where = addresses(first.state)
    first.release()
    assert addresses(copies.take({"w": torch.zeros(5)}).state) == where


def test_a_copy_that_is_still_being_written_is_left_alone():
    copies = StateCopy()
    first = copies.take({"w": torch.ones(5)})
    second = copies.take({"w": torch.zeros(5)})
    assert first.state["w"].tolist() == [1.0] * 5
    assert addresses(first.state) != addresses(second.state)


def test_tensors_of_another_shape_or_kind_get_memory_of_their_own():
    copies = StateCopy()
    copies.take({"w": torch.ones(5), "v": torch.ones(2)}).release()
    later = copies.take({"w": torch.ones(5), "v": torch.ones(2, dtype=torch.float64), "new": torch.ones(4)})
    assert [tensor.tolist() for tensor in later.state.values()] == [[1.0] * 5, [1.0] * 2, [1.0] * 4]
    assert later.state["v"].dtype is torch.float64
    later.release()
    assert list(copies.take({"w": torch.ones(5)}).state) == ["w"]
