"""`capture model.onnx | model.pt2 | model.ts`: a program that comes as a file, wrapped into a bundle.

There is no model to compare with, so the program itself is the oracle, run by another implementation than the one that
will serve it: onnx's reference for ONNX, torch's own interpreters for the others. The bundle then proves that its
programs answer as the file does, and its lineage says so. Nothing is unpickled.
"""

import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from trueline import files
from trueline.bundle import Bundle, Contents, Golden, Signature, Summary
from trueline.bundle import seal as seal_bundle
from trueline.capture.files import model_folder
from trueline.capture.files.file_subject import FileSubject, Kind, fit_sizes, plain_name, random_inputs
from trueline.capture.files.input_specs import DeclaredInputs
from trueline.capture.proof.narrowing import judge_and_narrow
from trueline.capture.proof.observe import observe
from trueline.capture.proof.probes import BATCH
from trueline.capture.proof.prove import versions
from trueline.capture.proof.value_probes import make_value_probes
from trueline.capture.rung import Rung, make_rung, refuse
from trueline.capture.sealing import GOLDEN_SIZES, make_entry
from trueline.capture.time_limit import OutOfTime, TimeLimit
from trueline.errors import BundleError, CaptureError, NotProven, UsageError, join_names
from trueline.recipe.contract import Recipe
from trueline.runtime import torchscript_archive
from trueline.runtime.open import open_session
from trueline.runtime.session import USUAL, Format, Session

OTHER_SIZE = 8
MOST = 2**16
"""Whole numbers beyond this are not given to a file's program, which may make as much memory of them."""


def wrap(
    path: Path,
    declared: DeclaredInputs | None,
    work: Path,
    out: Path,
    *,
    formats: Sequence[str] | None,
    one_is_enough: bool,
    overwrite: bool,
    limit: TimeLimit,
) -> tuple[Bundle, Sequence[Rung]]:
    """Proves the formats that can be made of the file and seals them at `out`; `work` is a folder for what is made."""
    kind = kind_of(path)
    if declared is not None and kind != "torchscript":
        raise UsageError(f"{path.name} declares its own inputs; leave --example out")
    subject = limit.run("the program as it is in the file", lambda: _read(kind, path, work, declared))
    if formats is None:
        wanted = tuple(format for format in subject.emit if format == kind or format in USUAL)
    else:
        wanted = _possible(formats, subject, every=not one_is_enough)
    rungs = [
        _try(format, subject, work / format, limit, 1 / left)
        for format, left in zip(wanted, range(len(wanted), 0, -1), strict=True)
    ]
    needed = wanted if formats and not one_is_enough else () if formats else (kind,)
    _require(rungs, subject, needed, path=path)
    return _seal(path, subject, rungs, out, overwrite=overwrite), rungs


def is_program(path: str) -> bool:
    """Whether `path` on the command line is a program file or a model's folder, not a recipe."""
    suffixes = (".onnx", ".pt2", ".pt", ".pth", ".ts", ".bin", ".ckpt", ".safetensors")
    return Path(path).suffix.lower() in suffixes or model_folder.is_model_folder(path)


def model_in(path: Path, known: DeclaredInputs | None, *, trust: bool) -> Recipe | None:
    """The model that the file or folder holds; None for a program. Raises UsageError."""
    if path.is_dir():
        if not model_folder.is_model_folder(path):
            raise UsageError(f"{path} is a folder without {model_folder.CONFIG}; it is no model of Hugging Face's")
        return model_folder.read_folder(path, known, trust=trust)
    if not trust:
        return None
    if _is_pickle(path) and (count := model_folder.count_weights(path)):
        raise UsageError(
            f"{path} holds {count} tensors, the weights of a model and not the model", hint=_recipe_hint(path)
        )
    if not _is_pickle(path):
        raise UsageError(f"{path} is no pickle and needs no trust; leave --trust out")
    if known is None:
        raise UsageError(
            f"{path} is a pickle, which does not declare the inputs of its module",
            hint="declare its inputs: --example NAME=FP32[batch,3,size], or --example batch.npz",
        )
    return model_folder.read_pickle(path, known)


def _is_pickle(path: Path) -> bool:
    try:
        kind_of(path)
    except _PickleError:
        return True
    return False


def _recipe_hint(path: Path) -> str:
    return (
        f"for the weights of a model, write a recipe whose model() builds it: trueline capture recipe.py {path.name} "
        "(they are read with weights_only=True)"
    )


class _PickleError(UsageError):
    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is a pickle (torch.save of a model or its weights), and unpickling it could run anything",
            hint=f"{_recipe_hint(path)}; if it is a whole module whose maker you trust: --trust",
        )


def kind_of(path: Path) -> Kind:
    """The kind of the file, by its content. Raises UsageError for other files, BundleError for a torn one."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if path.suffix.lower() == ".safetensors":
        raise UsageError(f"{path} holds the weights of a model and not the model", hint=_recipe_hint(path))
    if torchscript_archive.is_archive(path):
        return "torchscript"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("models/model.json") for name in names):
            return "torch_export"
        if any(name.endswith("data.pkl") for name in names):
            raise _PickleError(path)
        raise UsageError(f"{path} is a zip and no program (it holds {join_names(names[:3])}, …)")
    with path.open("rb") as file:
        head = file.read(2)
    if head[:1] == b"\x80" or path.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt"):
        raise _PickleError(path)
    if path.suffix.lower() in (".pt2", ".ts"):
        raise BundleError(
            f"{path} is no zip archive, as programs of torch.export and TorchScript are: it is torn or something else",
            hint="write it again with torch.export.save or torch.jit.save",
        )
    return "onnx"


def _possible(formats: Sequence[str], subject: FileSubject, *, every: bool) -> tuple[Format, ...]:
    for format in formats:
        if format not in subject.emit and (every or not set(formats) & set(subject.emit)):
            raise UsageError(
                f"a {subject.kind} file cannot become {format} (it can become: {join_names(subject.emit)})",
                hint="capture the recipe that the file came from",
            )
    return tuple(format for format in subject.emit if format in formats)


def _try(format: Format, subject: FileSubject, folder: Path, limit: TimeLimit, share: float) -> Rung:
    started = time.monotonic()
    try:
        return limit.run(f"the {format} program", lambda: _prove(format, subject, folder, started), share=share)
    except OutOfTime as error:
        return refuse(format, error, (), folder, started)


def _prove(format: Format, subject: FileSubject, folder: Path, started: float) -> Rung:
    path = None
    try:
        path = subject.emit[format](folder)
        made = path

        def open_with(signature: Signature) -> Session:
            return open_session(format, made, signature, native=True)  # this process emitted it

        example = subject.observations[0].probe.inputs
        probes = make_value_probes(example, subject.signature)
        kept = [one for one in probes if not abs(one.value) > MOST]  # NaN too
        values = observe(subject.oracle, kept)
        _, proof, _ = judge_and_narrow(
            open_with, subject.signature, subject.oracle, [*subject.observations, *values], examples=[example]
        )
    except (CaptureError, BundleError, UsageError) as error:
        return refuse(format, error, (), folder, started, emitted=path is not None)
    rung = make_rung(format, proof, (), path, folder, started, any_batch=True)
    evidence = tuple(msgspec.structs.replace(one, against=subject.against) for one in proof.evidence)
    return replace(rung, evidence=evidence)


def _require(rungs: Sequence[Rung], subject: FileSubject, needed: Sequence[Format], *, path: Path) -> None:
    proven = any(not rung.attempt.why for rung in rungs)
    for rung in rungs:
        late = proven and rung.attempt.verdict == "untried"
        if rung.attempt.why and not late and (not proven or rung.attempt.format in needed):
            raise NotProven(
                f"{rung.attempt.format} program of {path.name} is not proven against {subject.against}: "
                f"{rung.attempt.why}",
                hint="the file claims sizes or values that it cannot answer, or two runtimes disagree on it",
            )


def _seal(path: Path, subject: FileSubject, rungs: Sequence[Rung], out: Path, *, overwrite: bool) -> Bundle:
    proven = [rung for rung in rungs if not rung.attempt.why]
    digest = files.sha256_file(path)
    entries = [msgspec.structs.replace(make_entry(rung), notes="captured from a file") for rung in proven]
    contents = Contents(
        name=plain_name(path.stem),
        signature=subject.signature,
        programs=[(entry, rung.folder) for entry, rung in zip(entries, proven, strict=True)],
        serve=next((r.attempt.format for r in proven if r.attempt.format == "onnx"), proven[0].attempt.format),
        golden=_golden(subject),
        evidence=[one for rung in rungs for one in rung.evidence],
        lineage={
            "file": {"name": path.name, "sha256": digest, "kind": subject.kind, "oracle": subject.against},
            "note": "captured from a file: proven is that the programs answer as the file does",
            "attempts": [rung.attempt.as_record() for rung in rungs],
            "versions": versions(),
            "parent": None,
        },
        summary=Summary(recipe=path.name, recipe_digest=digest),
    )
    return seal_bundle(out, contents, overwrite=overwrite)


def _golden(subject: FileSubject) -> list[Golden]:
    records: dict[str, Golden] = {}
    for size in GOLDEN_SIZES:
        sizes = fit_sizes(subject.signature, {BATCH: size}, OTHER_SIZE)
        case = f"batch-{sizes[BATCH]}" if BATCH in sizes else "fixed"
        inputs = random_inputs(subject.signature, sizes, np.random.default_rng(size))
        records.setdefault(case, Golden(case=case, inputs=inputs, outputs=subject.oracle.run(inputs)))
    return list(records.values())


def _read(kind: Kind, path: Path, work: Path, declared: DeclaredInputs | None) -> FileSubject:
    if kind == "onnx":
        from trueline.capture.files import onnx_program

        return onnx_program.read_onnx(path)
    from trueline.capture.files import torch_program

    if kind == "torch_export":
        return torch_program.read_torch_export(path, work)
    return torch_program.read_torchscript(path, work, declared)
