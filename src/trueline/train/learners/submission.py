"""Submits a manifest: its model definition into the store, its resources to the engine."""

import math
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from trueline.engine.cluster.settings import (
    AnySettings,
    KubernetesSettings,
    LocalSettings,
    PodmanSettings,
    RaySettings,
    SlurmSettings,
)
from trueline.errors import UsageError
from trueline.storage.location import Location
from trueline.train.cluster import operate
from trueline.train.cluster.store import JobStore, SubmittedJob
from trueline.train.learners.manifest.read import FfdlManifest, read_manifest

SUFFIXES = (".yml", ".yaml")
MOST_UNPACKED = 1 << 30
_GPUS = Path("/proc/driver/nvidia/gpus")


class SubmittedManifest(NamedTuple):
    where: JobStore
    manifest: FfdlManifest
    notes: tuple[str, ...]


def is_manifest(recipe: str) -> bool:
    return recipe.endswith(SUFFIXES) and Path(recipe).is_file()


def load_manifest(path: Path, given: Mapping[str, str] | None = None) -> FfdlManifest:
    """The manifest in a file, whose relative volumes lie beside it. Raises UsageError."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the manifest {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    manifest = read_manifest(text, str(path), given)
    store = manifest.store
    if store is not None and store.path and not Path(store.path).is_absolute():
        place = str((path.parent / store.path).resolve())
        manifest = msgspec.structs.replace(manifest, store=msgspec.structs.replace(store, path=place))
    if store is not None and store.path and store.data:
        assert manifest.store is not None
        folder = Path(manifest.store.path) / store.data
        if not folder.is_dir():
            manifest = msgspec.structs.replace(
                manifest, notes=(*manifest.notes, f"data_stores: there is no folder {folder} on this machine")
            )
    return manifest


def read_stored_manifest(job: SubmittedJob) -> FfdlManifest:
    return msgspec.convert(job.manifest, FfdlManifest)


def fit_stored_manifest(manifest: Mapping[str, Any], engine: AnySettings) -> AnySettings:
    """`fit_engine` for a job that is resumed on another engine."""
    return fit_engine(engine, msgspec.convert(manifest, FfdlManifest))[0]


def submit_manifest(
    path: Path, *, on: str, engine: AnySettings, store: Location, model: Path | None = None,
    given: Mapping[str, str] | None = None, name: str = "", priority: int = 0,
) -> SubmittedManifest:  # fmt: skip
    """Submits the learners of a manifest; `model`: folder or zip of the model definition, else the manifest's folder.

    Raises UsageError, StorageError, EngineAway.
    """
    manifest = load_manifest(path, given)
    fitted, notes = fit_engine(engine, manifest)
    with TemporaryDirectory(prefix="trueline-") as scratch:
        code = unpack_model(model or path.parent, Path(scratch))
        if (code / ".gitignore").is_file():
            notes = (*notes, "the model definition travels without what its .gitignore names")
        where = operate.submit_code(
            code, base=name or manifest.name or path.resolve().parent.name, on=on, engine=fitted, store=store,
            workers=str(manifest.learners * fitted.slots), manifest=msgspec.to_builtins(manifest), priority=priority,
        )  # fmt: skip
    return SubmittedManifest(where, manifest, (*manifest.notes, *notes))


def unpack_model(model: Path, scratch: Path) -> Path:
    """The folder of a model definition. Raises UsageError."""
    if model.is_dir():
        return model.resolve()
    try:
        with zipfile.ZipFile(model) as archive:
            entries = [one for one in archive.infolist() if not one.is_dir()]
            for one in entries:
                inside = PurePosixPath(one.filename)
                if inside.is_absolute() or ".." in inside.parts:
                    raise UsageError(f"{model} holds {one.filename}, a place outside of its folder")
            if sum(one.file_size for one in entries) > MOST_UNPACKED:
                raise UsageError(
                    f"{model} holds more than {MOST_UNPACKED >> 20} MiB", hint="data belongs in data_stores"
                )
            for one in entries:
                target = scratch / one.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(one) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except FileNotFoundError as error:
        raise UsageError(f"there is no folder or zip {model}", hint="--model names the model definition") from error
    except (zipfile.BadZipFile, OSError) as error:
        raise UsageError(f"{model} is neither a folder nor a zip that can be read: {error}") from error
    return scratch


def fit_engine(engine: AnySettings, manifest: FfdlManifest) -> tuple[AnySettings, tuple[str, ...]]:
    """The engine's settings with what each learner asks for, and what the user should know. Raises UsageError."""
    notes: list[str] = []
    slots = math.ceil(manifest.cpus) if manifest.cpus else engine.slots
    memory_mb = -(-manifest.memory // (1 << 20)) if manifest.memory else engine.memory_mb
    fitted = msgspec.structs.replace(engine, slots=slots, memory_mb=memory_mb)
    gpus = math.ceil(manifest.gpus)
    if isinstance(fitted, SlurmSettings) and gpus:
        kind = f"{manifest.gpu_type}:" if manifest.gpu_type else ""
        fitted = msgspec.structs.replace(fitted, options=(*fitted.options, f"--gres=gpu:{kind}{gpus}"))
    if isinstance(fitted, RaySettings) and gpus:
        fitted = msgspec.structs.replace(fitted, resources=(*fitted.resources, f"GPU={gpus}"))
    if isinstance(fitted, KubernetesSettings):
        image = fitted.image or (manifest.framework_version if manifest.framework == "custom" else "")
        devices = {"nvidia.com/gpu": str(gpus)} if gpus else {}
        fitted = msgspec.structs.replace(fitted, image=image, resources=devices | fitted.resources)
    if gpus and manifest.gpu_type and isinstance(fitted, RaySettings | KubernetesSettings):
        notes.append(f"gpu_type: {manifest.gpu_type} has no effect here; [engine] of trueline.toml chooses nodes")
    if isinstance(fitted, LocalSettings | PodmanSettings):
        _expect_room(fitted, manifest.learners, gpus)
    if isinstance(fitted, PodmanSettings):
        fitted = _fit_podman(fitted, manifest)
    named = f"{manifest.framework} {manifest.framework_version}".strip()
    image = fitted.image if isinstance(fitted, PodmanSettings | KubernetesSettings) else ""
    notes.append(f"framework: {named} runs with {image or 'the Python and the packages of the engine'}")
    return fitted, tuple(notes)


def _expect_room(engine: LocalSettings | PodmanSettings, learners: int, gpus: int) -> None:
    """Raises UsageError where all learners cannot be on this machine at once."""
    here = sum(1 for _ in _GPUS.iterdir()) if _GPUS.is_dir() else 0
    if gpus * learners > here:
        raise UsageError(
            f"{learners} learners with {gpus} GPUs each need {gpus * learners}, and this machine has {here or 'none'}",
            hint="train on its CPUs with --set gpus=0, or --on an engine that has them",
        )
    capacity = engine.capacity or len(os.sched_getaffinity(0))
    if engine.slots * learners > capacity:
        raise UsageError(
            f"{learners} learners with {engine.slots} CPUs each need {engine.slots * learners} slots, "
            f"and this machine has {capacity}",
            hint="say --set cpus=1 or --set learners=N, or set capacity in trueline.toml",
        )


def _fit_podman(engine: PodmanSettings, manifest: FfdlManifest) -> PodmanSettings:
    """The user's volume in the container, and the image of a custom framework where the settings name none."""
    store = manifest.store
    mounts = engine.mounts
    if store is not None and store.path and store.path not in mounts:
        mounts = (*mounts, store.path)
    image = engine.image
    if not image and not engine.rootfs and manifest.framework == "custom":
        image = manifest.framework_version
    return msgspec.structs.replace(engine, mounts=mounts, image=image)
