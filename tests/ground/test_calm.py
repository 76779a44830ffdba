"""No test sleeps to be right, and none says how long something may take: both fail on a machine that is busy."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from worlds import waiting

TESTS = Path(__file__).parents[1]
SLEEPERS = {
    "worlds/waiting.py": "waits for all others, with a limit",
    "ground/test_calm.py": "has what is to be found",
    "serve/handlers/test_workers.py": "a handler that hangs, to be ended",
    "torchserve/workflows/test_workflows.py": "a handler that hangs, to be ended",
    "data/loading/test_worker_pool.py": "a record whose reading never ends, in a process to be killed",
    "train/recipes/tiny.py": "a job whose steps are slow until a test has seen what it waits for",
    "train/recipes/measured.py": "records that are slow to read, so that a worker can be killed meanwhile",
    "worlds/learners.py": "scripts of a learner that step slowly, or sleep at their end as FfDL's examples do",
    "worlds/joined_hosts.py": "a script that waits for a file after its loop",
    "conformance/scheduler_logs.py": "a command that runs until it gets its notice",
    "train/torn_disk/sitecustomize.py": "a worker that dies a moment after what it has torn",
}
"""Files of tests that sleep, and what for: never so that a test is right."""
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "thread_time", "monotonic_s"}
NUMBERS = {"abs", "float", "int", "max", "min", "round", "sum"}


def sleeps(code: str) -> list[int]:
    """Lines that sleep, or act after a time, for anything but no time; programs in strings are looked into as well."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and _name(node.func) in _SLEEPS and not _is_zero(node):
            found.append(node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "sleep(" in node.value:
            found += [node.lineno for call in _SLEEPS if f"{call}(" in node.value.replace(f"{call}(0)", "")]
    return found


_SLEEPS = ("time.sleep", "asyncio.sleep", "threading.Timer", "Timer", "sleep")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _is_zero(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def timed_asserts(code: str) -> list[int]:
    """Lines of asserts on what a clock says, or on what was computed from that in the same function."""
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted({line for scope in (tree, *functions) for line in _timed_in(scope)})


def _timed_in(scope: ast.AST) -> Iterator[int]:
    clocked: set[str] = set()
    for statement in sorted(_statements(scope), key=lambda node: node.lineno):
        if isinstance(statement, ast.Assert) and _tells_time(statement.test, clocked):
            yield statement.lineno
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if _tells_time(statement.value, clocked):
                clocked |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Of a module those outside its functions, of a function those of the functions inside it as well."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not (
            isinstance(scope, ast.Module | ast.ClassDef) and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            yield from _statements(node)


def _tells_time(expression: ast.AST, clocked: set[str]) -> bool:
    if isinstance(expression, ast.Name):
        return expression.id in clocked
    if isinstance(expression, ast.Call):
        name = _name(expression.func)
        if name == "time.time" or name.rpartition(".")[2] in CLOCKS:
            return True
        if name not in NUMBERS:  # what a function makes of a time that it is given is its own affair
            return False
    return any(_tells_time(node, clocked) for node in ast.iter_child_nodes(expression))


def files() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("*.py")):
        yield path.relative_to(TESTS).as_posix(), path.read_text()


def test_no_test_sleeps_to_be_right() -> None:
    found = {name: lines for name, code in files() if "leep(" in code or "Timer(" in code if (lines := sleeps(code))}
    new = [f"tests/{name}:{line}" for name, lines in found.items() if name not in SLEEPERS for line in lines]
    assert new == [], "wait for an event, or for a condition with worlds.waiting.until"
    assert SLEEPERS.keys() - found.keys() == set(), "these sleep no more"


def test_no_test_says_how_long_something_may_take() -> None:
    found = {
        name: timed_asserts(code) for name, code in files() if any(clock in code for clock in (*CLOCKS, "time.time"))
    }
    new = [f"tests/{name}:{line}" for name, lines in found.items() for line in lines]
    assert new == [], "count what is done, or give it a clock of the test's"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import time\ntime.sleep(0.3)", [2]),
        ("async def test():\n    await asyncio.sleep(pause_s)", [2]),
        ("from time import sleep\nsleep(1)", [2]),
        ("Timer(0.05, cut).start()", [1]),
        ("CODE = '''\nimport time\ntime.sleep(2)\n'''", [1]),
        ("run(f'import time; time.sleep({seconds})')", [1]),
        ("await_all = asyncio.sleep(0)\nworld.sleep('worker')\nbatcher.sleep(3)", []),
    ],
)
def test_a_sleep_is_found_wherever_it_stands(code: str, lines: list[int]) -> None:
    assert sleeps(code)[:1] == lines


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("began = time.monotonic()\nact()\nassert time.monotonic() - began < 5", [3]),
        ("def test():\n    began = perf_counter()\n    took_s = perf_counter() - began\n    assert took_s < 5", [4]),
        ("def test():\n    ends = clock.monotonic_s() + 9\n    while True:\n        assert now() < ends", [4]),
        ("def test():\n    now = time.monotonic()\ndef test_other():\n    now = 3.0\n    assert now == 3.0", []),
        ("began = time.time()\nassert abs(time.time() - began) < 5", [2]),
        ("class Test:\n    def test(self):\n        took_s = perf_counter() - 1\n        assert took_s < 5", [4]),
        ("said = ask()\nassert said.elapsed_s < 5", []),
        ("now = time.time()\nassert expired(now + 9)", []),
    ],
)
def test_an_assert_on_a_clock_is_found(code: str, lines: list[int]) -> None:
    assert timed_asserts(code) == lines


def test_what_does_not_come_is_named_when_the_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LIMIT_S", 0.02)
    looks: list[int] = []
    assert waiting.until(lambda: looks.append(0) or len(looks) == 3, "three looks")
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: a train"):
        waiting.until(lambda: False, lambda: "a train")


def test_the_end_of_a_process_is_seen_before_anybody_reaps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with monkeypatch.context() as impatient:
            impatient.setattr(waiting, "LIMIT_S", 0.02)
            with pytest.raises(AssertionError, match=f"the end of process {process.pid}"):
                waiting.until_ended([process.pid])
        process.kill()
        waiting.until_ended([process.pid])
        process.wait()
    waiting.until_ended([process.pid])
