"""`export-cpp`: a bundle as a small C++ project that runs without Python and proves itself where it is built.

The project holds the program, the golden examples as they lie in the bundle, the signature as tables, and a
`replay` that exits non-zero when an answer differs. Nothing in the bundle is run here; imports no torch.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trueline import events, files
from trueline.bundle import Bundle, TensorSpec, schema
from trueline.bundle.read import open_bundle
from trueline.capture.cpp import text as cpp_text
from trueline.capture.cpp.text import Stored
from trueline.errors import BundleError, UsageError, join_names


def export_cpp(bundle: str | Path | Bundle, folder: str | Path, *, format: str | None = None) -> Path:
    """Writes the C++ project for `bundle` to `folder`, whole or not at all; returns the folder.

    Takes the TorchScript program, or the AOTInductor package when there is no other; `format` says
    otherwise. Raises BundleError when the bundle has no program that libtorch can load, UsageError when the
    folder exists, StorageError.
    """
    folder = Path(folder)
    if folder.exists():
        raise UsageError(f"{folder} exists already", hint="name a folder that does not exist yet")
    found = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    if found.signature.random:
        raise UsageError(
            f"bundle '{found.name}' draws random numbers, and the project compares golden examples value by value",
            hint="serve it with `trueline serve`, which compares their distribution",
        )
    chosen = _chosen(found, format)
    texts = cpp_text.project(found.name, found.digest, found.signature_of(chosen), chosen, _golden(found))
    with files.atomic_dir(folder) as partial:
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        (partial / "build.sh").chmod(0o755)
        (partial / "golden").mkdir()
        for name in (schema.GOLDEN_INPUTS, schema.GOLDEN_OUTPUTS):
            shutil.copyfile(found.path / name, partial / name)
        shutil.copyfile(found.program_path(chosen), partial / cpp_text.PROGRAMS[chosen])
    events.emit("project.written", path=str(folder), format=chosen, digest=found.digest)
    return folder


def _chosen(bundle: Bundle, format: str | None) -> str:
    has = [entry.format for entry in bundle.manifest.programs]
    loadable = [name for name in cpp_text.PROGRAMS if name in has]
    if format is not None and format not in cpp_text.PROGRAMS:
        raise UsageError(f"libtorch cannot load format '{format}' (it loads: {join_names(cpp_text.PROGRAMS)})")
    target = "aotinductor" if format == "aotinductor" else "cpp"
    if not loadable or (format is not None and format not in loadable):
        raise BundleError(
            f"bundle '{bundle.name}' has no {format or 'program'} that C++ can load "
            f"(has: {join_names(has)}; C++ loads: {join_names(cpp_text.PROGRAMS)})",
            hint=f"capture it again with `--for {target}` beside the others",
        )
    return format or loadable[0]


def _golden(bundle: Bundle) -> dict[str, tuple[Sequence[Stored], Sequence[Stored]]]:
    inputs = _header(bundle.path / schema.GOLDEN_INPUTS)
    outputs = _header(bundle.path / schema.GOLDEN_OUTPUTS)
    return {
        case: (
            [_stored(inputs, case, spec) for spec in bundle.signature.inputs],
            [_stored(outputs, case, spec) for spec in bundle.signature.outputs],
        )
        for case in bundle.manifest.golden
    }


def _header(path: Path) -> Mapping[str, Any]:
    """The table at the head of a safetensors file, which the bundle's digest vouches for."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        found: dict[str, Any] = json.loads(file.read(length))
    return found


def _stored(header: Mapping[str, Any], case: str, spec: TensorSpec) -> Stored:
    entry = header[f"{case}/{spec.name}"]
    begin, end = entry["data_offsets"]
    return Stored(name=spec.name, datatype=spec.datatype, shape=tuple(entry["shape"]), begin=begin, size=end - begin)
