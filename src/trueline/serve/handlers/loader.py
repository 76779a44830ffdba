"""Starts the handlers of archives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from trueline.errors import RequestError
from trueline.serve.handlers import archive
from trueline.serve.handlers.version import HandlerVersion
from trueline.serve.handlers.worker import Limits
from trueline.serve.models.desired_state import DesiredVersion
from trueline.serve.models.loader import ResolvedSource, VersionOptions


class CodeNotAllowed(RequestError):
    """An archive contains code, and the server was started without --allow-code."""

    code = "code_not_allowed"
    status = 403
    torchserve_type = "ModelException"


class ArchiveLoader:
    """Makes archives ready whose handlers may take `limits`; None: no code is run."""

    def __init__(
        self,
        how: VersionOptions,
        limits: Limits | None,
        loop: asyncio.AbstractEventLoop,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._how = how
        self._limits = limits
        self._loop = loop
        self._in_thread = in_thread

    def accepts(self, path: Path) -> bool:
        return archive.is_archive(path)

    def create(self, found: ResolvedSource, model: str, version: str, source: str) -> HandlerVersion:
        if self._limits is None:
            raise CodeNotAllowed(
                f"'{found.path.name[:128]}' is a model archive whose handler is code, and this server runs none",
                hint="start it with --allow-code if you trust what the store holds",
            )
        return HandlerVersion(model=model, version=version, source=source, limits=self._limits)

    async def load(
        self, made: HandlerVersion, found: ResolvedSource, how: VersionOptions | None, digest: str | None
    ) -> DesiredVersion:
        """Raises ArchiveError, NotStarted."""
        given = (how or self._how).given
        kept = await made.begin(
            found.path,
            given,
            self._in_thread,
            self._loop,
            digest or found.digest,
            usual=self._how.usual_of(made.model, made.version),
            shared=self._how.shared,
            weights=self._how.way.shared,
            check=lambda found_digest: found.check(self._how.trusted, found_digest),
        )
        return DesiredVersion(source=made.source, digest=kept, workers=made.policy.lanes, given=dict(given))
