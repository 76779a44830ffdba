"""Resolves a source to a local bundle: a path, a URL, a name in the registry, an entry of the model store.

Operators may use all of them, clients what the operator allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from trueline import files
from trueline.errors import NotFound, RegistryError
from trueline.serve.child_process import rebuild_error
from trueline.serve.models import download
from trueline.serve.models.loader import ResolvedSource
from trueline.serve.models.model_store import Store
from trueline.serve.settings import ServeSettings

_RESOLVE_S = 300.0

T = TypeVar("T")


def resolve(source: str, tracking_uri: str | None, *, signed: bool = False) -> ResolvedSource:
    """The bundle of a path, a URL, or a registry's name; `signed`: with its signature. Blocks.

    A child process reads the registry, whose client is heavy. Raises RegistryError, BundleError, StorageError,
    UsageError.
    """
    if download.is_url(source):
        bundle = download.fetch(source, files.user_cache() / "served")
        signature = download.signature(source) if signed else None
        return ResolvedSource(path=bundle.path, digest=bundle.digest, signature=signature)
    if not source.startswith("models:/"):
        return ResolvedSource(path=Path(source))
    command = [sys.executable, "-P", "-m", "trueline.registry", "resolve", source]
    if tracking_uri is not None:
        command += ["--tracking-uri", tracking_uri]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RESOLVE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RegistryError(f"the registry did not resolve {source} within {_RESOLVE_S:g} s") from error
    try:
        reply = json.loads(done.stdout.strip().splitlines()[-1])
        if done.returncode:
            raise rebuild_error(reply["error"], reply)
        return ResolvedSource(
            path=Path(reply["path"]),
            name=reply["name"],
            version=str(reply["version"]),
            digest=reply["digest"],
            signature=reply.get("signature"),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        said = done.stderr.strip().splitlines()
        last = f"; its last line: {said[-1]}" if said else ""
        raise RegistryError(
            f"the registry's answer for {source} is not understood (exit code {done.returncode}){last}"
        ) from error


class Sources:
    def __init__(self, settings: ServeSettings, store: Store | None, loop: asyncio.AbstractEventLoop) -> None:
        self._uri = settings.tracking_uri
        self._signed = settings.trusted_keys is not None
        self._registry = settings.tracking_uri is not None or (settings.source or "").startswith("models:/")
        self._store = store
        self._loop = loop

    async def find(self, source: str) -> ResolvedSource:
        """For operators: a path, a URL, a registry URI, or an entry of the store."""
        if self._store is not None and not source.startswith(("/", "models:/")) and not download.is_url(source):
            return ResolvedSource(path=self._store.find(source))
        return await in_thread(self._loop, lambda: resolve(source, self._uri, signed=self._signed))

    async def find_allowed(self, url: str) -> ResolvedSource:
        """For clients. Raises NotFound for what they may not load."""
        if url.startswith("models:/") and self._registry:
            return await in_thread(self._loop, lambda: resolve(url, self._uri, signed=self._signed))
        if self._store is None or ":" in url:
            raise NotFound(f"Given URL {url[:128]} does not match any allowed URL(s)")
        return ResolvedSource(path=self._store.find(url))


def in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `work` in a daemon thread, so that a stopping server does not wait for a load."""
    answer: asyncio.Future[T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        if not answer.done():
            act()

    def body() -> None:
        try:
            made = work()
            act = partial(answer.set_result, made)
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            act = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, act)

    threading.Thread(target=body, name="load", daemon=True).start()
    return answer
