"""What a connection, a body and an archive may take: each bound is taken whole, and one more is refused."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from trueline.serve.handlers import archive
from trueline.serve.handlers.archive import ArchiveError, Caps
from trueline.serve.models.sources import Store
from trueline.web.header_cache import HeaderCache
from trueline.web.messages import Request
from trueline.web.parser import HttpLimits, RequestParser, RequestRejected, Waits, judge

LIMITS = HttpLimits(idle_s=75.0, receive_s=20.0, slowest_bytes_per_s=1000, write_s=30.0, linger_s=2.0)


@pytest.mark.parametrize(
    ("waits", "until", "then"),
    [
        (Waits(writing=0.0), 30.0, "abort"),
        (Waits(lingering=0.0), 2.0, "close"),
        (Waits(receiving=0.0), 20.0, "refuse"),
        (Waits(receiving=0.0, received_bytes=5000), 25.0, "refuse"),
        (Waits(idle=0.0), 75.0, "close"),
        (Waits(writing=0.0, lingering=29.0, receiving=0.0, idle=0.0), 30.0, "abort"),
        (Waits(lingering=0.0, receiving=-100.0, idle=-100.0), 2.0, "close"),
        (Waits(receiving=0.0, idle=-100.0), 20.0, "refuse"),
    ],
)
def test_a_connection_is_kept_until_its_time_is_over_and_not_longer(waits: Waits, until: float, then: str) -> None:
    assert [judge(waits, now, LIMITS) for now in (until - 0.001, until, until + 0.001)] == ["keep", "keep", then]


def test_a_connection_that_waits_for_nothing_is_kept() -> None:
    assert judge(Waits(), 1e9, LIMITS) == "keep"


# requests


def received(*pieces: bytes, **limits: Any) -> list[Request]:
    taken: list[Request] = []
    receiver = RequestParser(HttpLimits(**limits), HeaderCache(1000), lambda: 0.0, taken.append)
    for piece in pieces:
        receiver.feed(piece)
    return taken


def plain(size: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(*sizes: int) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (size, b"x" * size) for size in sizes)


def test_a_body_may_have_its_bound_and_not_a_byte_more() -> None:
    assert len(received(plain(100), b"x" * 100, body_bytes=100)[0].body) == 100
    with pytest.raises(RequestRejected, match="101 bytes") as refused:
        received(plain(101), body_bytes=100)
    assert refused.value.status == 413


@pytest.mark.parametrize("sizes", [(101,), (100, 1), (50, 51), (1,) * 101])
def test_a_body_in_chunks_has_the_same_bound(sizes: tuple[int, ...]) -> None:
    assert len(received(CHUNKED + chunks(60, 40) + b"0\r\n\r\n", body_bytes=100)[0].body) == 100
    with pytest.raises(RequestRejected, match="more than 100 bytes") as refused:
        received(CHUNKED + chunks(*sizes), body_bytes=100)
    assert refused.value.status == 413


def test_a_body_may_come_in_as_many_chunks_as_the_bound_and_each_body_anew() -> None:
    whole = CHUNKED + chunks(*(1,) * 9) + b"0\r\n\r\n"  # the last one, which is empty, counts
    assert [len(one.body) for one in received(whole, whole, whole, chunks=10)] == [9, 9, 9]
    with pytest.raises(RequestRejected, match="more than 10 chunks") as refused:
        received(CHUNKED + chunks(*(1,) * 11), chunks=10)
    assert refused.value.status == 413


def test_a_head_may_have_its_bound_and_each_head_anew() -> None:
    def head(size: int) -> bytes:
        """A request whose target and headers count `size` bytes."""
        left = size - len("/") - len("Hosta") - 4 - len("X") - 4
        return b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (b"y" * left)

    assert len(received(head(200), head(200), head_bytes=200)) == 2
    with pytest.raises(RequestRejected) as refused:
        received(head(201), head_bytes=200)
    assert refused.value.status == 431


# archives


def mar(path: Path, **files: bytes) -> Path:
    manifest = {"runtime": "python", "model": {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, content in files.items():
            made.writestr(name, content)
    return path


def laid_out(path: Path, into: Path, caps: Caps) -> archive.Archive:
    into.mkdir()
    return archive.unpack(path, into, caps)


def test_an_archive_may_have_as_many_entries_and_bytes_as_its_caps_and_no_more(tmp_path: Path) -> None:
    path = mar(tmp_path / "a.mar", a=b"x" * 500, b=b"y" * 500)
    with zipfile.ZipFile(path) as made:
        total = sum(info.file_size for info in made.infolist())
    laid_out(path, tmp_path / "fits", Caps(entries=3, total_bytes=total))
    with pytest.raises(ArchiveError, match=f"over {total - 1} bytes unpacked"):
        laid_out(path, tmp_path / "bytes", Caps(total_bytes=total - 1))
    with pytest.raises(ArchiveError, match="beyond the 2 that an archive may have"):
        laid_out(path, tmp_path / "entries", Caps(entries=2))


def test_a_bomb_is_refused_before_it_is_on_the_disk(tmp_path: Path) -> None:
    path = mar(tmp_path / "a.mar", bomb=bytes(8 * 2**20))
    with pytest.raises(ArchiveError, match="over 2097152 bytes unpacked"):
        laid_out(path, tmp_path / "into", Caps(total_bytes=2 * 2**20))
    assert sum(one.stat().st_size for one in (tmp_path / "into").rglob("*") if one.is_file()) <= 2 * 2**20
    with pytest.raises(ArchiveError, match="more than 10 times its own size"):
        laid_out(path, tmp_path / "ratio", Caps(ratio=10.0, ratio_from_bytes=1000))


def test_a_manifest_may_have_its_bound_and_not_a_byte_more(tmp_path: Path) -> None:
    def padded(size: int) -> bytes:
        text = json.dumps({"model": {"modelName": "m", "handler": "h.py"}}).encode()
        return text + b" " * (size - len(text))

    for size, fits in ((archive.TEXT_BYTES, True), (archive.TEXT_BYTES + 1, False)):
        path = tmp_path / f"{size}.mar"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
            made.writestr("MAR-INF/MANIFEST.json", padded(size))
        if fits:
            assert archive.peek(path).model == "m"
        else:
            with pytest.raises(ArchiveError, match="is over 1048576 bytes"):
                archive.peek(path)


def test_the_digest_of_a_folder_is_of_its_names_too(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        folder = tmp_path / f"folder-{name}"
        (folder / "MAR-INF").mkdir(parents=True)
        manifest = {"model": {"modelName": "m", "handler": "h.py"}}
        (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
        (folder / name).write_bytes(b"x")
        digests.add(laid_out(folder, tmp_path / f"into-{name}", Caps()).digest)
    assert len(digests) == 2


# the store


@pytest.mark.parametrize(
    ("versions", "order"),
    [
        (["10", "9", "2"], ["2", "9", "10"]),
        (["1", "1.10", "1.9"], ["1", "1.10", "1.9"]),
        (["v2", "10", "9"], ["10", "9", "v2"]),
    ],
)
def test_the_newest_version_is_the_highest_number_and_among_names_the_last(
    tmp_path: Path, versions: list[str], order: list[str]
) -> None:
    for version in versions:
        (tmp_path / "digits" / f"{version}.bundle").mkdir(parents=True)
        (tmp_path / "digits" / f"{version}.bundle" / "bundle.json").write_text("{}")
    assert [entry.version for entry in Store(tmp_path).of("digits")] == order


@pytest.mark.parametrize("name", ["a/../b", "a/..", "..", "a/b/../../c"])
def test_an_entry_goes_no_way_back_not_even_inside(tmp_path: Path, name: str) -> None:
    path = mar(tmp_path / "a.mar", **{name: b"x"})
    with pytest.raises(ArchiveError, match="leaves the archive's folder"):
        laid_out(path, tmp_path / "into", Caps())


@pytest.mark.parametrize("name", ["../secret.yaml", "../../secret.yaml", "a/../../secret.yaml", "absent.yaml"])
def test_a_manifest_names_files_of_its_archive_and_no_others(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.yaml").write_text("minWorkers: 64")
    manifest = {"model": {"modelName": "m", "handler": "h.py", "configFile": name}}
    with zipfile.ZipFile(tmp_path / "a.mar", "w") as made:
        made.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    with pytest.raises(ArchiveError, match="which the archive does not hold"):
        laid_out(tmp_path / "a.mar", tmp_path / "into", Caps())


def test_looking_for_a_manifest_opens_no_bomb(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.tar.gz"
    with tarfile.open(bomb, "w:gz", compresslevel=9) as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 150 * 2**20
        with open("/dev/zero", "rb") as zeros:
            tar.addfile(member, zeros)
    with pytest.raises(ArchiveError, match=r"over \d+ bytes unpacked"):
        archive.peek(bomb)
