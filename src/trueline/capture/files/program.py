"""`capture model.onnx | model.pt2 | model.ts | DIR`: a program that comes as a file, wrapped into a bundle.

There is no model to compare with, so the program itself is the oracle, run by another implementation than
the one that will serve it: onnx's reference for ONNX, torch's own interpreter for the others. What the bundle
then proves is that its programs answer as the file does; that the file is right, nobody can say here, and the
lineage says so. Nothing is unpickled: a plain pickled .pt is refused, unless its maker is trusted. A folder of
Hugging Face's and a trusted pickle hold a model, and are captured as one (`from_module`).
"""

from __future__ import annotations

import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from trueline import events, files
from trueline.bundle import Bundle, Contents, Golden, ProgramEntry, Summary
from trueline.bundle import seal as seal_bundle
from trueline.bundle.describe import range_text
from trueline.bundle.schema import Evidence
from trueline.capture.api import capture, workplace
from trueline.capture.attempt import Attempt, Captured, tell
from trueline.capture.files import model_folder
from trueline.capture.files import probes as file_probes
from trueline.capture.files.input_specs import Declared, declared
from trueline.capture.files.wrapped import Kind, Wrapped, observed
from trueline.capture.proof.prove import judge
from trueline.capture.versions import versions
from trueline.errors import BundleError, CaptureError, NotProven, UsageError, join_names
from trueline.recipe.contract import Recipe
from trueline.runtime import torchscript_archive
from trueline.runtime.open import open_session
from trueline.runtime.session import USUAL, Format

GOLDEN_SIZES = (1, 2, 5)
OTHER_SIZE = 8


def capture_file(
    path: str | Path,
    out: str | Path,
    *,
    formats: Sequence[str] | None = None,
    one_is_enough: bool = False,
    overwrite: bool = False,
    inputs: Sequence[str] = (),
    trust: bool = False,
    opset: int | None = None,
) -> Captured:
    """Wraps the program at `path`, or the model in the folder `path`, into a bundle at `out`.

    Every format asked for has to be proven, or, with `one_is_enough`, one of those that can be made of the file;
    without `formats`, the file's own has to be, and ONNX of a .pt2 is tried. A model is captured as `capture` does.
    `inputs` declares what the program takes where the file does not say (see `declared`). With `trust` a pickled module
    is unpickled, which runs whatever its maker put into it, and a folder's weights may be a pickle, of which only
    tensors are taken. Raises UsageError for a file that is no program (a pickle among them), for a format that cannot
    be made of it and for an `opset` of a program, CaptureError, NotProven, BundleError, StorageError; nothing is then
    left at `out`.
    """
    path, out = Path(path), Path(out)
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already", hint="choose another name, or overwrite it (--overwrite)")
    known = declared(inputs) if inputs else None
    model = _model(path, known, trust=trust)
    if model is not None:
        return capture(model, None, out, formats=formats, one_is_enough=one_is_enough, overwrite=overwrite, opset=opset)
    if opset is not None:
        raise UsageError(
            f"{path.name} is a program, which keeps the operators that it has; asked was opset {opset}",
            hint="leave the release out, or capture the recipe that the file came from",
        )
    kind = kind_of(path)
    if known is not None and kind != "torchscript":
        raise UsageError(f"{path.name} says its own inputs; leave --example out")
    events.emit("capture.started", file=str(path), kind=kind, out=str(out))
    work = workplace(out)
    try:
        wrapped = _WRAP[kind](path, work, known)
        wanted = _usual(wrapped) if formats is None else _possible(formats, wrapped, every=not one_is_enough)
        rungs = [_try(format, wrapped, work / format) for format in wanted]
        needed = wanted if formats and not one_is_enough else () if formats else (wrapped.kind,)
        _require(rungs, wrapped, needed, path=path)
        bundle = _seal(path, wrapped, rungs, out, overwrite=overwrite)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    events.emit("bundle.sealed", path=str(out), digest=bundle.digest, serve=bundle.manifest.serve)
    return Captured(
        path=out, digest=bundle.digest, serve=bundle.manifest.serve, programs=tuple(rung.attempt for rung in rungs)
    )


def is_program(path: str) -> bool:
    """Whether the command line means a program file or a model's folder by `path`, and not a recipe."""
    named = Path(path).suffix.lower() in (".onnx", ".pt2", ".pt", ".pth", ".ts", ".bin", ".ckpt")
    return named or model_folder.is_model_folder(path)


def _model(path: Path, known: Declared | None, *, trust: bool) -> Recipe | None:
    """The model that the file or folder holds; None for a program. Raises UsageError."""
    if path.is_dir():
        if not model_folder.is_model_folder(path):
            raise UsageError(f"{path} is a folder without {model_folder.CONFIG}; it is no model of Hugging Face's")
        return model_folder.of_folder(path, known, trust=trust)
    if not trust:
        return None
    if _is_pickle(path) and (count := model_folder.weights_in(path)):
        raise UsageError(
            f"{path} holds {count} tensors, the weights of a model and not the model",
            hint="write a recipe whose model() builds it and loads them with torch.load(..., weights_only=True)",
        )
    if not _is_pickle(path):
        raise UsageError(f"{path} is no pickle and needs no trust; leave --trust out")
    if known is None:
        raise UsageError(
            f"{path} is a pickle, which does not say what its module takes",
            hint="declare its inputs: --example NAME=FP32[batch,3,size], or --example batch.npz",
        )
    return model_folder.of_pickle(path, known)


def _is_pickle(path: Path) -> bool:
    try:
        kind_of(path)
    except _Pickled:
        return True
    return False


class _Pickled(UsageError):
    """The file is a pickle."""


def kind_of(path: Path) -> Kind:
    """What the file is, by what is in it. Raises UsageError for what is no program, BundleError when it is torn."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if torchscript_archive.is_archive(path):
        return "torchscript"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("models/model.json") for name in names):
            return "torch_export"
        if any(name.endswith("data.pkl") for name in names):
            raise _pickled(path)
        raise UsageError(f"{path} is a zip and no program (it holds {join_names(names[:3])}, …)")
    with path.open("rb") as file:
        head = file.read(2)
    if head[:1] == b"\x80" or path.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt"):
        raise _pickled(path)
    if path.suffix.lower() in (".pt2", ".ts"):
        raise BundleError(
            f"{path} is no zip archive, as programs of torch.export and TorchScript are: it is torn or something else",
            hint="write it again with torch.export.save or torch.jit.save",
        )
    return "onnx"


def _pickled(path: Path) -> _Pickled:
    return _Pickled(
        f"{path} is a pickle (torch.save of a model or its weights), and unpickling it could run anything",
        hint="write a recipe whose model() loads it with torch.load(..., weights_only=True), and capture the recipe; "
        "if it is a whole module whose maker you trust: --trust",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rung:
    attempt: Attempt
    folder: Path
    file: str
    evidence: tuple[Evidence, ...]


def _usual(wrapped: Wrapped) -> tuple[Format, ...]:
    return tuple(format for format in wrapped.emit if format == wrapped.kind or format in USUAL)


def _possible(formats: Sequence[str], wrapped: Wrapped, *, every: bool) -> tuple[Format, ...]:
    for format in formats:
        if format not in wrapped.emit and (every or not set(formats) & set(wrapped.emit)):
            raise UsageError(
                f"a {wrapped.kind} file cannot become {format} (it can become: {join_names(wrapped.emit)})",
                hint="capture the recipe that the file came from",
            )
    return tuple(format for format in wrapped.emit if format in formats)


def _try(format: Format, wrapped: Wrapped, folder: Path) -> _Rung:
    started = time.monotonic()
    made: Path | None = None
    evidence: tuple[Evidence, ...] = ()
    why, error = "", 0.0
    try:
        made = wrapped.emit[format](folder)
        session = open_session(format, made, wrapped.signature, native=True)  # it was made here
        proof = judge(session, wrapped.observations, versions=versions())
        why, error = proof.reason, proof.max_abs_error
        evidence = tuple(msgspec.structs.replace(one, against=wrapped.against) for one in proof.evidence)
    except (CaptureError, BundleError, UsageError) as refused:
        why = refused.message
    attempt = Attempt(
        format=format,
        verdict="refused" if why else "proven",
        emitted=made is not None,
        why=why,
        line="",
        seconds=time.monotonic() - started,
        size_bytes=sum(one.stat().st_size for one in made.parent.iterdir()) if made else 0,
        probes=len(evidence),
        max_abs_error=error,
        range="" if why else range_text(wrapped.signature),
    )
    tell(attempt)
    return _Rung(
        attempt=attempt,
        folder=folder,
        file=made.relative_to(folder).as_posix() if made else "",
        evidence=evidence,
    )


def _require(rungs: Sequence[_Rung], wrapped: Wrapped, needed: Sequence[Format], *, path: Path) -> None:
    proven = any(not rung.attempt.why for rung in rungs)
    for rung in rungs:
        if rung.attempt.why and (not proven or rung.attempt.format in needed):
            raise NotProven(
                f"{rung.attempt.format} program of {path.name} is not proven against {wrapped.against}: "
                f"{rung.attempt.why}",
                hint="the file claims sizes or values that it cannot answer, or two runtimes disagree on it",
            )


def _seal(path: Path, wrapped: Wrapped, rungs: Sequence[_Rung], out: Path, *, overwrite: bool) -> Bundle:
    proven = [rung for rung in rungs if not rung.attempt.why]
    digest = files.sha256_file(path)
    contents = Contents(
        name=_name(path),
        signature=wrapped.signature,
        programs=[(_entry(rung), rung.folder) for rung in proven],
        serve=next((r.attempt.format for r in proven if r.attempt.format == "onnx"), proven[0].attempt.format),
        golden=_golden(wrapped),
        evidence=[one for rung in rungs for one in rung.evidence],
        lineage={
            "file": {"name": path.name, "sha256": digest, "kind": wrapped.kind, "oracle": wrapped.against},
            "note": "captured from a file: proven is that the programs answer as the file does",
            "attempts": [rung.attempt.as_record() for rung in rungs],
            "versions": versions(),
            "parent": None,
        },
        summary=Summary(recipe=path.name, recipe_digest=digest),
    )
    return seal_bundle(out, contents, overwrite=overwrite)


def _name(path: Path) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in path.stem) or "model"


def _entry(rung: _Rung) -> ProgramEntry:
    return ProgramEntry(
        format=rung.attempt.format,
        file=rung.file,
        proven=True,
        seconds=round(rung.attempt.seconds, 3),
        probes=rung.attempt.probes,
        max_abs_error=rung.attempt.max_abs_error,
        versions=versions(),
        notes="captured from a file",
    )


def _golden(wrapped: Wrapped) -> list[Golden]:
    found: dict[str, Golden] = {}
    for size in GOLDEN_SIZES:
        sizes = file_probes.fitted(wrapped.signature, {file_probes.BATCH: size}, OTHER_SIZE)
        case = f"batch-{sizes[file_probes.BATCH]}" if file_probes.BATCH in sizes else "fixed"
        inputs = file_probes.made(wrapped.signature, sizes, np.random.default_rng(size))
        found.setdefault(case, Golden(case=case, inputs=inputs, outputs=wrapped.oracle.run(inputs)))
    return list(found.values())


def _wrap_onnx(path: Path, work: Path, known: Declared | None) -> Wrapped:
    from trueline.capture.files import onnx_program
    from trueline.capture.output_sizes import seen_signature

    model = onnx_program.read(path)
    claimed = onnx_program.signature(model)
    probes = file_probes.make(claimed)
    oracle = onnx_program.ReferenceSession(model, path, claimed, probes[0].inputs)
    observations = observed(oracle, probes)

    def emit(folder: Path) -> Path:
        target = folder / "programs/model.onnx"
        onnx_program.write(model, target, external_bytes=1_500_000_000)
        return target

    return Wrapped(
        kind="onnx",
        signature=seen_signature(claimed, observations),
        oracle=oracle,
        against=oracle.against,
        observations=observations,
        emit={"onnx": emit, "openvino": emit},
    )


def _wrap_torchscript(path: Path, work: Path, known: Declared | None) -> Wrapped:
    from trueline.capture.files import torch_program

    return torch_program.torchscript(path, work, known)


def _wrap_export(path: Path, work: Path, known: Declared | None) -> Wrapped:
    from trueline.capture.files import torch_program

    return torch_program.torch_export(path, work)


_WRAP: dict[Kind, Callable[[Path, Path, Declared | None], Wrapped]] = {
    "onnx": _wrap_onnx,
    "torch_export": _wrap_export,
    "torchscript": _wrap_torchscript,
}
