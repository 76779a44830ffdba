"""What a runtime refuses is said in the client's words: the input's name, its value, what the program takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trueline.bundle import Dim, Golden, Signature
from trueline.errors import RequestError, TooLarge, TruelineError
from trueline.runtime.open import open_program
from trueline.runtime.refusals import CHECK_INDEX, REFUSES, describe, refusal_of
from worlds import bundles

IDS = {"x": np.zeros((2, 3), np.float32), "ids": np.array([[1, 9]])}
ORT = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running {} node. Name:'{}' Status Message: {}"  # noqa: E501


@pytest.mark.parametrize(
    "error",
    [
        Exception(ORT.format("Gather", "node_embedding_1", "indices element out of data bounds, idx=9 must be within")),
        Exception(ORT.format("GatherND", "node_index_1", "invalid index found, index = 9")),
        Exception(ORT.format("ScatterND", "node_index_put_1", "invalid indice found, indice = 9")),
        Exception(
            ORT.format(
                "GatherElements",
                "node_gather_1",
                "/onnxruntime_src/a/gather_elements.cc:150 GatherElements op: Value in indices must be within bounds "
                "[-5 , 4]. Actual value is 9",
            )
        ),
        IndexError("index 9 is out of bounds for dimension 0 with size 5"),
        RuntimeError("index 9 is out of bounds for dimension 1 with size 5"),
    ],
)
def test_an_index_beyond_a_table_names_the_input_the_value_and_its_place(error: Exception) -> None:
    found = refusal_of(error, IDS)
    assert isinstance(found, RequestError)
    assert "input 'ids' has 9 at [0, 1]" in found.message
    assert "node_" not in found.message
    assert "/onnxruntime_src" not in found.message


def test_an_index_without_a_value_names_the_only_input_that_can_hold_it() -> None:
    found = refusal_of(IndexError("index out of range in self"), IDS)
    assert found.message.endswith("input 'ids' has values from 1 to 9, one of them is outside of a table")


def test_an_index_that_the_program_computed_names_all_inputs_that_can_lead_to_it() -> None:
    inputs = {"a": np.array([1]), "b": np.array([2]), "c": np.array([0.5])}
    found = refusal_of(IndexError("index 12 is out of bounds for dimension 0 with size 5"), inputs)
    assert "inputs 'a' INT64 [1], 'b' INT64 [1] lead to the index 12, which is outside of a table of 5" in found.message


def test_other_refusals_give_the_inputs_and_no_name_of_the_graph() -> None:
    text = ORT.format("Split", "node_split_1", "/src/core/split.cc:9 Invalid value in 'split'. Split size 5 exceeds 2.")
    found = refusal_of(Exception(text), IDS, blame=True)
    assert isinstance(found, RequestError)
    assert "inputs 'x' FP32 [2, 3], 'ids' INT64 [1, 2]" in found.message
    assert "node_split_1" not in found.message
    assert "/src" not in found.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Available memory of 1000 is smaller than requested bytes of 2000"),
        RuntimeError("Failed to allocate memory for requested buffer of size 2000"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000 bytes."),
        MemoryError(),
    ],
)
def test_a_run_that_needs_too_much_memory_is_the_requests_fault_and_says_what_to_do(error: Exception) -> None:
    found = refusal_of(error, IDS)
    assert isinstance(found, TooLarge)
    assert "'ids' INT64 [1, 2]" in found.message
    assert "--run-memory" in found.hint


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.linalg.cholesky(-torch.eye(3)),
        lambda: torch.linalg.solve(torch.zeros(2, 2), torch.ones(2)),
        lambda: torch.nn.functional.embedding_bag(torch.tensor([-1]), torch.ones(4, 2), torch.tensor([0])),
        lambda: torch.nn.functional.one_hot(torch.tensor([7]), 3),
        lambda: torch.tensor([1]) // torch.tensor([0]),
        lambda: torch.linalg.ldl_factor(torch.zeros(2, 2)),
    ],
)
def test_values_that_torch_has_no_answer_to_are_the_requests_fault(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as raised:
        call()
    found = refusal_of(raised.value, IDS)
    assert isinstance(found, RequestError)
    assert "report a bug" not in found.message


class Refusing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.min() < -5:
            raise ValueError("values below -5 are not measured")
        assert x.max() < 5, "values above 5 are not measured either"
        return x.view(3)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("value", "words"), [(-9.0, "below -5 are not measured"), (9.0, "above 5 are not measured")])
def test_what_the_models_own_code_raises_is_the_requests_fault_in_its_words(value: float, words: str) -> None:
    scripted = torch.jit.script(Refusing())
    with pytest.raises(torch.jit.Error) as raised:
        scripted(torch.full((3,), value))
    found = refusal_of(raised.value, {"x": np.zeros(3, np.float32)})
    assert isinstance(found, RequestError)
    assert found.message.startswith("the model refuses these values (input 'x' FP32 [3]): values ")
    assert words in found.message
    with pytest.raises(RuntimeError) as raised_inside:
        scripted(torch.zeros(2))
    assert type(refusal_of(raised_inside.value, IDS)) is TruelineError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (REFUSES, ""),
        (f"{REFUSES}: ages are above 0", ": ages are above 0"),
        (f"node 'Gather_7': idx={CHECK_INDEX} is no row", ""),
        (f"node 'Gather_7': idx={CHECK_INDEX + 1} is no row", ": ages are above 0"),
        (f"node 'Gather_7': idx={CHECK_INDEX + 2} is no row", ""),
    ],
)
def test_a_check_of_values_that_fails_in_a_graph_is_the_requests_fault(text: str, shown: str) -> None:
    found = refusal_of(RuntimeError(text), IDS, checks=[REFUSES, f"{REFUSES}: ages are above 0"])
    assert isinstance(found, RequestError)
    assert found.message == f"the model refuses these values ({describe(IDS)}){shown}"


def test_what_is_nobodys_fault_stays_the_programs() -> None:
    found = refusal_of(RuntimeError("matmul dimension mismatch"), IDS)
    assert type(found) is TruelineError


def test_a_program_of_onnx_runtime_names_the_input_and_not_its_node(tmp_path: Path) -> None:
    session = open_program(table(tmp_path / "b"))
    with pytest.raises(RequestError, match=r"input 'ids' has 9 at \[0, 1\].* takes -5 to 4") as refused:
        session.run({"ids": np.array([[1, 9]])})
    assert "node_embedding_1" not in refused.value.message


@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_a_division_by_zero_that_onnx_runtime_refuses_is_the_requests_fault(operator: str, tmp_path: Path) -> None:
    from onnx import helper

    ids, found = bundles.spec("ids", "batch", datatype="INT64"), bundles.spec("y", "batch", datatype="INT64")
    node = helper.make_node(operator, ["n", "ids"], ["y"])
    model = bundles.graph([node], [ids], [found], {"n": np.array([7])})
    signature = Signature(inputs=(ids,), outputs=(found,), dims={"batch": Dim()})
    golden = Golden(case="1", inputs={"ids": np.array([7])}, outputs={"y": np.array([operator == "Div"], np.int64)})
    session = open_program(bundles.bundle(tmp_path / "b", model, signature, [golden]))
    with pytest.raises(RequestError, match="by zero"):
        session.run({"ids": np.array([2, 0])})


def table(out: Path) -> bundles.Bundle:
    """Rows of three numbers by id, from 0 to 4."""
    from onnx import helper

    ids, found = bundles.spec("ids", "batch", "length", datatype="INT64"), bundles.spec("y", "batch", "length", 3)
    rows, given = np.arange(15, dtype=np.float32).reshape(5, 3), np.array([[1, 2], [0, 4]])
    model = bundles.graph(
        [helper.make_node("Gather", ["t", "ids"], ["y"], name="node_embedding_1")], [ids], [found], {"t": rows}
    )
    signature = Signature(inputs=(ids,), outputs=(found,), dims={"batch": Dim(), "length": Dim()})
    return bundles.bundle(out, model, signature, [Golden(case="2", inputs={"ids": given}, outputs={"y": rows[given]})])
