"""Ray's settings, and what a machine says that has no Ray, or reaches no cluster."""

from importlib.util import find_spec

import pytest

from trueline.engine.cluster.contract import Submission
from trueline.engine.cluster.ray import RayScheduler, parse_resources
from trueline.engine.cluster.settings import RaySettings
from trueline.errors import EngineAway, UsageError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_named_within_seconds(cache):
    with pytest.raises(EngineAway, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        RayScheduler(RaySettings(address="127.0.0.1:1")).list("a-1.1")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_extra_is_named(cache):
    with pytest.raises(EngineAway, match="needs the package ray, which is not installed") as error:
        RayScheduler(RaySettings()).submit(Submission(name="a-1.1.head", command=("true",), log="/l"))
    assert error.value.hint == "pip install 'trueline[ray]'"


@pytest.mark.parametrize("given", ["GPU", "GPU=x", "GPU=0", "=1", "CPU=2"])
def test_a_resource_that_is_no_name_and_number_is_refused(given):
    with pytest.raises(UsageError, match=rf"resources has '{given}', expected NAME=NUMBER"):
        parse_resources([given])


def test_a_strategy_that_ray_does_not_have_is_refused():
    with pytest.raises(UsageError, match="strategy is pack, expected one of PACK, SPREAD"):
        RayScheduler(RaySettings(strategy="pack"))
