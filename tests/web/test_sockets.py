"""TLS on every port, and who is asked for a certificate. The certificates are made here."""

from __future__ import annotations

import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest

from trueline import serve
from trueline.errors import UsageError
from trueline.web import sockets as tls
from worlds import bundles
from worlds.certificates import Authority, Issued


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """The version that the two agree on, over memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    if not waiting:
        ends[1].write(b"hello")  # in TLS 1.3 a client learns that its certificate is refused only now
        assert ends[0].read(5) == b"hello"
        return ends[1].version()
    raise AssertionError("the handshake does not end")


def test_what_is_older_than_tls_1_2_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one = authority.issue("server")
    served = tls.make_ssl_context(tls.Certificates(certificate=one.certificate, private_key=one.key))
    client = ssl.create_default_context(cafile=authority.certificate)
    assert handshake(served, client) == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(served, client) == "TLSv1.2"
    assert served.minimum_version == ssl.TLSVersion.TLSv1_2


def test_with_a_client_authority_only_its_certificates_come_in(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    one = authority.issue("server")
    served = tls.make_ssl_context(
        tls.Certificates(certificate=one.certificate, private_key=one.key, client_ca=authority.certificate)
    )
    client = ssl.create_default_context(cafile=authority.certificate)
    with pytest.raises(ssl.SSLError):
        handshake(served, client)
    other = stranger.issue("other")
    client.load_cert_chain(other.certificate, other.key)
    with pytest.raises(ssl.SSLError):
        handshake(served, client)
    client = ssl.create_default_context(cafile=authority.certificate)
    mine = authority.issue("mine")
    client.load_cert_chain(mine.certificate, mine.key)
    assert handshake(served, client) == "TLSv1.3"


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    locked = authority.issue("locked", b"secret")
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    cases = [
        (tls.Certificates(certificate=tmp_path / "none.pem"), "none.pem"),
        (tls.Certificates(certificate=one.certificate, private_key=other.key), "other.key"),
        (tls.Certificates(certificate=locked.certificate, private_key=locked.key), "locked.key"),
        (tls.Certificates(certificate=one.certificate, private_key=one.key, client_ca=empty), "empty.pem"),
    ]
    for given, named in cases:
        with pytest.raises(UsageError, match=named):
            tls.make_ssl_context(given)


def test_a_key_or_an_authority_without_a_certificate_is_a_mistake() -> None:
    assert tls.parse_certificates(None, None, None) is None
    for given in ((None, "a.key", None), (None, None, "ca.pem")):
        with pytest.raises(UsageError, match="without --certificate"):
            tls.parse_certificates(*given)


@pytest.mark.slow
def test_a_server_that_asks_for_certificates_may_be_reached_and_answers_over_http_and_grpc(tmp_path: Path) -> None:
    grpc_client = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    authority = Authority(tmp_path)
    one, mine = authority.issue("server"), authority.issue("mine")
    source = bundles.double_plus(tmp_path / "tiny.bundle").path
    with pytest.raises(UsageError, match="can be reached from other machines"):
        serve.start(source, host="0.0.0.0", certificate=str(one.certificate), private_key=str(one.key))
    with serve.start(
        source,
        host="0.0.0.0",
        certificate=str(one.certificate),
        private_key=str(one.key),
        client_ca=str(authority.certificate),
        grpc_port=0,
    ) as running:
        assert running.url.startswith("https://")
        known = ssl.create_default_context(cafile=authority.certificate)
        url = f"https://127.0.0.1:{running.port}/predictions/tiny"
        with httpx.Client(verify=known, timeout=60) as anonymous, pytest.raises(httpx.TransportError):
            anonymous.post(url, json=[1, 2, 3])
        known.load_cert_chain(mine.certificate, mine.key)
        with httpx.Client(verify=known, timeout=60) as client:
            assert client.post(url, json=[1, 2, 3]).json() == [3, 5, 7]
        with httpx.Client(timeout=60) as plain, pytest.raises(httpx.TransportError):
            plain.post(url.replace("https", "http"), json=[1, 2, 3])
        with grpc_client.InferenceServerClient(
            f"127.0.0.1:{running.grpc_port}",
            ssl=True,
            root_certificates=str(authority.certificate),
            private_key=str(mine.key),
            certificate_chain=str(mine.certificate),
        ) as asking:
            given = grpc_client.InferInput("x", [1, 3], "FP32")
            given.set_data_from_numpy(np.ones((1, 3), np.float32))
            assert asking.infer("tiny", [given]).as_numpy("y").tolist() == [[3, 3, 3]]


def test_over_grpc_too_only_a_certificate_of_the_client_authority_comes_in(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    own, ours, others = authority.issue("server"), authority.issue("client"), stranger.issue("other")
    root = authority.certificate.read_bytes()

    def said(server: tls.Certificates, client: Issued | None) -> grpc.StatusCode:
        """What a client of a service without methods hears: UNIMPLEMENTED once it is let in."""
        shown = (None, None) if client is None else (client.key.read_bytes(), client.certificate.read_bytes())
        with ThreadPoolExecutor(1) as threads:
            served = grpc.server(threads)
            port = served.add_secure_port("127.0.0.1:0", tls.make_grpc_credentials(server))
            served.start()
            try:
                with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root, *shown)) as channel:
                    with pytest.raises(grpc.RpcError) as refused:
                        channel.unary_unary("/none/None")(b"", timeout=100)
                    code: grpc.StatusCode = refused.value.code()
                    return code
            finally:
                served.stop(None).wait()

    mutual = tls.Certificates(certificate=own.certificate, private_key=own.key, client_ca=authority.certificate)
    assert [said(mutual, one) for one in (ours, None, others)] == [
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAVAILABLE,
    ]
    plain = tls.Certificates(certificate=own.certificate, private_key=own.key)
    assert said(plain, None) == grpc.StatusCode.UNIMPLEMENTED
