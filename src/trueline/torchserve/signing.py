"""Signs a bundle, a model archive or a workflow archive, by the digest that a server computes of it.

Each is verified, or unpacked as a server does it, before it is signed. No code of it runs.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

from trueline import events
from trueline.bundle import signing
from trueline.bundle.read import open_bundle
from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import HoldsWorkflow
from trueline.torchserve.workflows import archive as war


def sign(path: str | Path, key: str | Path) -> Path:
    """Signs the bundle or archive at `path` with the Ed25519 private key in the PEM file `key`; returns the
    signature's file, `path` with `.sig` appended.

    Raises BundleError if it is damaged or was changed, UsageError for a file that is no such key, StorageError.
    """
    path = Path(path)
    digest = _digest_of(path)
    place = signing.sign(path, digest, Path(key))
    events.emit("bundle.signed", path=str(place), digest=digest)
    return place


def _digest_of(path: Path) -> str:
    workflow = (path / archive.WORKFLOW_MANIFEST).is_file() if path.is_dir() else path.name.endswith(".war")
    if not workflow and not archive.is_archive(path):
        return open_bundle(path).digest
    if not workflow:
        with tempfile.TemporaryDirectory(prefix="trueline-sign-") as folder, suppress(HoldsWorkflow):
            return archive.unpack(path, Path(folder)).digest  # a tar.gz shows only inside which one it is
    with tempfile.TemporaryDirectory(prefix="trueline-sign-") as folder:
        return war.unpack(path, Path(folder)).digest
