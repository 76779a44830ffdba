"""What holds for all tests."""

import importlib
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A property is about answers. How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

EXPORTING = {"capture", "doctor", "runtime"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what exporting imports before the first test's clock starts.

    A test that is ended by its timeout in the middle of these imports leaves half of them behind, and each later
    test that exports fails of that.
    """
    if EXPORTING & {item.path.parent.name for item in session.items}:
        for module in ("onnxscript", "onnxruntime", "torch._dynamo"):
            importlib.import_module(module)


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """A mode of torch that a test leaves on would change what later ones trace."""
    yield
    overrides = sys.modules.get("torch.overrides")
    if overrides is not None:
        assert overrides._get_current_function_mode_stack() == []
