"""Unpacks a workflow archive (`.war`), with the limits of a model archive. No code of it runs.

It is a zip, a `.tar.gz` or a folder. `WAR-INF/MANIFEST.json` names the workflow, its specification and the file of its
functions; `MAR-INF` works too. Source: TorchServe 0.12's WorkflowArchive, torch-workflow-archiver.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import ArchiveError, Caps
from trueline.torchserve.workflows import spec
from trueline.torchserve.workflows.spec import Spec

MANIFEST = archive.WORKFLOW_MANIFEST


@dataclass(frozen=True, slots=True, kw_only=True)
class War:
    """An unpacked workflow archive."""

    folder: Path
    name: str
    handler: str
    """The file of the functions; empty if there are none."""
    spec: Spec
    digest: str


class _Workflow(msgspec.Struct):
    workflowName: str
    specFile: str
    handler: str | None = None


class _Manifest(msgspec.Struct):
    workflow: _Workflow


def unpack(path: Path, into: Path, caps: Caps | None = None) -> War:
    """Unpacks the archive at `path` into the empty folder `into`. Raises ArchiveError, perhaps after a part of it."""
    with archive.readable(path.name, MANIFEST, "workflow"):
        if path.is_dir() and not any((path / name).is_file() for name in (MANIFEST, archive.MANIFEST)):
            raise KeyError(MANIFEST)  # before a large folder is copied
        digest = archive.lay_out(path, into, caps)
        folder, manifest = _manifest(into)
        source = ""
        if manifest.handler:
            file = archive.inside(folder, manifest.handler)
            if file.stat().st_size > archive.TEXT_BYTES:
                raise ArchiveError(f"the workflow's handler is over {archive.TEXT_BYTES} bytes; no handler is")
            source = file.read_text("utf-8", errors="replace")
        found = archive.read_yaml(folder, manifest.specFile)
    graph = spec.read(found, spec.functions_of(source))
    return War(folder=folder, name=manifest.workflowName, handler=manifest.handler or "", spec=graph, digest=digest)


def _manifest(into: Path) -> tuple[Path, _Workflow]:
    """The manifest and its folder. Raises KeyError, ArchiveError."""
    try:
        folder = archive.root(into, MANIFEST)
        text = archive.read_text_file(folder / MANIFEST)
    except KeyError:
        folder = archive.root(into, archive.MANIFEST)
        text = archive.read_text_file(folder / archive.MANIFEST)
    if len(text) > archive.TEXT_BYTES:
        raise ArchiveError(f"the manifest is over {archive.TEXT_BYTES} bytes; no manifest is")
    try:
        return folder, msgspec.json.decode(text, type=_Manifest).workflow
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArchiveError(f"the manifest is none of a workflow: {error}") from error
