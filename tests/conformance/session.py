"""What every Session promises: import the tests and provide the fixture `mlp`.

The fixture yields a session of `worlds.models.Mlp` on eight features with a free batch, and the eager one whose
outputs it has to reproduce.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from trueline.errors import RequestError
from trueline.runtime.compare import compare
from trueline.runtime.session import Session

Pair = tuple[Session, Session]


def test_names_dtypes_shapes_and_order_are_the_signatures(mlp: Pair) -> None:
    session, _ = mlp
    assert [spec.name for spec in session.signature.inputs] == ["x"]
    found = session.run({"x": np.zeros((3, 8), np.float32)})
    assert [(name, array.dtype, array.shape) for name, array in found.items()] == [
        ("output", np.dtype(np.float32), (3, 4))
    ]


@pytest.mark.parametrize("records", [1, 2, 3, 17])
def test_it_answers_as_the_eager_model_at_every_batch_size(mlp: Pair, records: int) -> None:
    session, eager = mlp
    x = np.random.default_rng(records).standard_normal((records, 8)).astype(np.float32)
    assert compare(eager.run({"x": x}), session.run({"x": x})).agrees


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"x": np.zeros((2, 8), np.float64)}, "input 'x' has datatype FP64, expected FP32"),
        ({"x": np.zeros((2, 9), np.float32)}, "input 'x' has size 9 in dimension 1, expected 8"),
        ({"x": np.zeros(8, np.float32)}, "input 'x' has 1 dimensions"),
        ({"x": np.zeros((0, 8), np.float32)}, "input 'x' has size 0"),
        ({"y": np.zeros((2, 8), np.float32)}, "unexpected input 'y'"),
        ({}, "missing input 'x'"),
    ],
)
def test_what_lies_outside_the_signature_is_refused_in_words(mlp: Pair, inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        mlp[0].run(inputs)
    assert words in refused.value.message


def test_read_only_and_strided_arrays_are_answered_and_left_alone(mlp: Pair) -> None:
    session, wide = mlp[0], np.arange(48, dtype=np.float32).reshape(3, 16)
    plain = session.run({"x": wide[:, ::2].copy()})
    frozen = wide[:, ::2].copy()
    frozen.flags.writeable = False
    for array in (wide[:, ::2], frozen, np.asfortranarray(wide[:, ::2])):
        before = array.copy()
        assert compare(plain, session.run({"x": array})).agrees
        assert (array == before).all()


def test_an_answer_stays_as_it_was_when_the_session_is_asked_again(mlp: Pair) -> None:
    session = mlp[0]
    first = session.run({"x": np.ones((2, 8), np.float32)})["output"]
    kept = first.copy()
    session.run({"x": np.full((2, 8), 5, np.float32)})
    assert (first == kept).all()


def test_many_threads_that_ask_at_once_each_get_their_own_answer(mlp: Pair) -> None:
    session = mlp[0]
    batches = [np.full((n, 8), n, np.float32) for n in range(1, 9)]
    alone = [session.run({"x": batch}) for batch in batches]
    wrong: list[object] = []

    def ask(i: int) -> None:
        try:
            wrong.extend(i for _ in range(20) if not compare(alone[i], session.run({"x": batches[i]})).agrees)
        except Exception as error:  # noqa: BLE001 - a thread's error is the test's
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
