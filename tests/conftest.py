"""What holds for all tests."""

import atexit
import functools
import gc
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from outcomes import Recorder
from worlds import guardian

pytest.register_assert_rewrite("conformance")  # its tests' failures show their values

gc.disable()  # until all is imported: nothing of it will ever be garbage
atexit.register(gc.freeze)  # nor when the interpreter ends, which would take a second to look through it

# Threads of torch that have nothing to do spin for a while, in the way of the other suite and of a job's processes:
# with two suites on two cores a small training loop took three times its time on the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

guardian.start()


class _OneProcessKill:
    """`os.kill` for tests: a pid that is not known yet is 0, which ends the whole run."""

    __module__ = "os"
    _kill = staticmethod(os.kill)

    def __call__(self, pid: int, number: int) -> None:
        assert pid > 0, f"{pid} names processes that are not the test's"
        self._kill(pid, number)

    def __reduce__(self) -> str:
        return "kill"  # other processes have the usual one


os.kill = _OneProcessKill()


def _interrupt(number: int, frame: object) -> None:
    """Ends the run as Ctrl-C does: tests clean up what they have started."""
    raise KeyboardInterrupt(signal.Signals(number).name)


for _ending in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_ending) == signal.SIG_DFL:
        signal.signal(_ending, _interrupt)
        os.register_at_fork(after_in_child=functools.partial(signal.signal, _ending, signal.SIG_DFL))

# A property is about answers. How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

EXPORTING = {"capture", "doctor", "runtime"}
"""Folders of tests whose tests export."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what exporting imports before the first test's clock starts.

    A test that is ended by its timeout in the middle of these imports leaves half of them behind, and each later
    test that exports fails of that.
    """
    if EXPORTING & {item.path.relative_to(Path(__file__).parent).parts[0] for item in session.items}:
        for module in ("onnxscript", "onnxruntime", "torch._dynamo"):
            importlib.import_module(module)
    # Exporting makes millions of objects. A fifth of its time would go into looking through those of the modules again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """A mode of torch that a test leaves on would change what later ones trace."""
    yield
    overrides = sys.modules.get("torch.overrides")
    if overrides is not None:
        assert overrides._get_current_function_mode_stack() == []


@pytest.fixture(scope="session")
def new_registry(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Puts an empty registry into a folder and names it: MLflow takes seconds to make the tables of one, and they are
    copied here.
    """
    made: list[Path] = []

    def new(folder: Path) -> str:
        from trueline.registry import store

        if not made:
            tables = tmp_path_factory.mktemp("tables") / "mlflow.db"
            with store.open_store(f"sqlite:///{tables}"):
                made.append(tables)
        shutil.copyfile(made[0], folder / "mlflow.db")
        return f"sqlite:///{folder}/mlflow.db"

    return new
