"""The text of the C++ project that `trueline bundle export-cpp` writes, by pure functions of the signature.

What does not depend on the model stands in `cpp/*.txt` beside this file; here are the tables: what goes in
and comes out, the proven ranges, and where each golden tensor lies. A request outside the range is refused in
the words of the Python Sessions.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trueline.bundle.signature import Signature, TensorSpec
from trueline.errors import BundleError
from trueline.runtime.compare import TOLERANCES

C_TYPES = {
    "BOOL": "at::kBool",
    "INT8": "at::kChar",
    "INT16": "at::kShort",
    "INT32": "at::kInt",
    "INT64": "at::kLong",
    "UINT8": "at::kByte",
    "UINT16": "at::kUInt16",
    "UINT32": "at::kUInt32",
    "UINT64": "at::kUInt64",
    "FP16": "at::kHalf",
    "FP32": "at::kFloat",
    "FP64": "at::kDouble",
}
LOADERS = {"torchscript": "load_torchscript.txt", "aotinductor": "load_aotinductor.txt"}
PROGRAMS = {"torchscript": "model.ts", "aotinductor": "model.so.pt2"}
FIXED = ("CMakeLists.txt", "build.sh", "tables.hpp", "model.hpp", "check.cpp", "main.cpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a golden tensor lies: `size` bytes at `begin` of a safetensors file."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def project(
    name: str,
    digest: str,
    signature: Signature,
    format: str,
    golden: Mapping[str, tuple[Sequence[Stored], Sequence[Stored]]],
) -> dict[str, str]:
    """File names and texts of the project. `golden` gives inputs and outputs of each case, in the signature's order."""
    said = {"NAME": name, "DIGEST": digest, "FORMAT": format, "PROGRAM": PROGRAMS[format]}
    texts = {file: _filled(_fixed(f"{file}.txt"), said) for file in FIXED}
    texts["load.cpp"] = _filled(_fixed(LOADERS[format]), said)
    texts["signature.cpp"] = signature_text(signature)
    texts["golden.cpp"] = golden_text(golden)
    texts["README.md"] = _filled(_fixed("README.md.txt"), said | {"TAKES": _prose(signature)})
    return texts


def signature_text(signature: Signature) -> str:
    """`signature.cpp`: the tables of what is taken, given and proven."""
    symbols = list(signature.dims)
    dims = [
        f"    {{{_quoted(name)}, {dim.min}, {-1 if dim.max is None else dim.max}, {dim.multiple_of}}},"
        for name, dim in signature.dims.items()
    ]
    return "\n".join(
        [
            "// Written by `trueline bundle export-cpp`: what was proven. A max of -1 is no bound.",
            '#include "tables.hpp"',
            "",
            "namespace trueline {",
            "",
            "const std::vector<Dim> dims = {",
            *dims,
            "};",
            "",
            "const std::vector<Spec> inputs = {",
            *(_spec(spec, symbols) for spec in signature.inputs),
            "};",
            "",
            "const std::vector<Spec> outputs = {",
            *(_spec(spec, symbols) for spec in signature.outputs),
            "};",
            "",
            "const std::vector<Guard> guards = {",
            *(_guard(guard, symbols) for guard in getattr(signature, "guards", ())),
            "};",
            "",
            "const std::vector<Tolerance> tolerances = {",
            *_tolerances(),
            "};",
            "",
            "}  // namespace trueline",
            "",
        ]
    )


def golden_text(golden: Mapping[str, tuple[Sequence[Stored], Sequence[Stored]]]) -> str:
    """`golden.cpp`: where each golden tensor lies in its safetensors file."""
    lines = []
    for case, (given, answered) in golden.items():
        lines.append(f"    {{{_quoted(case)},")
        lines += [f"     {{{''.join(_stored(one) for one in given)}}},"]
        lines += [f"     {{{''.join(_stored(one) for one in answered)}}}}},"]
    return "\n".join(
        [
            "// Written by `trueline bundle export-cpp`: the golden examples, raw numbers in golden/*.safetensors.",
            '#include "tables.hpp"',
            "",
            "namespace trueline {",
            "",
            "const std::vector<Golden> golden = {",
            *lines,
            "};",
            "",
            "}  // namespace trueline",
            "",
        ]
    )


def _spec(spec: TensorSpec, symbols: Sequence[str]) -> str:
    sizes = [f"{{{size}, -1}}" if isinstance(size, int) else f"{{-1, {symbols.index(size)}}}" for size in spec.shape]
    kind = f"{C_TYPES[spec.datatype]}, {_quoted(spec.datatype)}"
    return f"    {{{_quoted(spec.name)}, {kind}, {{{', '.join(sizes)}}}, Rows::{spec.rows}}},"


def _guard(guard: Any, symbols: Sequence[str]) -> str:
    places = ", ".join(str(symbols.index(symbol)) for symbol in guard.symbols)
    rule = expression(ast.parse(guard.rule, mode="eval").body)
    return (
        f"    {{{_quoted(guard.text)}, {{{places}}}, [](const std::vector<int64_t>& d) -> bool {{ return {rule}; }}}},"
    )


_OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=", ast.And: " && ", ast.Or: " || ",
}  # fmt: skip
_FUNCTIONS = {ast.FloorDiv: "floor_div", ast.Mod: "floor_mod"}


def expression(node: ast.expr) -> str:
    """A guard's rule as C++. Raises BundleError for what has no counterpart.

    >>> expression(ast.parse("2 * d0 // 3 == d1 and max(d0, 4) < 9", mode="eval").body)
    '((floor_div((int64_t{2}*d[0]),int64_t{3})==d[1]) && (std::max({d[0],int64_t{4}})<int64_t{9}))'
    """
    match node:
        case ast.Constant(value=int(number)):
            return f"int64_t{{{number}}}"
        case ast.Name(id=name) if name[1:].isdecimal():
            return f"d[{name[1:]}]"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return f"(-{expression(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _FUNCTIONS:
            return f"{_FUNCTIONS[type(op)]}({expression(left)},{expression(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({expression(left)}{_OPERATORS[type(op)]}{expression(right)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return f"({expression(left)}{_OPERATORS[type(op)]}{expression(right)})"
        case ast.BoolOp(op=op, values=values):
            return f"({_OPERATORS[type(op)].join(map(expression, values))})"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=args):
            return f"std::{name}({{{','.join(map(expression, args))}}})"
    raise BundleError(f"the guard {ast.unparse(node)!r} cannot be written in C++")


def _stored(one: Stored) -> str:
    shape = ", ".join(map(str, one.shape))
    return f"{{{C_TYPES[one.datatype]}, {{{shape}}}, {one.begin}, {one.size}}}, "


def _tolerances() -> list[str]:
    names = {"float16": "at::kHalf", "float32": "at::kFloat", "float64": "at::kDouble"}
    return [f"    {{{names[dtype.name]}, {one.atol!r}, {one.rtol!r}}}," for dtype, one in TOLERANCES.items()]


def _prose(signature: Signature) -> str:
    rows = [f"takes `{spec.name}`: {spec.datatype} {list(spec.shape)}" for spec in signature.inputs]
    rows += [f"gives `{spec.name}`: {spec.datatype} {list(spec.shape)}" for spec in signature.outputs]
    return "\n".join(f"- {row}" for row in rows)


def _quoted(text: str) -> str:
    """A C++ string literal; names are printable and without quotes, and escaped all the same."""
    return json.dumps(text)


def _fixed(file: str) -> str:
    return resources.files("trueline.capture.cpp").joinpath(file).read_text(encoding="utf-8")


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text
