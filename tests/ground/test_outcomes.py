"""The summary of a run of several suites: nothing that was skipped or broke off goes unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import outcomes

SKIPS = """
import pytest
@pytest.mark.parametrize("n", range(3))
def test_on_a_gpu(n):
    pytest.skip("no GPU")
@pytest.mark.skipif(True, reason="not as root")
def test_as_a_user():
    pass
def test_fine():
    pass
"""
PLUGIN = "import outcomes\ndef pytest_configure(config):\n    config.pluginmanager.register(outcomes.Recorder())\n"


def a_run(folder: Path, **files: str) -> Path:
    """A run of pytest over test files with this text; its cache folder, which is called as `folder`."""
    for name, text in {"conftest": PLUGIN, **files}.items():
        (folder / f"{name}.py").parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    memory = folder / "memory" / folder.name
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={memory}", "-c", os.devnull, "--rootdir", folder]
    env = os.environ | {"PYTHONPATH": str(Path(outcomes.__file__).parent)}
    subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
    return memory


def test_skips_are_counted_by_reason_over_all_suites_and_a_skipped_file_counts(tmp_path: Path) -> None:
    whole_file = "import pytest\npytest.skip('no GPU', allow_module_level=True)"
    one = a_run(tmp_path / "one", test_it=SKIPS, test_file=whole_file)
    two = a_run(tmp_path / "two", test_it="def test_wrong():\n    assert 0\n" + SKIPS)
    *_, failed, first, second, last = outcomes.summary([one, two]).splitlines()
    assert failed == "failed: test_it.py::test_wrong"
    assert (first, second) == ("skipped    7  no GPU", "skipped    2  not as root")
    assert last == "2 passed, 1 failed, 9 skipped"


def test_a_suite_that_breaks_off_or_never_ran_is_a_failure(tmp_path: Path) -> None:
    broken = a_run(tmp_path / "broken", test_it="def test_exit():\n    import os; os._exit(0)\n")
    text = outcomes.summary([broken, tmp_path / "never"])
    assert text.count("did not come to its end") == 2
    assert text.endswith("0 passed, 2 failed, 0 skipped")
