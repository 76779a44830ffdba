"""Where a job of learners has its folders: in its store if that is a folder, which all learners share then, else in a
scratch folder of each learner."""

import zipfile
from contextlib import suppress
from pathlib import Path

from trueline.train.cluster.store import JobStore
from trueline.train.learners.environment import LearnerFolders
from trueline.train.learners.manifest.read import FfdlManifest

RENDEZVOUS = "master_node.txt"
"""pytorch-launch-dist: learner 1 writes its address, the others wait for it."""


def place_folders(store: JobStore, manifest: FfdlManifest, training: str, scratch: Path) -> LearnerFolders:
    """The folders of a learner, which exist then, but for those of the user's own volume."""
    base = store.where if isinstance(store.where, Path) else scratch / "job"
    given = manifest.store
    data, bucket = base / "data", base / "results"
    if given is not None:
        if given.data:
            data = (Path(given.path) if given.path else data) / given.data
        if given.results:
            bucket = (Path(given.path) if given.path else bucket) / given.results
    folders = LearnerFolders(
        model=scratch / "model", data=data, bucket=bucket, results=bucket / training,
        checkpoints=bucket / "_wml_checkpoints" / training, state=base / "state",
    )  # fmt: skip
    for folder in (folders.model, folders.results, folders.checkpoints, folders.logs):
        folder.mkdir(parents=True, exist_ok=True)
    if given is None or not given.path or not given.data:
        data.mkdir(parents=True, exist_ok=True)
    return folders


def is_shared(store: JobStore) -> bool:
    return isinstance(store.where, Path)


def clear_state(state: Path) -> None:
    """Removes the files by which learners of an earlier start met each other; folders stay."""
    for path in state.iterdir() if state.is_dir() else ():
        if path.is_symlink() or path.is_file():
            with suppress(FileNotFoundError):
                path.unlink()


def keep_code(model: Path, results: Path) -> None:
    """The model definition beside the results, as FfDL kept it."""
    kept = results / "_submitted_code" / "model.zip"
    if kept.exists():
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(model.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(model))
    partial.replace(kept)
