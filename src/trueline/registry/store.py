"""Opens the MLflow store: imported late, without MLflow's logs, telemetry and search for git."""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from trueline import files
from trueline.errors import RegistryError, TruelineError, UsageError
from trueline.extras import naming_extras
from trueline.files import sha256_bytes
from trueline.storage.object_store import redact_text, redact_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_SQLITE = "sqlite:///"

DIGEST_TAG = "trueline.bundle_digest"
RECIPE_TAG = "trueline.recipe_digest"
SIGNATURE_TAG = "trueline.signature"
BUNDLE_FOLDER = "bundle"
"""The bundle's folder inside the logged model."""


@contextmanager
def open_store(tracking_uri: str | None) -> Iterator[MlflowClient]:
    """A client of the store. MLflow's errors become RegistryError with their first line, or StorageError when the disk
    is full.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with naming_extras():
        import mlflow
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

    with warnings.catch_warnings(), _silence("mlflow", "alembic"):
        # MLflow 3.17 loads with a strategy that SQLAlchemy 2.1 deprecates.
        warnings.filterwarnings("ignore", message=r".*``noload`` loader strategy is deprecated")
        try:
            with _alone(tracking_uri or mlflow.get_tracking_uri()):
                client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
                client.search_registered_models(max_results=1)  # makes the tables of the model registry
            yield client
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise _translate(error, tracking_uri or mlflow.get_tracking_uri()) from error


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """One process at a time: MLflow 3.17 makes the tables of a new SQLite file as it opens; two at once break them."""
    database = _database(uri)
    if database is None:
        yield
        return
    key = sha256_bytes(str(database).encode())[:16]
    with files.hold_lock(files.user_cache() / f"mlflow-{key}.lock"):
        yield


def _database(uri: str) -> Path | None:
    """The file of an embedded store."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).resolve()


def absolute(uri: str) -> str:
    """`uri`, independent of the current folder."""
    database = _database(uri)
    return uri if database is None else f"{_SQLITE}{database}"


def link_of(job_dir: Path, tracking_uri: str, tracker: str = "mlflow") -> dict[str, Any]:
    """The job's run in the store of `tracker` at `tracking_uri`; empty if it has none there."""
    try:
        link: dict[str, Any] = json.loads((job_dir / f"{tracker}.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return link if link.get("tracking_uri") == absolute(tracking_uri) else {}


@contextmanager
def _silence(*names: str) -> Iterator[None]:
    """Hides the messages of the loggers `names` below ERROR while the block runs."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _translate(error: Exception, uri: str) -> TruelineError:
    text = str(error)
    if "disk is full" in text or "No space left" in text or "disk I/O error" in text:
        where = _database(uri) or Path(tempfile.gettempdir())
        return files.storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), where)
    if isinstance(error, OSError):
        why = f"the model registry at {redact_uri(uri)} cannot be used: {redact_text(text)}"
        return RegistryError(why, hint="check the tracking URI")
    first = (text.splitlines() or [type(error).__name__])[0]
    return RegistryError(f"the model registry refuses: {redact_text(first)}", hint="check the tracking URI")


@contextmanager
def ignoring(code: str) -> Iterator[None]:
    """Suppresses MLflow's error `code`, as RESOURCE_ALREADY_EXISTS."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def artifact_location(client: MlflowClient, experiment: str) -> str | None:
    """Beside the database of an embedded store, whatever the current folder; None leaves it to the server."""
    database = _database(client.tracking_uri)
    return None if database is None else (database.parent / "mlruns" / quote(experiment, safe="")).as_uri()


def experiment_of(client: MlflowClient, name: str) -> str:
    """The id of experiment `name`, created if it is missing. Raises UsageError if it was deleted."""
    found = client.get_experiment_by_name(name)
    if found is None:
        with ignoring("RESOURCE_ALREADY_EXISTS"):  # another process was faster
            return str(client.create_experiment(name, artifact_location(client, name)))
        found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise UsageError(
            f"the experiment '{name}' was deleted in MLflow", hint="restore it, or register under another name"
        )
    return str(found.experiment_id)
