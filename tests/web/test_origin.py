"""Promises of a server without tokens towards web pages: only its own and those that it allows reach it."""

from __future__ import annotations

import socket

import pytest

from trueline.errors import UsageError
from trueline.web.origin import PageRule
from worlds.connections import get, post, world

RULE = PageRule.of("127.0.0.1")
PAGE = "origin: http://evil.test"


def fault(rule: PageRule = RULE, *, host: str = "127.0.0.1:8080", method: str = "POST", target: str = "/", **headers):
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return rule.find_fault(method, target.encode(), {b"host": host.encode(), **sent})


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8080", "127.0.0.1", "[::1]:80", "[fe80::1%eth0]", "localhost", "LOCALHOST:1", "a.localhost:1", "127.1",
     "2130706433", "10.0.0.7:80", "localhost.", "", socket.gethostname()],
)  # fmt: skip
def test_a_server_is_called_by_an_address_by_localhost_and_by_the_name_of_its_machine(host):
    assert fault(host=host) == ""


@pytest.mark.parametrize(
    "host",
    ["evil.test", "evil.test:8080", "127.0.0.1.evil.test", "localhost.evil.test", "evillocalhost",
     "127.0.0.1 evil.test", "[::1].evil.test", "[evil]", "[", "0x7f.evil", "localhost@evil.test", "metadata"],
)  # fmt: skip
def test_any_other_name_is_refused_since_its_owner_may_let_it_lead_to_the_loopback(host):
    assert host[:12] in fault(host=host)
    assert "--allowed-hosts" in fault(host=host)


def test_the_name_in_an_absolute_target_counts_as_well():
    assert "evil.test" in fault(target="http://evil.test/models")
    assert "evil.test" in fault(target="HTTP://user:word@evil.test:80?x=1")
    assert fault(target="http://localhost:8080/models?url=http://evil.test/") == ""


def test_names_are_allowed_by_the_host_setting_by_allowed_hosts_and_all_of_them_by_a_star_or_with_a_certificate():
    assert fault(PageRule.of("models.lan"), host="Models.Lan:80") == ""
    assert fault(PageRule.of("::1", allowed="a.test, b.test"), host="b.test") == ""
    assert "c.test" in fault(PageRule.of("::1", allowed="a.test, b.test"), host="c.test")
    assert fault(PageRule.of("::1", allowed="*"), host="c.test") == ""
    assert fault(PageRule.of("::1", any_host=True), host="c.test") == ""
    with pytest.raises(UsageError, match="allowed_hosts has 'http:"):
        PageRule.of("::1", allowed="http://a.test")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "http://127.0.0.1:3000", "http://127.0.0.1.evil.test:8080", "file://", ""]
)
def test_a_page_of_another_origin_is_refused_whatever_it_sends(method, origin):
    assert "--cors-origin" in fault(method=method, origin=origin)


def test_a_page_of_the_server_itself_and_of_the_origin_that_cors_allows_are_answered():
    assert fault(origin="http://127.0.0.1:8080", sec_fetch_site="same-origin") == ""
    allowed = PageRule.of("127.0.0.1", origin="https://app.test")
    assert fault(allowed, origin="https://app.test", sec_fetch_site="cross-site") == ""
    assert "--cors-origin" in fault(allowed, origin="https://other.test")
    assert "--cors-origin" in fault(allowed, origin="http://app.test")
    assert fault(PageRule.of("127.0.0.1", origin="*"), origin="null") == ""
    assert "evil.test" in fault(PageRule.of("127.0.0.1", origin="*"), host="evil.test")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something new"])
def test_an_image_a_script_or_a_form_of_another_site_is_refused_without_an_origin_too(site):
    assert site in fault(method="GET", sec_fetch_site=site)
    assert site in fault(method="GET", sec_fetch_site=site, sec_fetch_mode="no-cors", sec_fetch_dest="image")
    assert site in fault(method="POST", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="document")
    assert site in fault(method="GET", sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe")


def test_a_link_to_the_server_and_what_a_user_types_are_followed():
    assert fault(method="GET", sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="document") == ""
    assert fault(method="GET", sec_fetch_site="none") == ""


def test_a_refused_request_ends_its_connection_and_nothing_that_follows_it_is_answered():
    w = world(pages=RULE)
    answer = w.send(post(b"{}", PAGE) + post(b"{}", path="/b"))
    assert w.app.seen == []
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert w.wire.answers() == 1
    assert b"evil.test" in answer or b"host 't'" in answer
    assert w.send(get("/c")) == b""


def test_a_head_that_was_learned_lets_no_page_in():
    w = world(pages=PageRule.of("t"))
    for _ in range(3):
        assert w.send(post(b"{}", "x-a: 1")).startswith(b"HTTP/1.1 200 ")
    seen = len(w.app.seen)
    assert w.send(post(b"{}", "x-a: 1", PAGE)).startswith(b"HTTP/1.1 403 ")
    w = world(pages=PageRule.of("t"))
    for _ in range(3):
        assert w.send(post(b"{}", "origin: http://t")).startswith(b"HTTP/1.1 200 ")
    assert w.send(post(b"{}", "origin: http://u")).startswith(b"HTTP/1.1 403 ")
    assert seen == 3


def test_a_server_whose_clients_need_a_token_leaves_pages_to_it():
    assert world().send(post(b"{}", PAGE)).startswith(b"HTTP/1.1 200 ")


def test_a_request_with_two_hosts_is_refused():
    assert world(pages=PageRule.of("t")).send(get("/a", "host: 127.0.0.1")).startswith(b"HTTP/1.1 400 ")
    assert world().send(get("/a", "Host: t")).startswith(b"HTTP/1.1 400 ")
