"""What a torch.export archive may contain, so that opening it runs no code. Imports no torch.

On loading, torch 2.13 unpickles example inputs, tensor subclasses and script objects, evaluates shape expressions
(sympy uses `eval`), compiles guards from source, looks operators up by dotted name and imports modules that a tree spec
names. `check` refuses, before torch reads a byte, everything but a plain graph over aten operators, in the forms of
`torch/_export/serde/schema.py` 8.x; `clean` removes what a run does not need.
"""

import ast
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trueline.errors import BundleError

SOURCE_LINE = re.compile(r"[\w-]+\.py:\d+")
"""Origin of a value in a bundle: `layers.py:13`, without a folder."""
_JSON = re.compile(r"models/model\.json|data/(weights/model_weights|constants/model_constants)_config\.json")
_RAW = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_(format|version)|byteorder"
    r"|\.data/(version|serialization_id)"
)
_SAMPLE = "data/sample_inputs/model.pt"
_TARGET = re.compile(
    r"torch\.ops\.(aten|prims)\.(?!from_file)\w+(\.\w+)?"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|map_impl|associative_scan|wrap_with_set_grad_enabled)"
    r"|_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|[lr]shift|getitem)"
    r"|torch\.sym_(not|int|float|ite|max|min|sqrt)|math\.trunc"
)
"""Operators that compute and do nothing else (`from_file` would map a file of the machine)."""
_SYMBOL = re.compile(r"(s|u|zuf|zf)\d+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
"""What a Float holds, in quotes."""
_FUNCTION = re.compile(
    r"Add|Mul|Pow|Mod|Max|Min|Integer|Float|Rational|Symbol|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Abs|oo"
    r"|int_oo|true|false|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan"
    r"|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift"
    r"|PowByNatural|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat|TruncToInt|RoundToInt"
    r"|RoundDecimal|ToFloat|Identity"
)
_PLAIN = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.keyword)
_OPERATORS = (ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context)
_TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict")
_STAMP = (1980, 1, 1, 0, 0, 0)
_PART = 1 << 22
"""Bytes that are copied at once."""


def clean(raw: BinaryIO, path: Path, brief: Callable[[str], str]) -> None:
    """Copies the archive `raw` to `path` without example inputs and guards, in fixed bytes, and checks it.

    `brief` shortens a stack trace to a SOURCE_LINE, or to nothing.
    The guards' ranges stand in the signature and are enforced there. Raises BundleError.
    """
    with zipfile.ZipFile(raw) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.infolist():
            entry = zipfile.ZipInfo(member.filename, _STAMP)
            if member.filename.endswith("/models/model.json"):
                target.writestr(entry, _clean_json(source.read(member), brief))
                continue
            entry.file_size = member.file_size
            with source.open(member) as weights, target.open(entry, "w") as into:  # may be larger than the memory
                shutil.copyfileobj(weights, into, _PART)
    try:
        check(path)
    except BundleError:
        path.unlink()
        raise


def _clean_json(content: bytes, brief: Callable[[str], str]) -> bytes:
    program = json.loads(content)
    program["guards_code"] = []
    for key, holder in _walk(program):
        if key == "metadata":
            place = brief(holder[key].get("stack_trace") or "")
            holder[key] = {"stack_trace": place} if place else {}
    return json.dumps(program, separators=(",", ":"), sort_keys=True).encode()


def check(path: Path) -> None:
    """Refuses an archive that could run code when it is loaded. Raises BundleError that names the member."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise BundleError(f"{path} is no torch.export archive")
        with zipfile.ZipFile(path) as archive:
            _check_members(archive, path)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise BundleError(f"{path} is torn: {error}") from error


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    members = archive.infolist()
    names = [member.filename for member in members]
    roots = {name.split("/", 1)[0] for name in names}
    if len(names) != len(set(names)) or len(roots) != 1 or archive.comment:
        raise BundleError(f"{path} is no plain torch.export archive: a name stands twice or it has several roots")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:  # it may become any number of bytes
            raise BundleError(f"{path}:{member.filename} is compressed", hint="capture the model again")
        name = member.filename.partition("/")[2]
        if name == _SAMPLE and not member.file_size:
            continue
        if _JSON.fullmatch(name):
            _check_json(archive.read(member), f"{path}:{member.filename}")
        elif not _RAW.fullmatch(name):
            raise BundleError(
                f"{path} holds {member.filename}, which may be a pickle or code; a bundle holds neither",
                hint="capture the model again with `trueline capture`",
            )


def _check_json(content: bytes, where: str) -> None:
    try:
        found = json.loads(content)
        for key, holder in _walk(found):
            _check_entry(key, holder[key], where)
    except (ValueError, SyntaxError, RecursionError, TypeError) as error:
        raise BundleError(f"{where} is torn or of another version: {error}") from error


def _walk(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of every object, with the object that holds it."""
    if isinstance(node, dict):
        for key in list(node):
            yield key, node
            yield from _walk(node[key])
    elif isinstance(node, list):
        for item in node:
            yield from _walk(item)


def _check_entry(key: str, value: Any, where: str) -> None:
    if key == "use_pickle" and value:
        raise BundleError(f"{where} stores a tensor as a pickle; a bundle holds none")
    place = key == "metadata" and set(value) == {"stack_trace"} and SOURCE_LINE.fullmatch(str(value["stack_trace"]))
    if key in ("guards_code", "metadata") and value and not place:
        raise BundleError(f"{where} carries {key}, which torch would turn into code")
    if key in ("as_custom_obj", "as_script_obj", "custom_obj") and value is not None:
        raise BundleError(f"{where} carries a custom object, which only a pickle can hold")
    if key == "target" and isinstance(value, str) and not _TARGET.fullmatch(value):
        raise BundleError(
            f"{where} calls {value!r}; a bundle holds aten operators only",
            hint="replace the custom operator by torch functions, or capture to ONNX",
        )
    if key == "expr_str":
        _check_expression(value, where)
    if key in ("in_spec", "out_spec") and value:
        _check_tree(json.loads(value)[1], where)


def _check_expression(text: str, where: str) -> None:
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            fine = bool(_FUNCTION.fullmatch(node.id) or _SYMBOL.fullmatch(node.id))
        elif isinstance(node, ast.Constant):
            words = isinstance(node.value, (str, bytes))
            fine = not words or any(form.fullmatch(str(node.value)) for form in (_SYMBOL, _NUMBER))
        elif isinstance(node, ast.Call):
            fine = isinstance(node.func, ast.Name)
        else:
            fine = isinstance(node, (*_PLAIN, *_OPERATORS))
        if not fine:
            raise BundleError(f"{where} holds a shape expression that is none: {text[:100]!r}")


def _check_tree(tree: Any, where: str) -> None:
    if tree["type"] not in _TREES or "__enum__" in str(tree["context"]):
        raise BundleError(f"{where} nests its tensors in {tree['type']}, which torch would import")
    for child in tree["children_spec"]:
        _check_tree(child, where)
