"""What fails once and passes alone is named and forgiven; everything else is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import again

FLAKY = """
from pathlib import Path
def test_flaky():
    met = Path(__file__).with_name("met")
    before, _ = met.exists(), met.write_text("")
    assert before
"""


ALONE = {"PYTHONPATH": str(Path(again.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Of runs without the plugins of this one, which take three times as long to import as the rest of such a run."""


def a_run(folder: Path, tests: str) -> Path:
    """A run of pytest over `tests`; where it remembers."""
    (folder / "conftest.py").write_text(
        "import outcomes\ndef pytest_configure(config):\n    config.pluginmanager.register(outcomes.Recorder())\n"
    )
    (folder / "test_it.py").write_text(tests)
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            f"cache_dir={folder}/memory",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
        ],
        cwd=folder,
        env=os.environ | ALONE,
        capture_output=True,
        check=False,
    )
    assert found.returncode
    return folder / "memory"


def test_what_passes_alone_is_named_as_flaky_and_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = a_run(tmp_path, FLAKY)
    monkeypatch.chdir(tmp_path)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    assert again.main([memory]) == 0
    assert "FLAKY, to be mended" in (told := capfd.readouterr().out)
    assert "test_it.py::test_flaky" in told


@pytest.mark.jobs
def test_a_test_that_is_deselected_by_default_is_run_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = a_run(tmp_path, FLAKY.replace("def test", "import pytest\n@pytest.mark.slow\ndef test"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(again.__file__).parent))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-m 'not slow'")
    assert again.main([memory]) == 0
    assert "test_it.py::test_flaky" in capfd.readouterr().out


def test_what_fails_twice_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = a_run(tmp_path, "def test_wrong():\n    assert 1 == 2\n" + FLAKY)
    monkeypatch.chdir(tmp_path)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    assert again.main([memory]) == 1


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (FLAKY + "def test_exit():\n    import os; os._exit(1)\n", "did not come to its end"),
        ("import nothing_of_this_name\n", "did not come to its end"),
        ("".join(f"def test_{n}():\n    assert 0\n" for n in range(4)), "4 tests failed; at most 3"),
        (
            "import pytest\n@pytest.fixture\ndef torn():\n    yield\n    assert 0\ndef test_two(torn):\n    assert 0\n",
            "2 failures in memory, of which 1 name a test",
        ),
    ],
)
def test_a_run_that_broke_off_or_failed_of_much_is_not_forgiven(tmp_path: Path, tests: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        again.failed_in([a_run(tmp_path, tests)])


def test_a_run_that_passed_has_nothing_to_be_run_again(tmp_path: Path) -> None:
    memory = a_run(tmp_path, FLAKY)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={memory}", "-c", os.devnull, "--rootdir", tmp_path],
        cwd=tmp_path,
        env=os.environ | ALONE,
        check=True,
    )
    assert again.failed_in([memory]) == []


def test_what_never_ran_is_no_success(tmp_path: Path) -> None:
    assert again.main([tmp_path / "suite"]) == 1
