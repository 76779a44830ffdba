"""Reads, checks and unpacks TorchServe's model archives without running their code.

An archive is a zip (`.mar`), a `.tar.gz` whose files may be in one top folder, or a plain folder, with
`MAR-INF/MANIFEST.json`. Rejected are paths that leave the folder (TorchServe's ZipUtils compared strings, so that
`../modelX` passed), links, devices, and more entries, bytes or compression than the caps allow.
Source: TorchServe 0.12's ModelArchive, Manifest and ModelConfig.
"""

import gzip
import hashlib
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec

from trueline.errors import BundleError

MANIFEST = "MAR-INF/MANIFEST.json"
WORKFLOW_MANIFEST = "WAR-INF/MANIFEST.json"
SUFFIXES = (".mar", ".tar.gz", ".tgz")
_WORKFLOW = "'{}' says that this is the archive of a workflow, not of a model: register it at /workflows"
TEXT_BYTES = 2**20  # upper bound of a manifest, a model-config.yaml or a workflow's specification
MAX_VALUES = 10_000  # of a YAML document
_PIECE = 2**20


class ArchiveError(BundleError):
    """An archive that is torn, hostile or of an unknown form. The message names the entry, never a path."""

    code = "archive"


class HoldsWorkflow(ArchiveError):
    """An archive of a workflow instead of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Bounds of what an archive unpacks into."""

    entries: int = 20_000
    total_bytes: int = 16 * 2**30
    ratio: float = 200.0  # unpacked by packed bytes, for archives that unpack into more than `ratio_from_bytes`
    ratio_from_bytes: int = 64 * 2**20


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    model: str = msgspec.field(name="modelName")
    version: str = msgspec.field(default="1.0", name="modelVersion")
    handler: str
    serialized_file: str = ""
    model_file: str = ""
    config_file: str = ""
    requirements_file: str = ""
    envelope: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An unpacked archive; `config` is its model-config.yaml."""

    folder: Path
    manifest: Manifest
    config: Mapping[str, Any]
    digest: str


def is_archive(path: Path) -> bool:
    """Whether `path` looks like an archive; `unpack` checks it."""
    return (path / MANIFEST).is_file() if path.is_dir() else path.name.endswith(SUFFIXES)


def stem(name: str) -> str:
    """A file's name without the archive's ending.

    >>> stem("resnet.mar"), stem("resnet.tar.gz"), stem("resnet")
    ('resnet', 'resnet', 'resnet')
    """
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def unpack(path: Path, into: Path, caps: Caps | None = None) -> Archive:
    """Unpacks into the empty folder `into`. Raises ArchiveError and may leave a part of the files."""
    with readable(path.name):
        digest = lay_out(path, into, caps)
        folder = root(into, MANIFEST)
        manifest = _manifest(read_text_file(folder / MANIFEST))
        config = read_yaml(folder, manifest.config_file) if manifest.config_file else {}
    return Archive(folder=folder, manifest=manifest, config=config, digest=digest)


def lay_out(path: Path, into: Path, caps: Caps | None = None) -> str:
    """Unpacks the files and returns their digest; call it inside `readable`. Raises ArchiveError."""
    placer = _Placer(into, caps or Caps())
    if path.is_dir():
        return _copy_folder(path, placer)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        placer.packed_bytes = max(1, file.tell())
        file.seek(0)
        if zipfile.is_zipfile(file):
            _unzip(file, placer)
        else:
            file.seek(0)
            _untar(file, placer)
    return digest


def peek(path: Path) -> Manifest:
    """The manifest, without unpacking. Raises ArchiveError."""
    with readable(path.name):
        if path.is_dir():
            return _manifest(read_text_file(path / MANIFEST))
        with path.open("rb") as file:
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive, archive.open(MANIFEST) as entry:
                    return _manifest(entry.read(TEXT_BYTES + 1))
            file.seek(0)
            with _tar(file, Caps()) as opened:
                for member in opened:
                    if _plain(member.name).endswith(WORKFLOW_MANIFEST):
                        raise HoldsWorkflow(_WORKFLOW.format(path.name))
                    if member.isfile() and _plain(member.name).endswith(MANIFEST):
                        found = opened.extractfile(member)
                        assert found is not None  # it is a file
                        return _manifest(found.read(TEXT_BYTES + 1))
            raise KeyError(MANIFEST)


@contextmanager
def readable(name: str, manifest: str = MANIFEST, kind: str = "model") -> Iterator[None]:
    """Raises errors of reading the archive `name` as ArchiveError."""
    try:
        yield
    except (KeyError, FileNotFoundError) as error:
        raise ArchiveError(
            f"'{name}' has no {manifest}: it is no {kind} archive", hint=f"make it with torch-{kind}-archiver"
        ) from error
    except (zipfile.BadZipFile, gzip.BadGzipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ArchiveError(f"'{name}' is torn, or neither a zip nor a tar.gz: {error}", hint="copy it again") from error
    except (NotImplementedError, RuntimeError) as error:  # zipfile: a compression or a password
        raise ArchiveError(f"'{name}' is packed in a way that is not supported: {error}") from error
    except OSError as error:
        raise ArchiveError(f"'{name}' cannot be read or unpacked: {error.strerror or error}") from error


class _Placer:
    """Writes entries below one folder, within the caps. Its methods raise ArchiveError."""

    def __init__(self, root: Path, caps: Caps) -> None:
        self._root, self.caps = root.resolve(), caps
        self._entries = self._bytes = 0
        self.packed_bytes = 0  # 0: the source is not compressed

    def folder(self, name: str) -> None:
        target = self._target(name)
        try:
            target.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ArchiveError(f"entry '{_printable(name)}' is a folder and a file") from error

    def file(self, name: str, source: IO[bytes]) -> None:
        target = self._target(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                while piece := source.read(_PIECE):
                    self._count(name, len(piece))
                    out.write(piece)
        except (FileExistsError, NotADirectoryError) as error:
            raise ArchiveError(f"entry '{_printable(name)}' comes twice, or is below a file") from error

    def _target(self, name: str) -> Path:
        self._entries += 1
        if self._entries > self.caps.entries:
            raise ArchiveError(f"entry '{_printable(name)}' is beyond the {self.caps.entries} that an archive may have")
        parts = PurePosixPath(name).parts
        if not name or "\0" in name or "\\" in name or name.startswith("/") or ".." in parts or len(name) > 1024:
            raise ArchiveError(f"entry '{_printable(name)}' leaves the archive's folder, or its name is no path")
        target = self._root.joinpath(*parts)
        if not Path(os.path.realpath(target)).is_relative_to(self._root):
            raise ArchiveError(f"entry '{_printable(name)}' leaves the archive's folder")
        return target

    def _count(self, name: str, num: int) -> None:
        self._bytes += num
        caps = self.caps
        if self._bytes > caps.total_bytes:
            raise ArchiveError(f"with entry '{_printable(name)}' the archive is over {caps.total_bytes} bytes unpacked")
        if self.packed_bytes and self._bytes > max(caps.ratio_from_bytes, caps.ratio * self.packed_bytes):
            raise ArchiveError(
                f"with entry '{_printable(name)}' the archive unpacks into more than {caps.ratio:g} times its own size"
            )


def _unzip(file: IO[bytes], placer: _Placer) -> None:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _not_a_file(info.filename)
            if info.is_dir():
                placer.folder(info.filename)
                continue
            with archive.open(info) as source:
                placer.file(info.filename, source)


class _Bounded:
    """A decompressed stream with bounds in total and for one read (tarfile reads headers of any claimed length)."""

    def __init__(self, source: gzip.GzipFile, total_bytes: int) -> None:
        self._source, self._total_bytes = source, total_bytes

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _PIECE:
            raise ArchiveError(f"a header of the tar asks for {size} bytes; it is torn, or made to fill the memory")
        found = self._source.read(size)
        if self._source.tell() > self._total_bytes:
            raise ArchiveError(f"the archive is over {self._total_bytes} bytes unpacked")
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()


@contextmanager
def _tar(file: IO[bytes], caps: Caps) -> Iterator[tarfile.TarFile]:
    packed_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    most = min(caps.total_bytes, max(caps.ratio_from_bytes, int(caps.ratio * packed_bytes)))
    with gzip.GzipFile(fileobj=file, mode="rb") as opened:
        bounded: Any = _Bounded(opened, most + caps.entries * 2048)
        with tarfile.open(fileobj=bounded, mode="r:") as archive:
            yield archive


def _untar(file: IO[bytes], placer: _Placer) -> None:
    with _tar(file, placer.caps) as archive:
        for member in archive:
            name = _plain(member.name)
            if member.isdir():
                if name:
                    placer.folder(name)
            elif member.isreg() and not member.issparse():
                source = archive.extractfile(member)
                assert source is not None  # it is a file
                placer.file(name, source)
            else:
                raise _not_a_file(member.name)


def _plain(name: str) -> str:
    """A member's name without tar's `./`; "" for the top folder."""
    return "" if name in (".", "./") else name.removeprefix("./")


def _copy_folder(path: Path, placer: _Placer) -> str:
    """Copies the files of `path`; returns a digest of their names and contents."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted([*folders, *names]):
            whole = Path(folder) / name
            inner = whole.relative_to(path).as_posix()
            mode = whole.lstat().st_mode
            if stat.S_ISDIR(mode):
                placer.folder(inner)
            elif stat.S_ISREG(mode):
                with open(os.open(whole, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
                    digest.update(f"{inner}\0{hashlib.file_digest(source, 'sha256').hexdigest()}\n".encode())
                    source.seek(0)
                    placer.file(inner, source)
            else:
                raise _not_a_file(inner)
    return digest.hexdigest()


def read_text_file(path: Path) -> bytes:
    """The file, of which no more than one byte over TEXT_BYTES is read."""
    with path.open("rb") as file:
        return file.read(TEXT_BYTES + 1)


def root(into: Path, manifest: str) -> Path:
    """The folder with the manifest: `into`, or its only folder. Raises KeyError."""
    if (into / manifest).is_file():
        return into
    inner = list(into.iterdir())
    if len(inner) == 1 and (inner[0] / manifest).is_file():
        return inner[0]
    raise KeyError(manifest)


class _ManifestFile(msgspec.Struct):
    model: Manifest
    runtime: str = "python"


def _manifest(text: bytes) -> Manifest:
    if len(text) > TEXT_BYTES:
        raise ArchiveError(f"entry '{MANIFEST}' is over {TEXT_BYTES} bytes")
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
        if "workflow" in raw and "model" not in raw:
            raise HoldsWorkflow(_WORKFLOW.format(MANIFEST))
        if isinstance(model := raw.get("model"), dict):
            raw["model"] = {key: value for key, value in model.items() if value is not None}
            if type(number := model.get("modelVersion")) in (int, float):
                raw["model"]["modelVersion"] = str(number)
        found = msgspec.convert(raw, _ManifestFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArchiveError(f"entry '{MANIFEST}' is no manifest of an archive: {error}") from error
    if found.runtime not in ("python", "python2", "python3"):
        raise ArchiveError(f"Invalid RuntimeType value: {found.runtime[:32]}", hint="python handlers are run here")
    return found.model


def read_yaml(folder: Path, name: str) -> dict[str, Any]:
    """The YAML file that a manifest names. Raises ArchiveError."""
    import yaml

    path = inside(folder, name)
    if path.stat().st_size > TEXT_BYTES:
        raise ArchiveError(f"entry '{_printable(name)}' is over {TEXT_BYTES} bytes")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ArchiveError(f"entry '{_printable(name)}' is no YAML of plain values: {str(error)[:300]}") from error
    if _count_expanded(found) > MAX_VALUES:
        raise ArchiveError(
            f"entry '{_printable(name)}' has more than {MAX_VALUES} values once its aliases are expanded",
            hint="write out what the aliases of the YAML stand for",
        )
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ArchiveError(f"entry '{_printable(name)}' is {type(found).__name__}, not a mapping of names to values")
    return found


def _count_expanded(value: Any) -> int:
    """The values of a YAML document with each alias counted as often as it stands there: 500 bytes can stand for
    billions (CWE-776). A document that contains itself has more than MAX_VALUES.
    """
    counts: dict[int, int] = {}

    def count(one: Any) -> int:
        if not isinstance(one, dict | list | tuple | set):
            return 1
        if id(one) not in counts:
            counts[id(one)] = MAX_VALUES + 1  # while it is counted, for one that contains itself
            inner = [*one.keys(), *one.values()] if isinstance(one, dict) else one
            counts[id(one)] = 1 + sum(map(count, inner))
        return counts[id(one)]

    return count(value)


def inside(folder: Path, name: str) -> Path:
    """The file that a manifest names. Raises ArchiveError for one outside the archive."""
    path = folder / name.replace("\0", "?")
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise ArchiveError(f"the manifest names the file '{_printable(name)}', which the archive does not hold")
    return path


def _printable(name: str) -> str:
    """An entry's name for a message."""
    return "".join(char if char.isprintable() else "?" for char in name[:128])


def _not_a_file(name: str) -> ArchiveError:
    return ArchiveError(f"entry '{_printable(name)}' is a link or a device; only files and folders are allowed")
