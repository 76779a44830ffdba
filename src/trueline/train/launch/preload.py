"""What an agent imports once for all workers, and an agent that begins with it before its job is prepared."""

import ast
import contextlib
import importlib.util
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType

from trueline.engine.local.client import start_agent
from trueline.engine.local.process import Lifeline
from trueline.errors import JobStopped
from trueline.files import TemporaryFolder
from trueline.recipe.settings import Strategy
from trueline.train.settings import WORKERS

PRELOAD = ("torch.nn.parallel", "torch.optim")
"""What the agent imports once for all workers, beside their module and the libraries that the recipe imports."""


def find_preload(strategy: Strategy, users: Path | None = None) -> tuple[str, ...]:
    """`users`: the file of the recipe, or the script; None: it is not known yet."""
    return (WORKERS[strategy], *PRELOAD, *(libraries_of(users) if users is not None else ()))


class EarlyAgent:
    """An agent without a job: torch takes it seconds, and the launcher as well, which prepares the job meanwhile.

    A context manager: an agent that no launcher has taken over ends with the block, which SIGTERM and SIGHUP leave as
    JobStopped until then.
    """

    def __init__(self, strategy: Strategy, recipe: Path) -> None:
        self._usual = _end_by_errors()
        self.folder = TemporaryFolder.after_sweep("launch")
        self.scratch = self.folder.path
        self.lifeline = Lifeline()
        self._log, self._handed_over = self.scratch / "agent.log", False
        preload = find_preload(strategy, recipe)
        self._process = start_agent(self.scratch / "agent", preload=preload, life=self.lifeline.reading, log=self._log)

    def hand_over(self, log: Path) -> subprocess.Popen[bytes]:
        """The process, which is the caller's from now on and writes to `log`."""
        self._handed_over = True
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another file system
            os.link(self._log, log)
        return self._process

    def restore_signals(self) -> None:
        """Harmless when repeated."""
        while self._usual:
            signal.signal(self._usual.pop(), signal.SIG_DFL)

    def __enter__(self) -> "EarlyAgent":
        return self

    def __exit__(self, *error: object) -> None:
        self.restore_signals()
        if not self._handed_over:
            self.lifeline.end()
            self._process.kill()  # it would import to the end; it has forked nothing yet
            self._process.wait()
            self.folder.remove()


def _end_by_errors() -> list[signal.Signals]:
    """Has the signals that would end this process at once raise JobStopped; returns those of SIGTERM and SIGHUP that
    have no other handler."""
    if threading.current_thread() is not threading.main_thread():
        return []

    def stop(number: int, frame: FrameType | None) -> None:
        raise JobStopped(f"the launcher got {signal.Signals(number).name} before the job had begun")

    usual = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, stop)
    return usual


def libraries_of(recipe: Path) -> list[str]:
    """Installed modules that the recipe's file imports at its top; the user's own modules run in workers only."""
    try:
        body = ast.parse(recipe.read_bytes()).body
    except (OSError, SyntaxError):  # module:object, whose imports are only known when it runs
        return []
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [name for name in dict.fromkeys(names) if _is_installed(name.partition(".")[0])]


def _is_installed(top: str) -> bool:
    spec = importlib.util.find_spec(top)
    return spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(spec.origin or "").parts)
