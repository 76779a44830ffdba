"""What a forked child does until its end, whatever happens in it: it never returns into the code of its parent."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def ends_with(life: Callable[[], int | None]) -> NoReturn:
    """Runs `life` and ends this process with the exit code that it gives (None: 0), or 1 for what it raises."""
    code = 1
    try:
        code = life() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  the process boundary: report all, then end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
