"""MLflow's scoring protocol, asked by MLflow's own client, and what it answers to what is no table."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from trueline import serve
from trueline.bundle import Dim, Golden, Signature
from trueline.errors import RequestError
from trueline.serve.protocols import predict as scoring
from worlds import bundles
from worlds.servers import TinyApp

ONE = Signature(
    inputs=(bundles.spec("x", "batch", 3),), outputs=(bundles.spec("y", "batch", 3),), dims={"batch": Dim()}
)
TWO = Signature(
    inputs=(bundles.spec("a", "batch"), bundles.spec("b", "batch", 1)),
    outputs=(bundles.spec("y", "batch"),),
    dims={"batch": Dim()},
)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[TinyApp]:
    with TinyApp(tmp_path) as made:
        yield made


ROWS = [[1, 2, 3], [4, 5, 6]]
ANSWER = {"predictions": [[3.0, 5.0, 7.0], [9.0, 11.0, 13.0]]}


@pytest.mark.parametrize(
    ("media", "body"),
    [
        ("application/json", {"inputs": ROWS}),
        ("application/json; charset=utf-8", {"inputs": {"x": ROWS}, "params": {}}),
        ("application/json", {"instances": ROWS}),
        ("application/json", {"dataframe_split": {"columns": ["p", "q", "r"], "data": ROWS, "index": [0, 1]}}),
        ("application/json", {"dataframe_split": {"data": ROWS}}),
        ("application/json", {"dataframe_records": [{"p": 1, "q": 2, "r": 3}, {"r": 6, "q": 5, "p": 4}]}),
        ("text/csv", "p,q,r\n1,2,3\n4, 5 ,6e0\n"),
        ("text/csv; charset=utf-8", "x\n1\n"),
    ],
)
def test_tables_and_tensors_are_answered_with_predictions(app: TinyApp, media: str, body: Any) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    answer = app.ask("POST", "/invocations", text.encode(), content_type=media)
    if text.startswith("x"):
        assert answer.status == 400, "one column is no row of three"
    else:
        assert (answer.status, json.loads(answer.body)) == (200, ANSWER)


def test_columns_that_are_called_as_inputs_go_to_them_whatever_their_order() -> None:
    told = {"dataframe_split": {"columns": ["b", "a"], "data": [[10, 1], [20, 2]]}}
    found = scoring.decode_mlflow(json.dumps(told).encode(), b"application/json", TWO)
    assert found is not None
    assert found.inputs["a"].tolist() == [1, 2]
    assert found.inputs["b"].tolist() == [[10], [20]]
    nested = {"dataframe_records": [{"x": [1, 2, 3]}, {"x": [4, 5, 6]}]}
    whole = scoring.decode_mlflow(json.dumps(nested).encode(), b"", ONE)
    assert whole is not None
    assert whole.inputs["x"].tolist() == ROWS


@pytest.mark.parametrize(
    ("media", "body", "why"),
    [
        ("", '{"dataframe_split": {"columns": ["p"], "data": [[1, 2]]}}', "are not all of its 1 columns"),
        ("", '{"dataframe_split": {"columns": [], "data": []}}', "no rows"),
        ("", '{"dataframe_split": [1]}', "is no table"),
        ("", '{"dataframe_records": [{"p": 1}, {"q": 1}]}', "name the same columns"),
        ("", '{"dataframe_records": []}', "no rows"),
        ("", '{"inputs": [1, 2, 3]}', "batches"),
        ("", '{"inputs": [[1, 2, 3]], "instances": [[1, 2, 3]]}', "beside 'instances' the body names: inputs"),
        ("", '{"inputs": [[1, 2, 3]], "params": {"temperature": 1}}', "takes no params"),
        ("text/csv", "p,q,r\n1,2,x\n", "the cell 'x' is no number"),
        ("text/csv", "p,q,r\n1,2\n", "are not all of its 3 columns"),
        ("text/csv", "", "no CSV"),
        ("text/csv", "\xff", "no CSV"),
        ("text/csv", 'p,q,r\n"1,2,3\n', "no CSV"),
    ],
)
def test_what_is_no_table_is_the_clients_fault_in_mlflows_words_too(
    app: TinyApp, media: str, body: str, why: str
) -> None:
    answer = app.ask("POST", "/invocations", body.encode("latin-1"), content_type=media)
    told = json.loads(answer.body)
    assert (answer.status, told["error_code"], told["code"]) == (400, "BAD_REQUEST", 400)
    assert why in told["message"]


def test_a_form_of_an_unread_kind_is_415_and_an_unknown_model_404(app: TinyApp) -> None:
    image = app.ask("POST", "/invocations", b"x", content_type="image/png")
    assert (image.status, json.loads(image.body)["error_code"]) == (415, "BAD_REQUEST")
    missing = app.ask("POST", "/invocations?model_name=zzz", b"x")
    assert (missing.status, json.loads(missing.body)["error_code"]) == (404, "RESOURCE_DOES_NOT_EXIST")


def test_a_body_that_is_none_of_mlflows_is_judged_as_before(app: TinyApp) -> None:
    assert json.loads(app.ask("POST", "/invocations", b"[1, 2, 3]").body) == [3.0, 5.0, 7.0]
    assert json.loads(app.ask("POST", "/invocations", b'{"x": [1, 2, 3]}').body) == [3.0, 5.0, 7.0]
    named = Signature(inputs=(bundles.spec("inputs", "batch", 3),), outputs=ONE.outputs, dims={"batch": Dim()})
    assert scoring.decode_mlflow(b'{"inputs": [1, 2, 3]}', b"", named) is None, "it is the model's own input"


@given(st.binary(max_size=80), st.sampled_from([b"", b"text/csv"]))
def test_no_bytes_whatever_raise_anything_but_a_request_error(body: bytes, media: bytes) -> None:
    for form in (b"%b", b'{"dataframe_split": %b}', b'{"dataframe_records": %b}', b'{"inputs": %b}'):
        for signature in (ONE, TWO):
            with contextlib.suppress(RequestError):
                scoring.decode_mlflow(form % body, media, signature)


CELL = st.sampled_from(["1", "-2.5", "6e3", "+1", "01", "1.", "", "1e999", "9" * 30, "e"])


@given(
    st.lists(st.lists(CELL, min_size=1), max_size=4),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\n", "\n\n"]),
)  # fmt: skip
def test_a_plain_table_of_csv_read_all_at_once_is_the_one_that_is_read_cell_by_cell(
    rows: list[list[str]], end: str, tail: str
) -> None:
    text = (end.join(",".join(row) for row in [["p", "q"], *rows]) + tail).encode()
    fast = scoring._parse_numbers(text)
    if fast is not None:
        assert fast == scoring._parse_cells(text)


def test_health_is_a_line_feed_and_says_what_readiness_says(app: TinyApp) -> None:
    assert (app.ask("GET", "/health").status, app.ask("GET", "/health").body) == (200, b"\n")
    assert app.ask("GET", "/version").body.decode().count(".") >= 1
    assert app.ask("POST", "/health").status == 405
    app.routes.dispatch.draining = True
    assert app.ask("GET", "/health").status == 503


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own, while it is imported
def test_mlflows_own_client_works_unmodified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import pandas as pd
    from mlflow.pyfunc.scoring_server.client import ScoringServerClient

    a, b, y = bundles.spec("a", "batch"), bundles.spec("b", "batch"), bundles.spec("y", "batch")
    ones = np.ones(2, np.float32)
    bundles.bundle(
        tmp_path / "sum.bundle",
        bundles.graph([helper.make_node("Add", ["a", "b"], ["y"])], [a, b], [y]),
        Signature(inputs=(a, b), outputs=(y,), dims={"batch": Dim()}),
        [Golden(case="2", inputs={"a": ones, "b": ones}, outputs={"y": ones + ones})],
    )
    with serve.start(tmp_path / "sum.bundle") as running:
        client = ScoringServerClient("127.0.0.1", running.port)
        client.ping()
        assert client.get_version()
        table = pd.DataFrame({"b": [10.0, 20.0], "a": [1.0, 2.0]})
        assert client.invoke(table).get_predictions()[0].tolist() == [11.0, 22.0]
        with pytest.raises(Exception, match="takes no params"):
            client.invoke(table, params={"temperature": 1})
        with pytest.raises(Exception, match=r"error code 400[\s\S]*error_code"):
            client.invoke(pd.DataFrame({"c": [1.0]}))
