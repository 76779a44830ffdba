"""Replays steps of a run in two other processes, of which one is as unlike this one as it can be made."""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trueline.capture.proof.surroundings.reading_log import Step

SCRIPT = Path(__file__).with_name("elsewhere_script.py")
TIMEOUT_S = 20.0
OTHER = {"HOME": "/other", "TMPDIR": "/", "OTHER_VARIABLE": "other", "LC_ALL": "C", "USER": "other", "LOGNAME": "other"}
_ALONE = ("-I", "-S")


def replay_elsewhere(steps: Sequence[Step]) -> list[tuple[Any, Any]]:
    """Of each step what it gives in a process like this one and in another one; both are `("value", value)`,
    `("kind", name)` or `("raised", name)`. Empty where that is not to be learnt."""
    try:
        sent = pickle.dumps(list(steps))
    except Exception:  # noqa: BLE001 - a value of a subclass may refuse to be copied in its own words
        return []
    try:
        like = _start([*_ALONE], "like", dict(os.environ))
        other = _start([*_ALONE, "-B", "-O", "-X", "dev", "-X", "pycache_prefix=/other"], "other", OTHER)
    except OSError:  # Python is part of another program, or there are too many processes
        return []
    found = [_finish(one, sent) for one in (like, other)]
    return list(zip(*found, strict=False)) if all(found) else []


def _start(options: Sequence[str], which: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *options, str(SCRIPT), which]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            env=environment)  # fmt: skip


def _finish(process: subprocess.Popen[bytes], sent: bytes) -> list[Any]:
    try:
        out, _ = process.communicate(sent, timeout=TIMEOUT_S)
        return list(pickle.loads(out))
    except (subprocess.TimeoutExpired, EOFError, pickle.UnpicklingError):
        return []
    finally:
        process.kill()
        process.wait()
