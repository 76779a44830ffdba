"""Container images of a few files, made here: no registry is needed."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

PAUSE, HOST = "trueline.test/pause:1", "trueline.test/host:1"
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = ("usr", "tmp", "proc", "sys", "dev", "etc", "run", "root", "var", "var/tmp", "opt", "work")


def _make_layer(files: Mapping[str, bytes], links: Mapping[str, str], folders: tuple[str, ...]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755
            tar.addfile(entry)
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def write_image(path: Path, name: str, layer: bytes, entrypoint: list[str], env: list[str]) -> None:
    """An archive as `docker save` writes it."""
    config = json.dumps({
        "architecture": "amd64", "os": "linux", "config": {"Entrypoint": entrypoint, "Env": env},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created": "1970-01-01T00:00:00Z"}],
    }).encode()  # fmt: skip
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(path, "w") as tar:
        for file, data in (("config.json", config), ("layer.tar", layer), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(file)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def write_pause(path: Path, program: Path) -> None:
    """What holds a pod's network, and reaps its processes."""
    write_image(path, PAUSE, _make_layer({"pause": program.read_bytes()}, {}, ()), ["/pause"], [])


def list_mounts(*folders: Path) -> tuple[str, ...]:
    """What a container of the host's image needs of this machine to run its Python, and folders of the test."""
    own = [Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), *(Path(one) for one in sys.path if one), *folders]
    places = [one.resolve() if one not in folders else one for one in own if one.is_dir()]
    outer = [one for one in places if not any(other != one and one.is_relative_to(other) for other in places)]
    return tuple(dict.fromkeys(f"{one}" if one in folders else f"{one}:ro" for one in outer))


def write_host(path: Path) -> None:
    """An empty root: the folders of this machine that a process needs are mounted into it."""
    files = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}
    layer = _make_layer(files, LINKS, FOLDERS)
    write_image(path, HOST, layer, ["/bin/sh"], ["PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8"])
