"""Small worlds that tests share: models, bundles, servers, jobs and other set-ups of more than a few lines.

`from worlds import servers` works in every test: pyproject.toml has `tests` on pytest's `pythonpath`. A process that
a test starts needs `TESTS` in its PYTHONPATH. This file imports no world, so a test without torch stays so.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
