"""A request with more rows than a run may have: cut, fair to others, and answered as if it ran whole."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.errors import DeadlineExceeded
from trueline.serve.batching.pieces import cut
from trueline.serve.batching.policy import Policy
from trueline.serve.models.servable import Loaded
from trueline.serve.models.version import ProgramVersion
from worlds import bundles, servers


class Seen:
    """Remembers the rows of each run."""

    format = "onnx"

    def __init__(self, session: Any) -> None:
        self._session, self.signature = session, session.signature
        self.rows: list[int] = []

    def run(self, inputs: Any) -> dict[str, Any]:
        self.rows.append(len(inputs["x"]))
        found: dict[str, Any] = self._session.run(inputs)
        return found


def version(folder: Path, loop: asyncio.AbstractEventLoop, pool: ThreadPoolExecutor, **plan: Any) -> ProgramVersion:
    loaded = servers.load_as_if(bundles.double_plus(folder / "b"), 1e-3)
    loaded = replace(loaded, session=Seen(loaded.session), plan=replace(loaded.plan, **({"max_batch": 8} | plan)))
    made = ProgramVersion(model="tiny", version="1")
    made.make_ready(loaded, Policy(batch=loaded.plan.batch, max_batch=8), pool, loop)
    return made


def rows_of(made: ProgramVersion) -> list[int]:
    seen = made.loaded.session
    assert isinstance(seen, Seen)
    return seen.rows


def play(folder: Path, scene: Any, **plan: Any) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(2) as pool:
            await scene(version(folder, asyncio.get_running_loop(), pool, **plan))

    asyncio.run(main())


def test_a_request_of_any_rows_never_runs_more_than_the_largest_batch_at_once(tmp_path: Path) -> None:
    async def scene(made: ProgramVersion) -> None:
        x = np.arange(300, dtype=np.float32).reshape(100, 3)
        outputs = await made.ask({"x": x})  # type: ignore[misc]
        np.testing.assert_array_equal(outputs["y"], 2 * x + 1)
        assert max(rows_of(made)) <= 8
        assert sum(rows_of(made)) == 100

    play(tmp_path, scene)


def test_no_short_request_runs_more_rows_on_the_loop_either(tmp_path: Path) -> None:
    async def scene(made: ProgramVersion) -> None:
        for rows in (8, 9, 33):
            answer = made.ask({"x": np.ones((rows, 3), np.float32)})
            outputs = answer if isinstance(answer, dict) else await answer
            assert outputs["y"].shape == (rows, 3)
        assert max(rows_of(made)) <= 8

    play(tmp_path, scene, inline_values=10_000)


def test_a_request_that_came_later_does_not_wait_for_all_pieces(tmp_path: Path) -> None:
    async def scene(made: ProgramVersion) -> None:
        order: list[str] = []
        large = made.ask({"x": np.ones((8 * 64 * 20, 3), np.float32)})
        small = made.ask({"x": np.ones((1, 3), np.float32)})
        assert isinstance(large, asyncio.Future)
        assert isinstance(small, asyncio.Future)
        large.add_done_callback(lambda _: order.append("large"))
        small.add_done_callback(lambda _: order.append("small"))
        await asyncio.gather(large, small)
        assert order == ["small", "large"]

    play(tmp_path, scene)


def test_a_version_retires_after_the_last_piece(tmp_path: Path) -> None:
    async def scene(made: ProgramVersion) -> None:
        large = made.ask({"x": np.ones((2000, 3), np.float32)})
        await made.retire()
        outputs = await large  # type: ignore[misc]
        assert outputs["y"].shape == (2000, 3)

    play(tmp_path, scene)


def test_a_withdrawn_or_late_request_stops_with_the_piece_that_runs(tmp_path: Path) -> None:
    async def scene(made: ProgramVersion) -> None:
        withdrawn = made.ask({"x": np.ones((8 * 64 * 50, 3), np.float32)})
        assert isinstance(withdrawn, asyncio.Future)
        withdrawn.cancel()
        late = made.ask({"x": np.ones((8 * 64 * 50, 3), np.float32)}, timeout_s=0.0)
        with pytest.raises(DeadlineExceeded):
            await late  # type: ignore[misc]
        ran = rows_of(made)
        await made.retire()
        assert sum(ran) < 8 * 64 * 50

    play(tmp_path, scene)


@given(units=st.integers(1, 500), most=st.integers(1, 64), step=st.integers(1, 8))
def test_pieces_are_as_equal_as_they_can_be_and_never_too_large(units: int, most: int, step: int) -> None:
    sizes = cut(units * step, most, step)
    assert sum(sizes) == units * step
    assert all(size % step == 0 for size in sizes)
    assert max(sizes) <= max(most, step)
    assert max(sizes) - min(sizes) <= step


def test_loaded_bundles_have_bounds_from_their_golden_records(tmp_path: Path) -> None:
    loaded: Loaded = servers.load_as_if(bundles.double_plus(tmp_path / "b"), 1e-3)
    assert loaded.plan.cuts
    assert (loaded.bounds.row_symbol, loaded.bounds.rows, dict(loaded.bounds.sizes)) == ("batch", None, {})
