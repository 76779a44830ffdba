"""Starts the handlers of archives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.errors import RequestError
from trueline.serve.handlers import archive
from trueline.serve.handlers.budget import Limits
from trueline.serve.models.desired_state import DesiredVersion
from trueline.serve.models.loader import ResolvedSource, VersionOptions
from trueline.serve.models.sources import NAME, InThread

if TYPE_CHECKING:
    from trueline.serve.handlers.version import HandlerVersion


class CodeNotAllowed(RequestError):
    """An archive contains code, and the server was started without --allow-code."""

    code = "code_not_allowed"
    status = 403
    torchserve_type = "ModelException"


@dataclass(frozen=True, slots=True)
class ArchiveLoader:
    """Starts archives' handlers within `limits`; None: no code is run."""

    how: VersionOptions
    limits: Limits | None
    loop: asyncio.AbstractEventLoop
    in_thread: InThread

    def accepts(self, path: Path) -> bool:
        return archive.is_archive(path)

    def create(self, found: ResolvedSource, model: str, version: str, source: str) -> HandlerVersion:
        if self.limits is None:
            raise CodeNotAllowed(
                f"'{found.path.name[:128]}' is a model archive whose handler is code, and this server runs none",
                hint="start it with --allow-code if you trust what the store holds",
            )
        from trueline.serve.handlers.version import HandlerVersion  # a server of bundles does not import it

        return HandlerVersion(model=model, version=version, source=source, limits=self.limits)

    async def load(
        self, made: HandlerVersion, found: ResolvedSource, how: VersionOptions | None, digest: str | None
    ) -> DesiredVersion:
        """Raises ArchiveError, NotStarted."""
        from trueline.serve.handlers.version import StartOptions

        given = (how or self.how).given
        usual = self.how.usual_of(made.model, made.version)
        options = StartOptions(given=given, usual=usual, shared=self.how.shared, weights=self.how.way.shared)
        check = partial(found.check, self.how.trusted)
        kept = await made.begin(found.path, options, self.loop, self.in_thread, digest or found.digest, check)
        return DesiredVersion(source=made.source, digest=kept, workers=made.policy.lanes, given=dict(given))


def name_in_store(path: Path) -> tuple[str, str] | None:
    """Model and version of an archive by its manifest, or by the file's name if the manifest cannot be read; None for
    other files and for archives of workflows.
    """
    if not archive.is_archive(path):
        return None
    try:
        manifest = archive.peek(path)
    except archive.HoldsWorkflow:
        return None
    except archive.ArchiveError:
        return archive.stem(path.name), "1.0"
    if NAME.fullmatch(manifest.model) and NAME.fullmatch(manifest.version):
        return manifest.model, manifest.version
    return archive.stem(path.name), "1.0"
