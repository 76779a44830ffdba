"""The headers of pages: only the page's own script runs, and only its own server is asked."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib import resources

import pytest

from trueline.serve.metrics import dashboard
from trueline.web.messages import Response
from trueline.web.pages import page_headers

PAGES = {
    "dashboard": resources.files("trueline.serve.metrics").joinpath("dashboard.html"),
    "home": resources.files("trueline.serve.metrics").joinpath("home.html"),
    "try": resources.files("trueline.serve.metrics").joinpath("try.html"),
    "job": resources.files("trueline.train.monitor").joinpath("page.html"),
}


@pytest.mark.parametrize("page", PAGES)
def test_a_browser_runs_the_script_of_the_page_and_no_other(page: str) -> None:
    """The class of CVE-2024-27133, CVE-2026-33865 (script in names and files) and of clickjacking."""
    html = PAGES[page].read_bytes()
    (script,) = re.findall(rb"<script>(.*?)</script>", html, re.DOTALL)
    headers = page_headers(html).decode()
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in headers
    assert "unsafe-eval" not in headers
    assert "script-src 'unsafe-inline'" not in headers
    for rule in (
        "default-src 'none'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ):
        assert rule in headers
    assert "x-content-type-options: nosniff\r\n" in headers


@pytest.mark.parametrize("page", PAGES)
def test_a_page_makes_no_markup_of_text_and_keeps_no_handlers_in_attributes(page: str) -> None:
    html = PAGES[page].read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", html)
    assert not re.search(r"<[^>]*\son\w+\s*=", html), "a handler in an attribute, which the policy does not allow"
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", html), "something from another host"


@pytest.mark.parametrize(
    "page", [dashboard.home_page, dashboard.page, dashboard.try_page], ids=lambda page: page.__name__
)
def test_the_pages_of_a_server_share_one_style(page: Callable[[], Response]) -> None:
    html = page().body.decode()
    assert html.count("--ink:") == html.count("prefers-color-scheme") + 1 == 2
    defined, used = set(re.findall(r"(--\w+):", html)), set(re.findall(r"var\((--\w+)", html))
    assert used <= defined


def test_a_page_without_a_script_may_run_none() -> None:
    assert b"script-src 'none'" in page_headers(b"<p>hello")
