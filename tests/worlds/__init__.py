"""Small worlds that tests share: models, bundles, servers, jobs and what else takes more than a few lines to set up.

`from worlds import servers` works in every test: pyproject.toml has `tests` on pytest's `pythonpath`. A process that
a test starts needs `TESTS` in its PYTHONPATH. This file imports no world: a test that must not import torch does not.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
