"""Credentials in URLs reach neither errors nor events, whichever module names the URL."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trueline import events
from trueline.errors import BundleError, StorageError, TruelineError, rebuild_error

URLS = {
    "http://op:s3cr3t@host/x.tlb?n=1": "http://host/x.tlb?n=1",
    "s3://AKID:s3cr3t@bucket/x.tlb": "s3://bucket/x.tlb",
    "https://host/x?X-Amz-Signature=s3cr3t&X-Amz-Credential=s3cr3t": "https://host/x?X-Amz-Signature=***&X-Amz-Credential=***",
    "https://host/x?se=2026&sig=s3cr3t": "https://host/x?se=2026&sig=***",
    "https://host/x?access_token=s3cr3t#sha256:ab": "https://host/x?access_token=***#sha256:ab",
    "https://host/x?api_key=s3cr3t&key=s3cr3t": "https://host/x?api_key=***&key=***",
    "postgresql://user:s3cr3t@db/mlflow": "postgresql://db/mlflow",
    "memory://x failed: NoCredentialsError: Unable to": "memory://x failed: NoCredentialsError: Unable to",
    "https://host/model@champion/x": "https://host/model@champion/x",
}


@pytest.mark.parametrize("url", URLS)
def test_an_error_names_a_url_without_its_credentials(url: str) -> None:
    for kind in (TruelineError, BundleError, StorageError):
        error = kind(f"there is no bundle at {url}", hint=f"look at {url}")
        assert str(error) == error.message == f"there is no bundle at {URLS[url]}"
        assert error.hint == f"look at {URLS[url]}"
    assert rebuild_error("bundle", {"message": url, "hint": url}).message == URLS[url]


@pytest.mark.parametrize("url", URLS)
def test_an_event_names_a_url_without_its_credentials(url: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, Any]] = []
    with events.listening(lambda name, fields: seen.append(fields)), caplog.at_level(logging.INFO, "trueline"):
        events.emit("version.loading", source=url, count=3)
    assert seen == [{"source": URLS[url], "count": 3}]
    assert "s3cr3t" not in caplog.text


def test_text_without_a_url_is_left_as_it_is() -> None:
    for text in ("Token Authorization failed", "the key: x is missing", "password=1 is no number", "a@b:c"):
        assert TruelineError(text, hint=text).message == text


def test_long_texts_of_clients_are_read_in_linear_time() -> None:
    """A search that begins again at every character would take longer than a test may."""
    for text in ("a" * 300_000, "token" * 60_000, "x://" * 75_000, "x://" + "a" * 300_000, "?sig=" * 60_000):
        assert TruelineError("http://host/ " + text).message.startswith("http://host/ ")
