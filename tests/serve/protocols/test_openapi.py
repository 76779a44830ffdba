"""Schemathesis asks every operation of every OpenAPI document what it allows and what it does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from trueline.serve import RunningServer
from worlds import archives, bundles, servers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the package's own warnings are its own

INSIDES = re.compile(r"Traceback|File \"|\.py\b|/site-packages|/tmp/|/home/|/root/")
FEW, MANY = 4, 40
"""Examples for each operation and each kind of request."""


@pytest.fixture(scope="module")
def openapi_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    store = bundles.store(tmp_path_factory.mktemp("store"), "tiny/1", "tiny/2", max_rows=8)
    bundles.store(store, "other")
    same = "def same(data, context):\n    return data and [b'{}' for row in data]"
    archives.war(store / "flow.war", same, "{models: {}, dag: {same: []}}")
    with servers.running(store=store, load="all", management_port=0, allow_code=True) as server:
        servers.post(f"{server.management_url}/workflows", params={"url": "flow.war"}).raise_for_status()
        yield server


@pytest.fixture(scope="module")
def schemathesis() -> Any:
    """Imported where it is used: it takes a while, and most runs leave these tests out."""
    return pytest.importorskip("schemathesis", reason="schemathesis is not installed")


def operations(schemathesis: Any, url: str) -> list[Any]:
    """Those of the document at `url`."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def of_each_kind(found: list[Any]) -> list[Any]:
    """One operation of each kind: models and versions of one form are asked the same in the same way."""
    kinds = {
        (one.method, re.sub(r"/(tiny|other)(/versions)?(/[12])?(?=[/:]|$)", "/MODEL", one.path)): one for one in found
    }
    return list(kinds.values())


def can_be_asked_wrongly(operation: Any) -> bool:
    """Whether it takes a query, or a body of a form. Every text is a name: a search for others is in vain."""
    told = operation.definition.raw
    queries = [one for one in told.get("parameters", []) if one["in"] == "query"]
    forms = [one["schema"] for one in told.get("requestBody", {}).get("content", {}).values()]
    return bool(queries) or any(forms)


def is_refusal(path: str, body: Any) -> bool:
    """Whether an error has the form of its face, and says something."""
    if path.startswith(("/v1", "/v2")):
        return set(body) == {"error"} and isinstance(body["error"], str) and bool(body["error"])
    words = {"code", "type", "message"} | ({"error_code"} if path.startswith("/invocations") else set())
    return set(body) == words and isinstance(body["message"], str) and bool(body["message"])


def check(case: Any, response: Any) -> None:
    asked, said = response.request, response.content.decode("utf-8", "replace")
    told = f"{asked.method} {asked.url} {asked.body!r} -> {response.status_code} {said[:300]}"
    assert response.status_code < 500, told
    assert not INSIDES.search(said), told
    if response.status_code >= 400:
        assert response.headers["content-type"] == ["application/json"], told
        assert is_refusal(asked.path_url, json.loads(said)), told


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("face", ["data", "management"])
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_no_request_whatever_gets_a_5xx_a_traceback_or_an_error_without_its_form(
    openapi_server: RunningServer, schemathesis: Any, face: str, mode: str, examples: int
) -> None:
    url = openapi_server.url if face == "data" else openapi_server.management_url
    assert url is not None
    asked = 0
    for operation in of_each_kind(operations(schemathesis, url)):
        if mode == "negative" and not can_be_asked_wrongly(operation):
            continue
        strategy = operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode.upper()))

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=strategy)
        def ask(case: Any) -> None:
            nonlocal asked
            asked += 1
            check(case, case.call(base_url=url, timeout=60))

        ask()
    assert asked > 3 * examples, "of most operations something can be asked in this way"


def test_the_documents_name_what_is_served_and_answers_have_the_form_that_they_say(
    openapi_server: RunningServer, schemathesis: Any
) -> None:
    paths = {operation.path for operation in operations(schemathesis, openapi_server.url)}
    assert {"/v2/models/tiny/infer", "/v1/models/other:predict", "/predictions/tiny/2", "/ping"} <= paths
    assert "/wfpredict/flow" in paths
    for operation in operations(schemathesis, openapi_server.url):
        if operation.method.upper() == "GET":
            case = operation.Case()
            response = case.call(base_url=openapi_server.url, timeout=60)
            case.validate_response(response)
