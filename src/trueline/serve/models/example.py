"""A request that a version answers: its smallest golden record, as the JSON body of /predictions/NAME."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trueline.bundle.golden import Golden
from trueline.bundle.signature import Array

LONGEST = 64 * 1024
"""Characters of an example that a version keeps."""
LONGEST_LINE = 1200
"""Characters of an example that stands in a command line."""


def write_request(golden: Sequence[Golden]) -> str:
    """The body of a request with the smallest golden record; empty if JSON cannot hold it, or it is too long."""
    fitting = [one for one in golden if all(_in_json(array) for array in one.inputs.values())]
    if not fitting:
        return ""
    smallest = min(fitting, key=lambda one: sum(array.size for array in one.inputs.values()))
    if sum(array.size for array in smallest.inputs.values()) * 2 > LONGEST:
        return ""
    text = write_body({name: as_lists(array) for name, array in smallest.inputs.items()})
    return text if len(text) <= LONGEST else ""


def write_body(example: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """The body of a request with these inputs, or with these records by column name; empty without any."""
    return json.dumps(example) if example else ""


def curl_line(url: str, model: str, example: str, *, token: bool = False, certificate: str = "") -> str:
    """A command that sends `example` to `model` at `url`; empty if it would be too long to read. `token`: the server
    needs one, which the line takes from $TOKEN; `certificate`: the file that verifies the server's.
    """
    if not example or len(example) > LONGEST_LINE:
        return ""
    parts = ["curl", f"{url}/predictions/{model}"]
    parts += ["--cacert", shlex.quote(certificate)] if certificate else []
    parts += ["-H", '"authorization: Bearer $TOKEN"'] if token else []
    return " ".join([*parts, "-H", "'content-type: application/json'", "-d", shlex.quote(example)])


def _in_json(array: Array) -> bool:
    return array.dtype.kind in "biu" or (array.dtype.kind == "f" and bool(np.isfinite(array).all()))


def as_lists(array: Array) -> Any:
    """As lists; floats in the fewest digits that give them back."""
    return array.astype("U").astype(np.float64).tolist() if array.dtype.kind == "f" else array.tolist()
