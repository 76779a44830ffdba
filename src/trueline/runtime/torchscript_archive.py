"""What a TorchScript archive may contain, so that opening it runs only the model's arithmetic. Imports no torch.

libtorch's unpickler imports nothing, but the program's text (`code/**.py`) could name an operator that reaches the
machine: `aten::save` writes a file, `aten::from_file` maps one. `check` refuses, before torch reads a byte, every
member, name in a pickle, and operator that a model does not need; `clean` removes the debug records, which hold paths.
"""

import ast
import pickletools
import re
import zipfile
from pathlib import Path
from typing import BinaryIO

from trueline.errors import BundleError

_CODE = re.compile(r"code/[\w/.]+\.py")
_PICKLE = re.compile(r"(data|constants)\.pkl")
_RAW = re.compile(r"(data|constants)/\d+|version|byteorder|\.(data|format)/?\w*|\.storage_alignment|\.format_version")
_SPARE = re.compile(r".*\.debug_pkl|traced_inputs(/\d+|\.pkl)")
"""Not needed to run: places in source files, and the inputs of a trace."""
_GLOBAL = re.compile(
    r"__torch__(\.(?!torch\.classes\b)\w+)* \w+|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|collections OrderedDict|torch \w+Storage|torch device"
    r"|torch\.jit\._pickle (build_\w+list|restore_type_tag)"
)
"""What a pickle may name; libtorch's reader knows no others that do anything."""
_OPCODES = re.compile(
    r"PROTO|STOP|GLOBAL|MARK|NONE|POP|NEW(OBJ|TRUE|FALSE)|BUILD|REDUCE|BINPERSID|BININT[12]?|LONG[14]|BINFLOAT"
    r"|EMPTY_(TUPLE|LIST|DICT)|TUPLE[123]?|(SHORT_)?BINUNICODE8?|(LONG_)?BIN(GET|PUT)|SETITEMS?|APPENDS?"
)
_FORBIDDEN = re.compile(r"save|load|from_file|rpc_\w+|PythonOp|IgnoredPythonOp|classes|__import__|eval|exec")
"""Operators that write, map or send, and names that no serialized model has."""
_NAMESPACES = frozenset({"aten", "prim", "quantized"})
_STAMP = (1980, 1, 1, 0, 0, 0)


def clean(raw: BinaryIO | Path, path: Path) -> None:
    """Copies the archive `raw` to `path` without debug records and traced inputs, and checks it. Raises BundleError."""
    try:
        with zipfile.ZipFile(raw) as source, zipfile.ZipFile(path, "w") as target:
            for member in source.infolist():
                if not _SPARE.fullmatch(member.filename.partition("/")[2]):
                    target.writestr(zipfile.ZipInfo(member.filename, _STAMP), source.read(member))
        check(path)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        path.unlink(missing_ok=True)
        raise BundleError(f"{raw if isinstance(raw, Path) else path} is torn: {error}") from error
    except BundleError:
        path.unlink(missing_ok=True)
        raise


def check(path: Path) -> None:
    """Refuses an archive that could do more than compute. Raises BundleError that names the member."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(archive, path)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise BundleError(f"{path} is torn or no TorchScript archive: {error}") from error


def source(path: Path) -> str:
    """The program as TorchScript prints it: the text of every class in the archive, root first."""
    check(path)
    with zipfile.ZipFile(path) as archive:
        names = sorted((name for name in archive.namelist() if name.endswith(".py")), key=lambda name: name.count("/"))
        return "\n".join(f"# {name.partition('/code/')[2]}\n{archive.read(name).decode()}" for name in names)


def is_archive(path: Path) -> bool:
    """Whether `path` looks like TorchScript: a zip with code in it. A plain `torch.save` has none."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(_CODE.fullmatch(name.partition("/")[2]) for name in archive.namelist())


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    names = archive.namelist()
    if len(names) != len(set(names)) or len({name.partition("/")[0] for name in names}) != 1 or archive.comment:
        raise BundleError(f"{path} is no plain TorchScript archive: a name stands twice or it has several roots")
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:  # it may become any number of bytes
            raise BundleError(f"{path}:{member.filename} is compressed", hint="capture the model again")
    for name in names:
        inner, where = name.partition("/")[2], f"{path}:{name}"
        if _CODE.fullmatch(inner):
            _check_code(archive.read(name), where)
        elif _PICKLE.fullmatch(inner):
            _check_pickle(archive.read(name), where)
        elif not _RAW.fullmatch(inner):
            raise BundleError(
                f"{where} has no place in a TorchScript program; it may be a pickle or code",
                hint="capture the model again with `trueline capture`",
            )
    if not any(name.endswith("/data.pkl") for name in names):
        raise BundleError(f"{path} is no TorchScript archive: it has no data.pkl")


def _check_pickle(content: bytes, where: str) -> None:
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if not _OPCODES.fullmatch(opcode.name):
                raise BundleError(f"{where} uses the pickle opcode {opcode.name}, which no TorchScript table needs")
            if opcode.name == "GLOBAL" and not _GLOBAL.fullmatch(str(argument)):
                raise BundleError(f"{where} names {argument!r}; a TorchScript table names tensors and its own classes")
    except ValueError as error:
        raise BundleError(f"{where} is torn: {error}") from error


def _check_code(content: bytes, where: str) -> None:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BundleError(f"{where} is torn or of another version: {error}") from error
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name and _FORBIDDEN.fullmatch(name):
            raise BundleError(
                f"{where} line {getattr(node, 'lineno', 0)} uses '{name}'; a model in a bundle computes, and touches "
                "no file and no network",
                hint="take that call out of the model, or rename the attribute of that name",
            )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            foreign = node.value.id == "ops" and node.attr not in _NAMESPACES
            if foreign:
                raise BundleError(
                    f"{where} calls an operator of 'ops.{node.attr}'; a bundle holds aten operators only",
                    hint="replace the custom operator by torch functions",
                )
