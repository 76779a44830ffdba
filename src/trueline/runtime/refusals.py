"""Errors of runtimes in the client's words: the input, its value and what the program takes. Pure.

Runtimes name nodes of the graph (`node_embedding_1`), lines of their sources and sizes of buffers; a client knows the
names of the inputs. An index beyond a table is looked for in the inputs that hold whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueline.bundle.signature import DATATYPES
from trueline.errors import RequestError, TooLarge, TruelineError, first_line

if TYPE_CHECKING:
    from trueline.bundle.signature import Array

_INDEX = re.compile(
    r"\bidx=(?P<a>-?\d+)|Actual value is (?P<b>-?\d+)|ind(?:ex|ice) found, ind(?:ex|ice) = (?P<c>-?\d+)"
    r"|\bindex (?P<d>-?\d+) is out of (?:bounds|range)|\bindices?\b\D{0,40}(?P<e>-?\d+)\D{0,20}out of (?:bounds|range)"
)
_RANGE = re.compile(r"range \[ ?(-?\d+) ?, ?(-?\d+) ?\]|within bounds \[ ?(-?\d+) ?, ?(-?\d+) ?\]|with size (\d+)")
_OUTSIDE = re.compile(
    r"out of (?:data )?(?:bounds|range)|out-of-(?:bounds|range)|within bounds|invalid ind(?:ex|ice) found", re.I
)
_MEMORY = re.compile(
    r"Available memory of \d+ is smaller than requested bytes of (\d+)|Failed to allocate memory for requested buffer "
    r"of size (\d+)|tried to allocate (\d+) bytes|bad_alloc|out of memory|not enough memory",
    re.I,
)
_VALUES = re.compile(
    r"\bsingular\b|positive[- ]definite|failed to converge|is zero and using it|ZeroDivisionError"
    r"|Unknown error code: [1-9]"
    r"|not in the valid range|Class values must|non-negative integral|can not be negative"
    r"|offsets of bags have to grow"
    r"|probability tensor contains|has to be greater than 0|Integer (?:division|modulo) by zero"
)
"""What operators of torch and ONNX Runtime raise for values that they have no answer to; the eager model raises too."""
_RAISED = re.compile(r"\n(?:builtins\.|RuntimeError: )?\w+: (.+)\n*\Z")
"""The last line of what a `raise` or `assert` in a TorchScript program leads to."""
_INNER = (
    re.compile(r"^.*INTERNAL ASSERT FAILED at \S+, please report a bug to PyTorch\. "),
    re.compile(r"^\[\w+\] : \d+ : \w+ : "),
    re.compile(r"Non-zero status code returned while running (\w+) node\. ?Name: ?'[^']*' ?Status Message: ?"),
    re.compile(r"\b(?:node|name|Name):? ?['\"(][^'\")]*['\")]:?,? ?"),
    re.compile(r"(?:/[\w.+-]+){2,}(?::\d+)?(?: [\w:*&<> ]+\([^)]*\)(?: const)?)?:? ?"),
)
REFUSES = "the model refuses these values"
"""How the message of a check of values in a graph begins."""
CHECK_INDEX = 1_936_287_000
"""The index that the first check in an ONNX program looks up where it fails, the next one more, and so on: no table has
as many rows, and no name reaches a runtime's error."""
CHECKS = "trueline.checks"
"""Key in a program's metadata: a list in JSON of the messages of its checks."""
_CHECKED = re.compile(
    rf"^(?:\w+: )?{REFUSES}(?:: (?P<words>.+))?$|\b{CHECK_INDEX // 1000}(?P<check>\d{{3}})\b", re.MULTILINE
)
_WORDS = 300
"""Characters of a runtime's message."""


def refusal_of(
    error: Exception, inputs: Mapping[str, Array], *, blame: bool = False, checks: Sequence[str] = ()
) -> TruelineError:
    """The error to raise for a run on `inputs` that ended with `error`: a RequestError if the inputs are to blame.

    `blame`: the runtime says so by the type of its error; else its message decides. `checks`: what the metadata of the
    program has as CHECKS.
    """
    text = str(error)
    found = _MEMORY.search(text)
    if found or isinstance(error, MemoryError):
        size = next(filter(None, found.groups()), None) if found else None
        needs = "" if size is None else f": {int(size):,} bytes more in one step"
        return TooLarge(
            f"the program needs more memory for {describe(inputs)} than the server allows its runs{needs}",
            hint="send fewer or shorter records in one request, or start the server with a larger --run-memory",
        )
    if checked := _CHECKED.search(text):
        words = checked["words"]
        if checked["check"] and int(checked["check"]) < len(checks):
            words = shorten_check(checks[int(checked["check"])])
        return RequestError(f"{REFUSES} ({describe(inputs)}){f': {without_names(words)}' if words else ''}")
    if isinstance(error, IndexError) or _OUTSIDE.search(text):
        return RequestError(f"the program refuses these values: {_outside(text, inputs)}")
    raised = _RAISED.search(text) if str(type(error)) == "<class 'torch.jit.Error'>" else None
    if raised:  # other errors in such a program are of other types
        return RequestError(f"{REFUSES} ({describe(inputs)}): {without_names(raised[1])}")
    if not blame and not _VALUES.search(text):
        return TruelineError(f"the program failed on a request that it accepted: {first_line(error)}")
    return RequestError(f"the program refuses these values ({describe(inputs)}): {without_names(text)}")


def shorten_check(message: str) -> str:
    """What a check says besides `REFUSES`.

    >>> shorten_check(f"{REFUSES}: ages are above 0")
    'ages are above 0'
    """
    return message.removeprefix(REFUSES).removeprefix(": ")


def describe(inputs: Mapping[str, Array]) -> str:
    """
    >>> describe({"ids": np.zeros((2, 5), np.int64)})
    "input 'ids' INT64 [2, 5]"
    """
    shown = [
        f"'{name}' {DATATYPES.get(array.dtype, array.dtype)} {list(array.shape)}"
        for name, array in list(inputs.items())[:8]
    ]
    return ("input " if len(shown) == 1 else "inputs ") + ", ".join(shown)


def without_names(text: str) -> str:
    """A runtime's message without names and places that only it knows.

    >>> where = "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running Add node. "
    >>> without_names(where + "Name:'node_add_1' Status Message: /src/core/add.h:45 void Add::Run(int) axis 3 by 5")
    'axis 3 by 5'
    """
    line = " ".join(text.split())
    for pattern in _INNER:
        line = pattern.sub("", line)
    return line[:_WORDS]


def _outside(text: str, inputs: Mapping[str, Array]) -> str:
    match, bounds = _INDEX.search(text), _RANGE.search(text)
    takes = _takes(bounds)
    whole = {name: array for name, array in inputs.items() if array.dtype.kind in "iu" and array.size}
    value = None if match is None else int(next(group for group in match.groups() if group is not None))
    if value is not None:
        for name, array in whole.items():
            equal = (array == value).reshape(-1)
            place = int(equal.argmax())
            if equal[place]:
                at = f" at {list(map(int, np.unravel_index(place, array.shape)))}" if array.ndim else ""
                return f"input '{name}' has {value}{at}, which is outside of a table{takes}"
    if len(whole) == 1:
        ((name, array),) = whole.items()
        return (
            f"input '{name}' has values from {array.min()} to {array.max()}, one of them is outside of a table{takes}"
        )
    shown = "" if value is None else f" {value}"
    return f"{describe(whole or inputs)} lead to the index{shown}, which is outside of a table{takes}"


def _takes(bounds: re.Match[str] | None) -> str:
    if bounds is None:
        return ""
    if bounds[5] is not None:
        return f" of {bounds[5]} entries"
    low, high = (int(one) for one in (bounds[1] or bounds[3], bounds[2] or bounds[4]))
    return f" that takes {low} to {high}"
