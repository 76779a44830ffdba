"""An iterator, a file or a cursor gives another value at each call: an answer that depends on it is found, whatever
the kind of its values, and though its first thousands are equal."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
import sqlite3
import struct
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trueline.capture.model import streams
from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import Unsteady, check_rare, check_twice
from trueline.capture.time_limit import TimeLimit
from worlds import marks
from worlds.cases import few

LATE = 20_000
"""Values that are equal before the first other one."""


class TakesNext(nn.Module):
    """Multiplies by what it is given."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def take(self) -> Any:
        return next(self.stream)

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.take())


class Sends(TakesNext):
    """A size, of which the generator keeps the largest."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        next(stream)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.stream.send(x.shape[1])


class TakesText(TakesNext):
    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch, next(self.stream))(x)


class TakesFirst(TakesNext):
    def take(self) -> Any:
        return next(self.stream)[0]


class TakesGroup(TakesNext):
    def take(self) -> Any:
        return next(self.stream).group()


class TakesColumn(TakesNext):
    def take(self) -> Any:
        return next(self.stream)["a"]


class TakesLine(TakesNext):
    def take(self) -> Any:
        return self.stream.readline()


class TakesTensor(TakesNext):
    def forward(self, x: Tensor) -> Tensor:
        return x + next(self.stream)[0]


class CallsNext(TakesNext):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = next(self.stream)(x)
        return result


class TakesOrEnds(TakesNext):
    def forward(self, x: Tensor) -> Tensor:
        return x if next(self.stream, None) is None else x * 2


class ComparesNext(TakesNext):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.stream.read(2) == b"\0\1" else x * 2


class NamesItsCalls(TakesNext):
    """For a log, which changes no answer."""

    def forward(self, x: Tensor) -> Tensor:
        self.name = f"call {next(self.stream)}"
        return x * 2


NUMBERS = [1.0] * LATE + [2.0]
TEXTS = ["relu"] * LATE + ["tanh"]


def make_generator(values: list[Any]) -> Iterator[Any]:
    yield from values


OPENED: list[IO[Any]] = []


@pytest.fixture(autouse=True)
def files_are_closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def keep_largest() -> Generator[int, int, None]:
    largest = 1
    while True:
        largest = max(largest, (yield largest))


def open_file(path: Path, mode: str) -> Any:
    OPENED.append(path.open(mode))
    return OPENED[-1]


def open_lines(folder: Path) -> Any:
    (folder / "lines").write_text("1\n" * LATE + "2\n")
    return open_file(folder / "lines", "r")


def select_rows() -> sqlite3.Cursor:
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table rows(n)")
    base.executemany("insert into rows values(?)", [(1,)] * 500)
    return base.execute("select n from rows")


CASES: dict[str, tuple[type[TakesNext], Callable[[Path], Any]]] = {
    "struct": (TakesFirst, lambda _: struct.iter_unpack("B", bytes([1] * LATE + [2]))),
    "csv": (TakesFirst, lambda _: csv.reader(["1"] * LATE + ["2"])),
    "csv of names": (TakesColumn, lambda _: csv.DictReader(["a"] + ["1"] * LATE)),
    "map": (TakesNext, lambda _: map(int, "1" * LATE + "2")),
    "map of a generator": (TakesNext, lambda _: map(float, make_generator(NUMBERS))),
    "filter": (TakesNext, lambda _: filter(None, NUMBERS)),
    "zip": (TakesFirst, lambda _: zip(NUMBERS, itertools.repeat("a"), strict=False)),
    "enumerate": (TakesFirst, lambda _: enumerate(itertools.repeat(1), 1)),
    "groups": (TakesFirst, lambda _: itertools.groupby(range(1, LATE))),
    "texts": (TakesText, lambda _: iter(TEXTS)),
    "texts of a generator": (TakesText, lambda _: make_generator(TEXTS)),
    "texts in turn": (TakesText, lambda _: itertools.cycle(TEXTS)),
    "functions": (CallsNext, lambda _: iter([torch.relu] * LATE + [torch.tanh])),
    "matches": (TakesGroup, lambda _: re.finditer(r"\d", "1" * LATE + "2")),
    "an array": (TakesNext, lambda _: np.array(NUMBERS).flat),
    "an array by nditer": (TakesNext, lambda _: np.nditer(np.array(NUMBERS))),
    "a file": (TakesNext, open_lines),
    "lines of a file": (TakesLine, open_lines),
    "a map of a file": (TakesNext, lambda folder: map(float, open_lines(folder))),
    "lines of a text": (TakesLine, lambda _: io.StringIO("1\n" * LATE + "2\n")),
    "bytes of a device": (ComparesNext, lambda _: open_file(Path("/dev/urandom"), "rb")),
    "rows": (TakesFirst, lambda _: select_rows()),
    "a loader": (TakesTensor, lambda _: iter(DataLoader(TensorDataset(torch.ones(500, 4))))),
    "what is sent": (Sends, lambda _: keep_largest()),
    "an end": (TakesOrEnds, lambda _: iter(range(LATE))),
}


def find_unsteady(model: nn.Module) -> Unsteady | None:
    return check_rare(EagerSession(model.eval(), torch.ones(3, 4)))


@pytest.mark.parametrize("name", CASES)
def test_what_an_iterator_or_a_file_gives_later_is_a_state(name: str, tmp_path: Path) -> None:
    kind, make = CASES[name]
    found = find_unsteady(kind(make(tmp_path)))
    assert found is not None
    assert "keeps a state in the Python attribute stream: it answers differently when " in found.why


@pytest.mark.parametrize(
    "make", few([itertools.count, lambda: map(str, itertools.count()), lambda: iter(TEXTS)], 1, pytest.mark.jobs)
)
def test_values_that_only_name_a_call_are_no_reason_to_refuse(make: Callable[[], Any]) -> None:
    assert find_unsteady(NamesItsCalls(make())) is None


def test_a_file_to_write_into_and_an_iterator_that_nothing_asks_do_no_harm(tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = open_file(tmp_path / "log", "w")
            self.rows = csv.reader(["1", "2"])

        def forward(self, x: Tensor) -> Tensor:
            self.log.write("called\n")
            return x * 2

    assert find_unsteady(Writes()) is None


def test_the_place_of_an_iterator_is_read_through_those_that_it_takes_from() -> None:
    numbers = iter([1, 2, 3])
    doubled = map(float, filter(None, numbers))
    before = streams.find_position(doubled)
    next(doubled)
    assert streams.find_position(doubled) != before
    assert not streams.hides_place(doubled)
    assert streams.hides_place(map(float, io.StringIO("1\n2\n")))


class CountsHits(nn.Module):
    """Of its cache, which no attribute shows."""

    def __init__(self) -> None:
        super().__init__()

        @functools.lru_cache
        def scale(width: int) -> float:
            return float(width)

        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale(x.shape[1])
        return y if self.scale.cache_info().hits < 5000 else -y  # hits


class LooksAtItsCache(CountsHits):
    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale(x.shape[1])
        self.note = f"{self.scale.cache_info().currsize} widths"
        return y


def test_a_count_of_a_cache_is_a_state_where_it_decides() -> None:
    found = find_unsteady(CountsHits())
    assert found is not None
    assert "(scale.cache_info)" in found.why or "attribute scale.cache_info:" in found.why
    assert marks.place_of(__file__, "hits") in str(found.place)
    assert find_unsteady(LooksAtItsCache()) is None


class AsksABase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = sqlite3.connect(":memory:")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.base.execute("select 2").fetchone()[0]  # of one thread


def test_a_model_that_answers_in_one_thread_alone_is_refused_in_words() -> None:
    eager = EagerSession(AsksABase().eval(), torch.ones(3, 4))
    found = TimeLimit().run("the first calls of the model", lambda: check_twice(eager))
    assert found is not None
    assert (
        "answers its example once, and raises ProgrammingError when it is called again, in another thread" in found.why
    )
    assert marks.place_of(__file__, "of one thread") in str(found.place)
    assert "threads of its own" in found.hint
