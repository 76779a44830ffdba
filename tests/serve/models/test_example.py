"""The command that a ready server prints sends a request that it answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueline.bundle.golden import Golden
from trueline.bundle.read import open_bundle
from trueline.serve.models.example import LONGEST, LONGEST_LINE, curl_line, write_request
from trueline.serve.models.loader import RuntimeOptions, load
from worlds import bundles


def golden(**inputs: Any) -> Golden:
    return Golden(case="1", inputs=inputs, outputs={"y": np.zeros(1)})


def test_the_request_is_the_smallest_golden_record_with_floats_in_their_fewest_digits() -> None:
    large, small = np.zeros((8, 2), np.float32), np.array([[0.1, -2]], np.float32)
    assert write_request([golden(x=large), golden(x=small)]) == '{"x": [[0.1, -2.0]]}'


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_the_request_gives_back_the_record_bit_for_bit(dtype: type) -> None:
    given = np.random.default_rng(0).normal(scale=40, size=(3, 4)).astype(dtype)
    body = json.loads(write_request([golden(x=given)]))
    assert np.array_equal(np.array(body["x"], dtype), given)


def test_a_record_that_json_cannot_hold_or_that_is_too_long_is_left_out() -> None:
    assert write_request([golden(x=np.array([[np.nan]]))]) == ""
    assert write_request([golden(x=np.array([[np.inf]])), golden(x=np.array([[1.0, 2.0]]))]) == '{"x": [[1.0, 2.0]]}'
    assert write_request([golden(x=np.zeros((1, LONGEST)))]) == ""


def test_a_shell_reads_the_line_as_it_is_meant() -> None:
    line = curl_line("http://127.0.0.1:1", "tiny", '{"it\'s": [1]}')
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:1/predictions/tiny"]
    assert words[-2:] == ["-d", '{"it\'s": [1]}']


def test_the_line_names_the_token_and_the_certificate_where_the_server_needs_them() -> None:
    line = curl_line("https://h:1", "tiny", "{}", token=True, certificate="my cert.pem")
    assert "--cacert 'my cert.pem'" in line
    assert '"authorization: Bearer $TOKEN"' in line


def test_there_is_no_line_that_is_too_long_to_read() -> None:
    assert curl_line("u", "m", "") == ""
    assert curl_line("u", "m", "1" * (LONGEST_LINE + 1)) == ""


def test_a_server_that_hides_examples_has_no_golden_record_to_show(tmp_path: Path) -> None:
    opened = open_bundle(bundles.scaled(tmp_path / "double.bundle").path)
    shown, hidden = (load(opened, RuntimeOptions(hide_examples=hide), max_batch=8) for hide in (False, True))
    assert (bool(shown.example), bool(hidden.example), len(hidden.records)) == (True, False, 0)
    assert hidden.golden_cases == shown.golden_cases, "they are replayed all the same"
