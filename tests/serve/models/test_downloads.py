"""Downloads from registered addresses: what is allowed, what is refused, and what is left behind."""

from __future__ import annotations

import errno
import http.server
import ipaddress
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import NotFound, RequestError, UsageError
from trueline.serve.models import downloads
from trueline.serve.models.downloads import AllowedUrls, AlreadyStored, DownloadFailed, NotAllowed, download, file_of
from worlds.certificates import Authority

CONTENT = b"an archive" * 1000


class Site(http.server.ThreadingHTTPServer):
    """Answers by path and keeps the paths that it was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[str] = []
        self.elsewhere = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def allowed(self) -> AllowedUrls:
        return AllowedUrls.parse(f"{self.url}/.*")


class _Answers(http.server.BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/absent.mar":
            self._begin(404, {"content-length": "0"})
        elif self.path == "/moved.mar":
            self._begin(302, {"location": self.server.elsewhere, "content-length": "0"})
        elif self.path == "/circle.mar":
            self._begin(302, {"location": "/circle.mar", "content-length": "0"})
        else:
            self._begin(200, {"content-length": str(len(CONTENT) + 7 * (self.path == "/short.mar"))})
            self.wfile.write(CONTENT)
            self.close_connection = True

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_an_allowed_address_becomes_a_file_of_the_store(site: Site, tmp_path: Path) -> None:
    found = download(f"{site.url}/a/b.mar?x=1", "b.mar", tmp_path, site.allowed)
    assert (found, found.read_bytes()) == (tmp_path / "b.mar", CONTENT)
    assert site.asked == ["/a/b.mar?x=1"]
    assert found.stat().st_mode & 0o077 == 0, "no other user of the machine changes what is served"


def test_a_certificate_is_checked_for_the_name_in_the_address(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    url = site.url.replace("http:", "https:")
    allowed = AllowedUrls.parse("https://(127[.]0[.]0[.]1|localhost):.*")
    with pytest.raises(DownloadFailed):
        download(f"{url}/b.mar", "b.mar", tmp_path, allowed)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    assert download(f"{url}/b.mar", "b.mar", tmp_path, allowed).read_bytes() == CONTENT
    with pytest.raises(DownloadFailed):  # the certificate is for the address, not for the name
        download(f"{url}/c.mar".replace("127.0.0.1", "localhost"), "c.mar", tmp_path, allowed)


@pytest.mark.parametrize("names", [False, True])
def test_a_download_has_no_name_before_it_is_whole_so_that_a_kill_leaves_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: bool
) -> None:
    during: list[int] = []
    read, opened = downloads._read, os.open

    def reads(*args: Any) -> None:
        read(*args)
        during.append(len(list(tmp_path.iterdir())))

    def opens(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if names and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        return opened(path, flags, *args, **more)

    monkeypatch.setattr(downloads, "_read", reads)
    monkeypatch.setattr(os, "open", opens)
    found = download(f"{site.url}/b.mar", "b.mar", tmp_path, site.allowed)
    assert (found.read_bytes(), during) == (CONTENT, [int(names)])
    assert list(tmp_path.iterdir()) == [found]
    assert found.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["absent.mar", "short.mar", "circle.mar"])
def test_a_download_that_fails_is_a_400_and_leaves_no_file(site: Site, tmp_path: Path, path: str) -> None:
    with pytest.raises(DownloadFailed) as failed:
        download(f"{site.url}/{path}", path, tmp_path, site.allowed)
    assert (failed.value.status, failed.value.torchserve_type) == (400, "DownloadArchiveException")
    assert list(tmp_path.iterdir()) == []


def test_a_download_ends_at_its_limit(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="more than 9999 bytes, the limit of a download"):
        download(f"{site.url}/b.mar", "b.mar", tmp_path, site.allowed, max_bytes=len(CONTENT) - 1)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_the_store_has_is_never_replaced_nor_asked_for(site: Site, tmp_path: Path) -> None:
    (tmp_path / "b.mar").write_bytes(b"mine")
    with pytest.raises(AlreadyStored, match=r"Model file already exists b\.mar"):
        download(f"{site.url}/b.mar", "b.mar", tmp_path, site.allowed)
    assert (site.asked, (tmp_path / "b.mar").read_bytes()) == ([], b"mine")


def test_nothing_is_asked_for_at_an_address_that_is_not_allowed(site: Site, tmp_path: Path) -> None:
    for allowed in (AllowedUrls(), AllowedUrls.parse("https://models[.]example[.]com/.*")):
        with pytest.raises(NotAllowed, match="does not match any allowed URL"):
            download(f"{site.url}/b.mar", "b.mar", tmp_path, allowed)
    assert site.asked == []


def test_a_redirect_leads_only_where_a_registration_could(site: Site, tmp_path: Path) -> None:
    site.elsewhere = "/b.mar"
    assert download(f"{site.url}/moved.mar", "moved.mar", tmp_path, site.allowed).read_bytes() == CONTENT
    site.elsewhere = f"{site.url.replace('127.0.0.1', '127.0.0.2')}/b.mar"
    with pytest.raises(NotAllowed):
        download(f"{site.url}/moved.mar", "again.mar", tmp_path, site.allowed)
    assert not (tmp_path / "again.mar").exists()


def test_a_pattern_for_every_host_reaches_neither_this_machine_nor_its_network(site: Site, tmp_path: Path) -> None:
    """TorchServe's default pattern, copied."""
    everything = AllowedUrls.parse("file://.*|http(s)?://.*")
    port = site.server_address[1]
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "0.0.0.0", "2130706433", "127.1"):
        with pytest.raises(DownloadFailed):
            download(f"http://{host}:{port}/b.mar", "b.mar", tmp_path, everything)
    assert site.asked == []


def test_the_address_of_a_machines_metadata_is_refused_even_where_a_pattern_names_it(tmp_path: Path) -> None:
    named = AllowedUrls.parse("http://169[.]254[.]169[.]254/.*")
    with pytest.raises(DownloadFailed, match="private network"):
        download("http://169.254.169.254/latest/m.mar", "m.mar", tmp_path, named)


def test_the_checked_address_is_the_one_that_is_asked(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves otherwise the second time (DNS rebinding) gains nothing: it is looked up once."""
    answers = iter([ipaddress.ip_address("127.0.0.1")])
    monkeypatch.setattr(downloads, "_resolve", lambda host, port: next(answers))
    allowed = AllowedUrls.parse("http://models[.]invalid:.*")
    url = f"http://models.invalid:{site.server_address[1]}/b.mar"
    assert download(url, "b.mar", tmp_path, allowed).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "url", ["http://u:p@127.0.0.1/b.mar", "http://127.0.0.1\\@x/b.mar", "http://é/b.mar", "http:///b.mar"]
)
def test_an_address_that_two_readers_could_read_differently_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        download(url, "b.mar", tmp_path, AllowedUrls.parse(".*"))


def test_an_address_names_a_file_of_the_store_or_is_refused() -> None:
    assert file_of("https://h/x/a-1.0.mar?token=1") == "a-1.0.mar"
    for url in ("https://h/", "https://h/.a", "https://h/a%2fb.mar"):
        with pytest.raises(DownloadFailed):
            file_of(url)
    with pytest.raises(NotFound, match="Relative path"):
        file_of("https://h/../a.mar")


def test_a_pattern_that_is_none_is_an_error_of_the_start() -> None:
    with pytest.raises(UsageError, match="is no regular expression"):
        AllowedUrls.parse("https://[")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "::1", "::ffff:127.0.0.1", "::7f00:1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::",
        "2001:0:7f00:1::", "::ffff:0:7f00:1", "fec0::1", "fd00::1", "fe80::1", "10.0.0.1", "100.64.0.1", "192.0.0.8",
        "192.88.99.1", "198.18.0.1", "240.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "5f00::1",
    ],
)  # fmt: skip
def test_no_form_of_an_address_that_is_not_public_is_reached_by_a_pattern_for_every_host(address: str) -> None:
    with pytest.raises(RequestError, match="private network"):
        downloads._check(ipaddress.ip_address(address), "http://x/y.mar", named=False)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "168.63.129.16", "192.0.0.192", "100.100.100.200", "fd00:ec2::254", "2002:a9fe:a9fe::"],
)
def test_the_metadata_of_no_cloud_is_reached_even_by_name(address: str) -> None:
    with pytest.raises(RequestError, match="private network"):
        downloads._check(ipaddress.ip_address(address), "http://x/y.mar", named=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::808:808"])
def test_a_public_address_is_reached(address: str) -> None:
    downloads._check(ipaddress.ip_address(address), "http://x/y.mar", named=False)


def test_a_long_address_meets_no_pattern() -> None:
    allowed = AllowedUrls.parse("https://h/.*/.*/.*[.]mar")
    assert allowed.allows("https://h/a/b/c.mar")
    assert not allowed.allows("https://h" + "/" * 1_000_000)  # 10**12 steps of the pattern
