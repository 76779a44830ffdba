"""How many decisions of a program are other ones than its parent's."""

from __future__ import annotations

import numpy as np

from trueline.compress.measure.accuracy import Answers, count_changed


def answers(outputs: list[list[float]] | list[float], values: list[float]) -> Answers:
    return Answers([{"y": np.array(outputs, np.float32)}], np.array(values))


def test_a_decision_of_several_classes_is_the_largest_element_whatever_the_metric_says() -> None:
    parent, other = [[1.0, 2.0], [3.0, 0.0]], [[2.0, 1.0], [3.0, 0.0]]
    assert count_changed(answers(parent, [0.2, 0.7]), answers(other, [0.2, 0.7])) == 1


def test_a_yes_or_no_has_changed_where_it_is_no_longer_right_or_no_longer_wrong() -> None:
    for shape in ([0.4, 0.6, 0.9], [[0.4], [0.6], [0.9]]):
        parent = answers(shape, [1.0, 0.0, 1.0])
        assert count_changed(parent, answers(shape, [0.0, 1.0, 1.0])) == 2
        assert count_changed(parent, parent) == 0


def test_numbers_without_a_decision_have_none_that_could_change() -> None:
    assert count_changed(answers([0.4, 7.0], [0.1, 3.0]), answers([0.4, 7.5], [0.1, 3.5])) is None
