"""Containers of a manifest that are buckets of an object store: fetched before the training, results pushed during it.

FfDL mounted them by a file system (s3fs). Here each is a folder, and objects are compared by size and time. Results of
a job whose store is an object store, and whose manifest names no place for them, go to that store the same way.
"""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from trueline.errors import DataError, MissingPackage, TruelineError
from trueline.storage.object_store import describe_error, map_concurrently, open_store
from trueline.train.cluster.store import JobStore
from trueline.train.learners.environment import LearnerFolders
from trueline.train.learners.manifest.read import DataStore, FfdlManifest

AT_ONCE = 16


def open_bucket(store: DataStore) -> Any:
    """The file system of the store of a manifest, as fsspec has it. Raises MissingPackage."""
    import fsspec

    client = {"endpoint_url": store.endpoint} | ({"region_name": store.region} if store.region else {})
    try:
        return fsspec.filesystem("s3", key=store.user, secret=store.password, client_kwargs=client)
    except ImportError as error:
        raise MissingPackage(
            f"{store.type} needs the package s3fs, which is not installed", hint="pip install 'trueline[s3]'"
        ) from error


def fetch_objects(fs: Any, prefix: str, folder: Path, note: Callable[[int, int], None]) -> None:
    """Copies the objects below `prefix` (bucket or bucket/folder) to `folder`, without those that are there with their
    size. `note` is called with their number and bytes first. Raises DataError."""
    try:
        listed = {key: int(info["size"]) for key, info in fs.find(prefix, detail=True).items() if not key.endswith("/")}
    except FileNotFoundError:
        bucket = prefix.partition("/")[0]
        raise DataError(f"there is no bucket '{bucket}'", hint="make it, or correct data_stores") from None
    except Exception as error:  # noqa: BLE001 - the library of each store has exceptions of its own
        raise DataError(
            f"cannot list {prefix}: {describe_error(error)}", hint="see connection of data_stores"
        ) from None
    missing = {}
    for key, size in listed.items():
        inside = PurePosixPath(key.removeprefix(prefix).lstrip("/"))
        if ".." in inside.parts or inside.is_absolute():
            raise DataError(f"{key} names a place outside of its bucket")
        target = folder / inside
        if not target.is_file() or target.stat().st_size != size:
            missing[key] = target
    note(len(missing), sum(listed[key] for key in missing))

    def fetch(key: str) -> None:
        target = missing[key]
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        fs.get_file(key, str(partial))
        partial.replace(target)

    try:
        map_concurrently(fetch, missing, at_once=AT_ONCE)
    except Exception as error:  # noqa: BLE001 - as above
        raise DataError(
            f"cannot fetch {prefix}: {describe_error(error)}", hint="see connection of data_stores"
        ) from None


class ResultsPush:
    """Copies what is new or changed below `folder` to `prefix`."""

    def __init__(self, fs: Any, folder: Path, prefix: str) -> None:
        self._fs, self._folder, self._prefix = fs, folder, prefix
        self._pushed: dict[Path, tuple[int, int]] = {}

    def push(self) -> int:
        """Returns how many files were copied. Raises DataError; the next call tries again."""
        changed = {}
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and not path.name.endswith(".partial"):
                status = path.stat()
                stamp = status.st_size, status.st_mtime_ns
                if self._pushed.get(path) != stamp:
                    changed[path] = stamp

        def upload(path: Path) -> None:
            self._fs.put_file(str(path), f"{self._prefix}/{path.relative_to(self._folder).as_posix()}")
            self._pushed[path] = changed[path]

        try:
            map_concurrently(upload, changed, at_once=AT_ONCE)
        except Exception as error:  # noqa: BLE001 - as above
            raise DataError(f"cannot write to {self._prefix}: {describe_error(error)}") from None
        return len(changed)


class KeptContainers:
    """The buckets of a learner's folders: those of its manifest, and its store's where that keeps the results."""

    def __init__(self, store: JobStore, manifest: FfdlManifest, folders: LearnerFolders, training: str) -> None:
        self._store, self._manifest, self._folders, self._training = store, manifest, folders, training
        self._pushes: list[ResultsPush] = []

    def fetch(self, note: Callable[..., None]) -> None:
        """Fetches the data, and what an earlier start has left. Raises TruelineError."""
        given = self._manifest.store
        bucket = given if given is not None and not given.path else None
        if bucket is not None and bucket.data:
            fetch_objects(
                open_bucket(bucket), bucket.data, self._folders.data,
                lambda count, size: note("data.fetching", bucket=bucket.data, objects=count, megabytes=size / 1e6),
            )  # fmt: skip
        if bucket is not None and bucket.results:
            self._keep_results(open_bucket(bucket), bucket.results)
        elif not isinstance(self._store.where, Path) and not (given is not None and given.results):
            fs, root = open_store(f"{self._store.where}/results")
            self._keep_results(fs, root)

    def _keep_results(self, fs: Any, top: str) -> None:
        for folder, inside in ((self._folders.results, ""), (self._folders.checkpoints, "_wml_checkpoints/")):
            prefix = f"{top.rstrip('/')}/{inside}{self._training}"
            fetch_objects(fs, prefix, folder, lambda count, size: None)
            self._pushes.append(ResultsPush(fs, folder, prefix))

    def push(self) -> str:
        """Pushes what is new; returns why some of it could not be pushed."""
        why = ""
        for one in self._pushes:
            try:
                one.push()
            except TruelineError as error:
                why = error.message
        return why
