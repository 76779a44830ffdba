"""Resolves `models:/digits@champion` to a verified bundle on this disk.

A version has the digest of the bundle that was registered. The bundle from the store is verified and compared with it,
so a file that was replaced in the store is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from trueline import files
from trueline.bundle.read import open_bundle
from trueline.errors import BundleError, RegistryError, StorageError, UsageError, closest, join_names
from trueline.registry import store
from trueline.storage.object_store import redact_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

_DIGEST = re.compile(r"[0-9a-f]{64}")
_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+|latest))")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """One version of a registered model."""

    name: str
    version: int
    digest: str
    """Of the bundle that was registered; empty for a version that Trueline did not make."""
    aliases: tuple[str, ...]
    created: str
    run_id: str
    signature: str = ""
    """From the file beside the bundle when it was registered; a server decides which keys it trusts."""

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A registered bundle on this disk, verified."""

    path: Path
    name: str
    version: int
    digest: str
    signature: str = ""


def versions(name: str, *, tracking_uri: str | None = None) -> list[ModelVersion]:
    """All versions of model `name`, the newest first. Raises RegistryError that lists the models."""
    with store.open_store(tracking_uri) as client:
        return _versions(client, name)


def resolve(uri: str, *, tracking_uri: str | None = None) -> Resolved:
    """Finds and verifies the bundle of `models:/NAME@ALIAS`, `models:/NAME/VERSION` or `models:/NAME/latest`.

    A bundle in a store on this disk stays there; a server's is downloaded once, into the user's cache. Raises
    RegistryError that lists what exists if it is missing; BundleError if it is not the one that was registered.
    """
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise UsageError(f"'{uri}' names no registered model", hint="write models:/NAME@ALIAS or models:/NAME/VERSION")
    with store.open_store(tracking_uri) as client:
        version = _pick(_versions(client, parts["name"]), parts["alias"], parts["version"])
        if not version.digest:
            raise RegistryError(
                f"{version.uri} was not registered by Trueline: it has no tag {store.DIGEST_TAG}",
                hint="register its bundle with `trueline register`",
            )
        path = _locate(client, version)
    bundle = open_bundle(path)
    if bundle.digest != version.digest:
        raise BundleError(
            f"the bundle of {version.uri} is not the one that was registered: its digest is {bundle.digest[:12]}, "
            f"the registry has {version.digest[:12]}",
            hint="register the bundle again, and find out how the store was changed",
        )
    return Resolved(
        path=path, name=version.name, version=version.version, digest=version.digest, signature=version.signature
    )


def _versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        names = [model.name for model in client.search_registered_models()]
        near = closest(name, names)
        raise RegistryError(
            f"no model '{name}' is registered in {redact_uri(client.tracking_uri)} (has: {join_names(names)})",
            hint=f"did you mean '{near}'?" if near else "`trueline register BUNDLE` adds one",
        ) from error
    quoted = name.replace("'", "\\'")
    numbers = (one.version for one in client.search_model_versions(f"name='{quoted}'"))
    found = (to_version(client.get_model_version(name, number)) for number in numbers)
    return sorted(found, key=lambda version: version.version, reverse=True)


def to_version(found: Any) -> ModelVersion:
    """Trueline's from MLflow's. Raises RegistryError for a digest that is none."""
    created = datetime.fromtimestamp(found.creation_timestamp // 1000, UTC).isoformat()
    digest = found.tags.get(store.DIGEST_TAG, "")
    if digest and not _DIGEST.fullmatch(digest):  # it becomes the name of a folder
        raise RegistryError(
            f"version {found.version} of '{found.name}' has the tag {store.DIGEST_TAG} with {digest[:80]!r}, which is "
            "no SHA-256",
            hint="register the bundle again, and find out how the registry was changed",
        )
    return ModelVersion(
        name=found.name, version=int(found.version), digest=digest,
        aliases=tuple(found.aliases), created=created, run_id=found.run_id or "",
        signature=found.tags.get(store.SIGNATURE_TAG, ""),
    )  # fmt: skip


def _pick(found: list[ModelVersion], alias: str | None, number: str | None) -> ModelVersion:
    for version in found:
        if number == "latest" or str(version.version) == number or (alias and alias in version.aliases):
            return version
    if not found:
        raise RegistryError("the model is registered but has no versions", hint="`trueline register BUNDLE` adds one")
    name = found[0].name
    if alias is None:
        has = join_names(str(version.version) for version in reversed(found))
        raise RegistryError(f"model '{name}' has no version {number} (has: {has})", hint="ask for one of these")
    aliases = sorted(one for version in found for one in version.aliases)
    near = closest(alias, aliases)
    raise RegistryError(
        f"model '{name}' has no alias '{alias}' (has: {join_names(aliases)})",
        hint=f"did you mean '{near}'?" if near else f"`trueline register --alias {alias}` sets it",
    )


def _locate(client: MlflowClient, version: ModelVersion) -> Path:
    where = client.get_model_version_download_uri(version.name, str(version.version))
    if where.startswith("models:/"):
        where = client.get_logged_model(where.removeprefix("models:/")).artifact_location
    parts = urlsplit(where)
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path)) / store.BUNDLE_FOLDER
    return _download(client, version, f"{where.rstrip('/')}/{store.BUNDLE_FOLDER}")


def _download(client: MlflowClient, version: ModelVersion, where: str) -> Path:
    """The bundle in the cache, under its digest; of several processes that download it the first to finish wins."""
    import mlflow.artifacts

    folder = files.user_cache() / "bundles" / version.digest
    if not folder.exists():
        try:
            with files.atomic_dir(folder) as partial:
                mlflow.artifacts.download_artifacts(where, dst_path=str(partial), tracking_uri=client.tracking_uri)
        except StorageError:
            if not folder.exists():
                raise
    return folder / store.BUNDLE_FOLDER
