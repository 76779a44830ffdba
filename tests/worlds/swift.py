"""OpenStack Swift with its S3 API: four servers as processes, one disk (a folder), and rings.

It checks signatures, and rejects a PUT with `If-None-Match: *` of an object that exists when the PUT begins.
Source: Swift's deployment guide and the manual pages of its configuration files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from worlds.loopback import free_ports, until_listening

_RINGS = """
import json, sys
from swift.common.ring import RingBuilder
folder, ports = sys.argv[1], json.loads(sys.argv[2])
for ring, port in ports.items():
    builder = RingBuilder(2, 1, 0)
    builder.add_dev(dict(id=0, region=1, zone=1, weight=1.0, ip="127.0.0.1", port=port, device="disk"))
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{ring}.ring.gz")
"""
_SERVE = """
import sys
from swift.common import utils
utils.set_swift_dir(sys.argv[1])
from swift.common.wsgi import run_wsgi
sys.exit(run_wsgi(f"{sys.argv[1]}/{sys.argv[2]}.conf", sys.argv[2], verbose=True))
"""
_HASHES = "[swift-hash]\nswift_hash_path_suffix = tests\n"
_ALL = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}
mount_check = false
disable_fallocate = true
fallocate_reserve = 0
"""
_STORAGE = """
[pipeline:main]
pipeline = {kind}-server

[app:{kind}-server]
use = egg:swift#{kind}
conn_timeout = 60
node_timeout = 60
container_update_timeout = 60
"""
"""A container lists a new object before the client gets its response, on a slow machine too: no updater runs here."""
_PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats s3api tempauth slo proxy-server

[filter:catch_errors]
use = egg:swift#catch_errors

[filter:gatekeeper]
use = egg:swift#gatekeeper

[filter:listing_formats]
use = egg:swift#listing_formats

[filter:s3api]
use = egg:swift#s3api

[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{name} = {secret} .admin

[filter:slo]
use = egg:swift#slo

[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
conn_timeout = 60
node_timeout = 60
recoverable_node_timeout = 60
"""


@contextmanager
def serving(folder: Path, key: str, secret: str) -> Iterator[str]:
    """The URL of Swift's proxy over `folder`; `key` is `account:name`, as tempauth's are."""
    if importlib.util.find_spec("swift") is None:
        pytest.skip("OpenStack Swift is not installed: make test-s3")
    (folder / "disk").mkdir(parents=True)
    try:
        os.setxattr(folder / "disk", "user.trueline", b"1")
    except OSError as error:
        pytest.skip(f"{folder} is on a file system without extended attributes, which Swift needs: {error.strerror}")
    kinds = ("account", "container", "object", "proxy")
    ports = dict(zip(kinds, free_ports(len(kinds)), strict=True))
    (folder / "swift.conf").write_text(_HASHES)
    account, _, name = key.partition(":")
    for kind in kinds:
        text = (_PROXY if kind == "proxy" else _STORAGE).format(kind=kind, account=account, name=name, secret=secret)
        common = _ALL.format(port=ports[kind], user=pwd.getpwuid(os.getuid()).pw_name, folder=folder)
        (folder / f"{kind}-server.conf").write_text(common + text)
    rings = json.dumps({kind: ports[kind] for kind in kinds[:3]})
    subprocess.run([sys.executable, "-c", _RINGS, str(folder), rings], check=True, capture_output=True)
    with ExitStack() as running:
        started = [running.enter_context(_server(folder, kind)) for kind in kinds]
        for process, kind in zip(started, kinds, strict=True):
            until_listening(process, ports[kind], folder / f"{kind}.log")
        yield f"http://127.0.0.1:{ports['proxy']}"


@contextmanager
def _server(folder: Path, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{kind}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(folder), f"{kind}-server"],
            stdout=log,
            stderr=log,
            start_new_session=True,  # Swift ends its whole process group
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
