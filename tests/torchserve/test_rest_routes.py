"""TorchServe's route table."""

import pytest

from conformance.route_table import *  # noqa: F403 - the shared tests
from trueline.torchserve.rest import TorchServeRoutes
from worlds.servers import TinyApp


@pytest.fixture
def table(tmp_path):
    with TinyApp(tmp_path) as app:
        yield TorchServeRoutes(app.routes.dispatch)


@pytest.fixture
def own_paths():
    return [
        "/ping",
        "/predictions/tiny",
        "/predictions/tiny/1",
        "/predictions/absent",
        "/explanations/tiny",
        "/explanations/tiny/1",
        "/wfpredict/absent",
        "/invocations",
        "/models/tiny/invoke",
        "/tiny/predict",
        "/tiny/1/predict",
    ]


@pytest.fixture
def foreign_paths():
    return ["/", "/v2/models/tiny/infer", "/v1/models/tiny", "/metrics", "/health", "/models", "/explanations"]
