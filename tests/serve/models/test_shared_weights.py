"""Processes of one server have a model's weights in memory once, whichever came first, loads later, or was replaced."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from onnx import helper

from trueline import serve
from trueline.bundle import Bundle, Dim, Golden, Signature, open_bundle
from trueline.runtime.onnx import OnnxSession
from trueline.serve.models.loader import RuntimeOptions, load
from trueline.torchserve.recipe_archive import archive
from worlds import bundles, servers

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 2048, 4
WEIGHT_BYTES = LAYERS * WIDTH * WIDTH * 4


def wide(out: Path, layers: int) -> Bundle:
    """`layers` square matrices, one after the other; each keeps the length of a row."""
    x, y = bundles.spec("x", "batch", WIDTH), bundles.spec("y", "batch", WIDTH)
    rng = np.random.default_rng(0)
    names = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    weights: dict[str, bundles.Array] = {
        f"w{i}": rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(np.sqrt(WIDTH))
        for i in range(layers)
    }
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    given = rng.standard_normal((2, WIDTH), dtype=np.float32)
    answer = given
    for matrix in weights.values():
        answer = answer @ matrix
    golden = [Golden(case="2", inputs={"x": given}, outputs={"y": answer.astype(np.float32)})]
    model = bundles.graph(nodes, [x], [y], weights)
    return bundles.bundle(out, model, Signature(inputs=(x,), outputs=(y,), dims={"batch": Dim()}), golden)


def memory(pids: Sequence[int]) -> int:
    """Bytes that these processes take together; a page that several have mapped counts once among them.

    Libraries aside: their share grows and shrinks with every other process on the machine that has mapped them.
    """
    found, library = 0, False
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match("[0-9a-f]+-", line):
                library = ".so" in line
            elif line.startswith("Pss:") and not library:
                found += int(line.split()[1]) * 1024
    return found


def processes(running: serve.RunningServer) -> list[int]:
    return [one.pid for one in psutil.Process(running.pid).children()]


def mapped(pid: int, folder: Path) -> int:
    """How many programs under `folder` the process has mapped; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return len(set(re.findall(rf"{re.escape(str(folder))}/(\S+)/", lines)))


@pytest.fixture(scope="module")
def wide_and_thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    wide(folder / "wide" / "1.bundle", LAYERS)
    shutil.copytree(folder / "wide" / "1.bundle", folder / "wide" / "2.bundle")
    wide(folder / "thin" / "1.bundle", 1)
    return folder


@pytest.mark.parametrize(("most", "threads"), [(0, 0), (1, 1), (3, 3)])
def test_a_run_that_is_long_takes_its_process_share_of_the_cores(
    wide_and_thin: Path, most: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    loaded = load(open_bundle(wide_and_thin / "wide" / "1.bundle"), RuntimeOptions(most_threads=most), max_batch=8)
    assert not loaded.plan.inline_values
    assert isinstance(loaded.session, OnnxSession)
    assert loaded.session._session.get_session_options().intra_op_num_threads == threads


@pytest.mark.long
def test_each_further_version_takes_its_weights_and_little_more_and_its_place_is_the_next_ones(
    wide_and_thin: Path,
) -> None:
    with servers.running(store=wide_and_thin, load="thin,wide/1.bundle", management_port=0) as running:
        one = memory([running.pid])
        assert servers.post(f"{running.management_url}/models?url=wide/2.bundle").status_code == 200
        two = memory([running.pid])
        assert two - one <= 1.2 * WEIGHT_BYTES + 2**20
        assert two - one >= WEIGHT_BYTES, "the version has a program of its own"
        assert servers.delete(f"{running.management_url}/models/wide/2").status_code == 200
        assert memory([running.pid]) - one <= 0.2 * WEIGHT_BYTES
        for _ in range(2):
            assert servers.post(f"{running.management_url}/models?url=wide/2.bundle").status_code == 200
            assert servers.delete(f"{running.management_url}/models/wide/2").status_code == 200
        assert servers.post(f"{running.management_url}/models?url=wide/2.bundle").status_code == 200
        assert memory([running.pid]) - one <= 1.2 * WEIGHT_BYTES + 2**20


@pytest.mark.long
def test_processes_have_weights_once_that_come_later_and_when_one_is_replaced(
    wide_and_thin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [0.5] * WIDTH}]}

    def answers(running: serve.RunningServer) -> set[bytes]:
        url = f"{running.url}/v2/models/wide/infer"
        return {servers.post(url, json=body).content for _ in range(12)}

    with servers.running(store=wide_and_thin, load="thin", management_port=0, processes=3) as running:
        (folder,) = tmp_path.glob("trueline-weights-*")
        before = memory(processes(running))
        assert servers.post(f"{running.management_url}/models?url=wide/1.bundle&initial_workers=1").status_code == 200
        servers.eventually(lambda: [mapped(pid, folder) for pid in processes(running)] == [2, 2, 2])
        servers.eventually(lambda: all(b'"outputs"' in answer for answer in answers(running)))
        assert memory(processes(running)) - before <= 1.4 * WEIGHT_BYTES, "three copies would be 3"
        same = answers(running)
        assert len(same) == 1

        psutil.Process(processes(running)[0]).kill()
        servers.eventually(lambda: [mapped(pid, folder) for pid in processes(running)] == [2, 2, 2])
        servers.eventually(lambda: answers(running) == same)
        assert memory(processes(running)) - before <= 1.4 * WEIGHT_BYTES

        assert len(list(folder.iterdir())) == 3, "a lock, and two programs"
        assert servers.delete(f"{running.management_url}/models/wide").status_code == 200
        servers.eventually(lambda: len(list(folder.iterdir())) == 2)
    assert not list(tmp_path.glob("trueline-weights-*"))


RECIPE = """
def model(): ...
def loss(outputs, labels): ...
def optimizer(params): ...
def dataset(mode): ...
"""


@pytest.mark.long
def test_workers_of_a_recipes_archive_have_its_weights_once_also_one_that_is_replaced(
    wide_and_thin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    archive(wide_and_thin / "wide" / "1.bundle", recipe, tmp_path / "store" / "wide.mar", any_recipe=True)
    asked = {"json": [[0.5] * WIDTH], "timeout": 120}

    def workers(running: serve.RunningServer) -> list[int]:
        described = servers.get(f"{running.management_url}/models/wide").json()[0]
        return [worker["pid"] for worker in described["workers"] if worker["status"] == "READY"]

    with serve.start(
        None, model_store=str(tmp_path / "store"), load="wide=wide.mar", allow_code=True, management_port=0
    ) as running:
        (alone,) = workers(running)
        answer = servers.post(f"{running.url}/predictions/wide", **asked).content
        copy = memory([alone])
        (weights,) = tmp_path.glob("trueline-archive-*/weights")
        assert not list(weights.iterdir()), "a lone worker writes nothing"
        assert servers.delete(f"{running.management_url}/models/wide").status_code == 200

        again = f"{running.management_url}/models?url=wide.mar&model_name=wide&initial_workers=3"
        assert servers.post(again).status_code == 200
        (weights,) = tmp_path.glob("trueline-archive-*/weights")
        three = workers(running)
        assert [mapped(pid, weights) for pid in three] == [1, 1, 1]
        assert memory(three) <= 3 * copy - 1.6 * WEIGHT_BYTES, "three copies would be three times one"
        assert {servers.post(f"{running.url}/predictions/wide", **asked).content for _ in range(6)} == {answer}

        psutil.Process(three[0]).kill()

        def replaced() -> bool:
            at_work = workers(running)  # asked once: between two questions the dead one is let go of
            return len(at_work) == 3 and three[0] not in at_work

        servers.eventually(replaced)
        assert [mapped(pid, weights) for pid in workers(running)] == [1, 1, 1]
    assert not list(tmp_path.glob("trueline-archive-*"))
