"""The verb `sign`: a signature beside a bundle, a model archive or a workflow, by what each of them calls its digest.

What lies there is verified, or laid out as a server would, before anybody vouches for it. No code of it runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from trueline import events
from trueline.bundle import signing
from trueline.bundle.read import open_bundle
from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import HoldsWorkflow
from trueline.torchserve.workflows import archive as war


def sign(path: str | Path, key: str | Path) -> Path:
    """Signs what lies at `path` with the Ed25519 private key in the PEM file `key`; returns the signature's file, which
    is `path` with `.sig` behind it.

    Raises BundleError for what is torn or was changed, UsageError for a file that is no such key, StorageError.
    """
    path = Path(path)
    digest = digest_of(path)
    place = signing.sign(path, digest, Path(key))
    events.emit("bundle.signed", path=str(place), digest=digest)
    return place


def digest_of(path: Path) -> str:
    """The digest that a server finds of what lies at `path`. Raises BundleError."""
    if _is_workflow(path):
        return _laid_out(path)
    if not archive.is_archive(path):
        return open_bundle(path).digest
    with tempfile.TemporaryDirectory(prefix="trueline-sign-") as folder:
        try:
            return archive.unpack(path, Path(folder)).digest
        except HoldsWorkflow:
            pass  # a tar.gz says only inside what it is
    return _laid_out(path)


def _is_workflow(path: Path) -> bool:
    return (path / archive.WORKFLOW_MANIFEST).is_file() if path.is_dir() else path.name.endswith(".war")


def _laid_out(path: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="trueline-sign-") as folder:
        return war.unpack(path, Path(folder)).digest
