"""The route table of the Open Inference Protocol and of KServe's V1."""

import pytest

from conformance.route_table import *  # noqa: F403 - the shared tests
from worlds.servers import TinyApp


@pytest.fixture
def table(tmp_path):
    with TinyApp(tmp_path) as app:
        yield app.routes.oip


@pytest.fixture
def own_paths():
    return [
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/stats",
        "/v2/models/tiny",
        "/v2/models/tiny/ready",
        "/v2/models/tiny/stats",
        "/v2/models/tiny/config",
        "/v2/models/tiny/explain",
        "/v2/models/absent",
        "/v2/nothing",
        "/v2/repository/index",
        "/v2/repository/models/tiny/load",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/models/tiny:predict",
        "/v1/models/tiny:explain",
    ]


@pytest.fixture
def foreign_paths():
    return ["/", "/ping", "/predictions/tiny", "/metrics", "/v1", "/v1/tiny", "/v3/models"]
