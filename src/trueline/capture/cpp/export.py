"""`export-cpp`: a bundle as a small C++ project that runs without Python and checks itself where it is built.

The project holds the program, the golden records as they are in the bundle, tables of the signature, and a `replay`
that exits non-zero when an answer differs. What does not depend on the model is in `*.txt` beside this file. Nothing in
the bundle runs here; imports no torch.
"""

import ast
import json
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from trueline import events, files
from trueline.bundle import Bundle, Dim, Golden, Signature, TensorSpec, schema
from trueline.bundle.guard_words import describe_guard
from trueline.bundle.guards import Guard
from trueline.bundle.read import open_bundle
from trueline.bundle.values import Values
from trueline.errors import BundleError, UsageError, join_names
from trueline.runtime.compare import default_bound

C_TYPES = {
    "BOOL": "at::kBool", "INT8": "at::kChar", "INT16": "at::kShort", "INT32": "at::kInt", "INT64": "at::kLong",
    "UINT8": "at::kByte", "UINT16": "at::kUInt16", "UINT32": "at::kUInt32", "UINT64": "at::kUInt64",
    "FP16": "at::kHalf", "FP32": "at::kFloat", "FP64": "at::kDouble",
}  # fmt: skip
LOADERS = {"torchscript": "load_torchscript.txt", "aotinductor": "load_aotinductor.txt"}
PROGRAMS = {"torchscript": "model.ts", "aotinductor": "model.so.pt2"}
FIXED = ("CMakeLists.txt", "build.sh", "tables.hpp", "model.hpp", "check.cpp", "main.cpp")


def export_cpp(bundle: str | Path | Bundle, folder: str | Path, *, format: str | None = None) -> Path:
    """Writes the C++ project for `bundle` to `folder`, whole or not at all; returns the folder.

    Takes the program in `format`, by default TorchScript, or the AOTInductor package when there is no other. Raises
    BundleError when the bundle has no program that libtorch can load, UsageError when the folder exists, StorageError.
    """
    folder = Path(folder)
    if folder.exists():
        raise UsageError(f"{folder} exists already", hint="name a folder that does not exist yet")
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    if opened.signature.random:
        raise UsageError(
            f"bundle '{opened.name}' draws random numbers, and the project compares golden records value by value",
            hint="serve it with `trueline serve`, which compares their distribution",
        )
    chosen = _choose(opened, format)
    with files.atomic_dir(folder) as partial:
        for name, text in _project(opened, chosen).items():
            (partial / name).write_text(text, encoding="utf-8")
        (partial / "build.sh").chmod(0o755)
        (partial / "golden").mkdir()
        for name in (schema.GOLDEN_INPUTS, schema.GOLDEN_OUTPUTS):
            shutil.copyfile(opened.path / name, partial / name)
        shutil.copyfile(opened.program_path(chosen), partial / PROGRAMS[chosen])
    events.emit("project.written", path=str(folder), format=chosen, digest=opened.digest)
    return folder


def _choose(bundle: Bundle, format: str | None) -> str:
    has = [entry.format for entry in bundle.manifest.programs]
    loadable = [name for name in PROGRAMS if name in has]
    if format is not None and format not in PROGRAMS:
        raise UsageError(f"libtorch cannot load format '{format}' (it loads: {join_names(PROGRAMS)})")
    target = "aotinductor" if format == "aotinductor" else "cpp"
    if not loadable or (format is not None and format not in loadable):
        raise BundleError(
            f"bundle '{bundle.name}' has no {format or 'program'} that C++ can load "
            f"(has: {join_names(has)}; C++ loads: {join_names(PROGRAMS)})",
            hint=f"capture it again with `--for {target}` beside the others",
        )
    return format or loadable[0]


def _project(bundle: Bundle, format: str) -> dict[str, str]:
    """File names and texts of the project."""
    signature = bundle.signature_of(format)
    lines = [f"- takes `{spec.name}`: {spec.datatype} {list(spec.shape)}" for spec in signature.inputs]
    lines += [f"- gives `{spec.name}`: {spec.datatype} {list(spec.shape)}" for spec in signature.outputs]
    values = {"NAME": bundle.name, "DIGEST": bundle.digest, "FORMAT": format, "PROGRAM": PROGRAMS[format]}
    values["TAKES"] = "\n".join(lines)
    templates = {file: f"{file}.txt" for file in (*FIXED, "README.md")} | {"load.cpp": LOADERS[format]}
    texts = {}
    for file, template in templates.items():
        text = resources.files("trueline.capture.cpp").joinpath(template).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        texts[file] = text
    return texts | {"signature.cpp": signature_text(signature), "golden.cpp": _golden_text(bundle)}


def signature_text(signature: Signature) -> str:
    """`signature.cpp`: the tables of inputs, outputs and proven ranges."""
    symbols = list(signature.dims)
    dims = [
        f"{{{json.dumps(name)}, {dim.min}, {-1 if dim.max is None else dim.max}, {dim.multiple_of}}}"
        for name, dim in signature.dims.items()
    ]
    tables = {
        "Dim> dims": dims,
        "Spec> inputs": [_spec(spec, symbols) for spec in signature.inputs],
        "Spec> outputs": [_spec(spec, symbols) for spec in signature.outputs],
        "Guard> guards": [_guard(guard, symbols, signature.dims) for guard in signature.guards],
    }
    return _source("what was proven. A max of -1 is no bound.", tables)


def _source(what: str, tables: Mapping[str, Iterable[str]]) -> str:
    lines = [
        f"// Written by `trueline bundle export-cpp`: {what}",
        '#include "tables.hpp"',
        "",
        "namespace trueline {",
        "",
    ]
    for name, rows in tables.items():
        lines += [f"const std::vector<{name} = {{", *(f"    {row}," for row in rows), "};", ""]
    return "\n".join([*lines, "}  // namespace trueline", ""])


def _spec(spec: TensorSpec, symbols: Sequence[str]) -> str:
    sizes = [f"{{{size}, -1}}" if isinstance(size, int) else f"{{-1, {symbols.index(size)}}}" for size in spec.shape]
    kind = f"{C_TYPES[spec.datatype]}, {json.dumps(spec.datatype)}"
    values = f", {_values(spec.values, symbols)}" if spec.values else ""
    return f"{{{json.dumps(spec.name)}, {kind}, {{{', '.join(sizes)}}}, Rows::{spec.rows}{values}}}"


def _values(values: Values, symbols: Sequence[str]) -> str:
    finite = "true" if values.finite else "false"
    size = symbols.index(values.size) if values.size else -1
    return f"{{{json.dumps(values.text)}, {finite}, {_scalar(values.low)}, {_scalar(values.high)}, {size}}}"


def _scalar(number: float | None) -> str:
    if number is None:
        return "std::nullopt"
    if isinstance(number, float):
        return f"at::Scalar({number!r})"
    least = -(2**63)  # which no literal of C++ is
    return f"at::Scalar(int64_t{{{number}}})" if number > least else "at::Scalar(int64_t{-9223372036854775807 - 1})"


def _guard(guard: Guard, symbols: Sequence[str], dims: Mapping[str, Dim]) -> str:
    places = ", ".join(str(symbols.index(symbol)) for symbol in guard.symbols)
    rule = expression(ast.parse(guard.rule, mode="eval").body)
    words = json.dumps(describe_guard(guard, dims))
    return f"{{{words}, {{{places}}}, [](const std::vector<int64_t>& d) -> bool {{ return {rule}; }}}}"


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


def _golden_text(bundle: Bundle) -> str:
    """`golden.cpp`: where each golden tensor is in its safetensors file."""
    signature = bundle.signature
    inputs, outputs = (_header(bundle.path / name) for name in (schema.GOLDEN_INPUTS, schema.GOLDEN_OUTPUTS))
    rows = []
    for golden in bundle.golden():
        given = "".join(_tensor(inputs, golden.case, spec) for spec in signature.inputs)
        answer = "".join(_tensor(outputs, golden.case, spec) for spec in signature.outputs)
        bounds = ", ".join(_format_bound(golden, spec) for spec in signature.outputs)
        rows.append(f"{{{json.dumps(golden.case)},\n     {{{given}}},\n     {{{answer}}},\n     {{{bounds}}}}}")
    return _source("the golden records, raw numbers in golden/*.safetensors.", {"Golden> golden": rows})


def _format_bound(golden: Golden, spec: TensorSpec) -> str:
    """How far an output may be off, of the whole and along each axis; empty where it has to be equal."""
    answer = golden.outputs[spec.name]
    bound = golden.bounds.get(spec.name) or default_bound(answer) or ()
    return f"{{{', '.join('{' + ', '.join(repr(float(one)) for one in part) + '}' for part in bound)}}}"


def _header(path: Path) -> Mapping[str, Any]:
    """The table at the head of a safetensors file, whose content the bundle's digest covers."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        table: dict[str, Any] = json.loads(file.read(length))
    return table


class _Stored(msgspec.Struct):
    """A tensor in the table of a safetensors file. Its numbers become source text."""

    shape: list[int]
    data_offsets: tuple[int, int]


def _tensor(header: Mapping[str, Any], case: str, spec: TensorSpec) -> str:
    try:
        entry = msgspec.convert(header[f"{case}/{spec.name}"], _Stored)
    except (KeyError, msgspec.ValidationError) as error:
        raise BundleError(f"the golden record '{case}/{spec.name}' cannot be read: {error}") from error
    begin, end = entry.data_offsets
    shape = ", ".join(map(str, entry.shape))
    return f"{{{C_TYPES[spec.datatype]}, {{{shape}}}, {begin}, {end - begin}}}, "
