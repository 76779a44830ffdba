"""The route table of the server's own pages, and what a server without an extension answers."""

import json

import pytest

from conformance.route_table import *  # noqa: F403 - the shared tests
from trueline.serve.protocols.router import Routes
from worlds.servers import TinyApp


@pytest.fixture
def app(tmp_path):
    with TinyApp(tmp_path) as app:
        yield app


@pytest.fixture
def table(app):
    return app.routes


@pytest.fixture
def own_paths():
    return ["/", "/metrics", "/health", "/version", "/dashboard", "/dashboard/state", "/try", "/openapi.json"]


@pytest.fixture
def foreign_paths():
    return ["/v2", "/ping", "/predictions/tiny", "/dashboard/other", "/metrics/more"]


def test_a_server_without_an_extension_answers_its_own_protocol_and_refuses_others_in_its_form(app):
    app.routes = Routes(app.models, app.loop)
    assert app.ask("GET", "/v2/health/live").status == 200
    answer = app.ask("GET", "/predictions/tiny")
    assert (answer.status, list(json.loads(answer.body))) == (404, ["error"])
