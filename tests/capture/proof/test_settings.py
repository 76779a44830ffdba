"""What is set for a process or machine is in no program: the time zone, the locale, how Python was started."""

from __future__ import annotations

import datetime
import locale
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import Unsteady, check_rare
from worlds import marks
from worlds.cases import few

LOG = logging.getLogger(__name__)


class ReadsTheHour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (datetime.datetime.fromtimestamp(0).hour + 1)  # hour


class ReadsTheZone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(time.tzname[0])  # zone


class ReadsTheHourInGreenwich(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (datetime.datetime.fromtimestamp(0, datetime.UTC).hour + 1)


class ReadsThePoint(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * ord(str(locale.localeconv()["decimal_point"]))  # point


class Collates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * ord(min("aB", key=locale.strxfrm))  # collates


class ReadsItsArguments(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(sys.argv[0])  # arguments


class ReadsItsProcess(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(multiprocessing.current_process().name)  # its process


class BranchesByOptions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if sys.flags.optimize else x * 2  # options


class BranchesByPlatform(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if sys.platform == "win32" else x * 2 if sys.platform == "linux" else x * 3  # platform


class BranchesByVersion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sys.version_info >= (3, 9) else x  # version


class BranchesByALaterVersion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sys.version_info >= (3, 40) else x  # later version


class ChoosesByVersion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if sys.version_info >= (3, 9) else x.clamp(min=0)


class CountsProcessors(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(os.sched_getaffinity(0))  # processors


class ReadsErrorStates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if np.geterr()["divide"] == "warn" else x  # error state


class PrintsATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.arange(3.0) / 7

    def forward(self, x: Tensor) -> Tensor:
        return x * len(repr(self.bias))  # prints


class PutsATensorIntoAText(PrintsATensor):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(f"{self.bias}")  # into a text


class WritesItsShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(f"{x.shape[1]:3d}")


class ReadsTheSeed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.get_rng_state()[:64].sum() % 7)  # seed of torch


class ReadsTheSeedOfPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + random.getstate()[1][1] % 1009  # seed of Python


class DebugsIts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1) if LOG.isEnabledFor(logging.DEBUG) else x  # debugs


class LogsWhatItDoes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("%s", x.shape)
        return x * 2


class AsksForAPackage(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if "no_such_package" in sys.modules else x  # package


class AsksForMemory(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # memory
        return x.round(decimals=1) if used > 10**9 else x


class AsksForTheWidth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * shutil.get_terminal_size().columns  # width


class AsksForATerminal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sys.stdout.isatty() else x  # terminal


class NamesItsStream(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sys.stderr.encoding == "ascii" else x  # stream


class WritesToItsStream(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("called", file=sys.stderr)
        return x * 2


class WritesAsTheLocaleDoes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(f"{1234567:n}")


class FormatsAsTheLocaleDoes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len("about {:.3n}".format(1234.5))  # noqa: UP032 - as a user writes it


class UsesTheDefaultDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones((), dtype=torch.get_default_dtype())


def find_unsteady(model: type[nn.Module]) -> Unsteady | None:
    torch.manual_seed(0)
    return check_rare(EagerSession(model().eval(), torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("model", "what", "mark"),
    [
        (ReadsTheHour, "the time zone", "hour"),
        (ReadsTheZone, "the time zone", "zone"),
        (ReadsThePoint, "the locale", "point"),
        (Collates, "the locale", "collates"),
        (ReadsItsArguments, "the process", "arguments"),
        (ReadsItsProcess, "the process", "its process"),
        (BranchesByOptions, "the options with which Python was started", "options"),
        (BranchesByPlatform, "the platform", "platform"),
        (BranchesByVersion, "the version of Python", "version"),
        (BranchesByALaterVersion, "the version of Python", "later version"),
        (CountsProcessors, "the machine", "processors"),
        (ReadsErrorStates, "numpy's error state", "error state"),
        (PrintsATensor, "how torch and numpy print numbers", "prints"),
        (PutsATensorIntoAText, "how torch and numpy print numbers", "into a text"),
        (ReadsTheSeed, "the seed of the process", "seed of torch"),
        (ReadsTheSeedOfPython, "the seed of the process", "seed of Python"),
        (DebugsIts, "the level of logging", "debugs"),
        (AsksForAPackage, "what is imported", "package"),
        (AsksForMemory, "the memory of the process", "memory"),
        (AsksForTheWidth, "the terminal", "width"),
        (AsksForATerminal, "the standard streams", "terminal"),
        (NamesItsStream, "the standard streams", "stream"),
    ],
)
def test_an_answer_that_follows_a_setting_of_the_process_is_refused_with_its_line(
    model: type[nn.Module], what: str, mark: str
) -> None:
    found = find_unsteady(model)
    assert found is not None
    assert f"({what}): it answers differently where that is another" in found.why
    assert marks.place_of(__file__, mark) in str(found.place)


@pytest.mark.parametrize(
    "model",
    few(
        [
            *(ReadsTheHourInGreenwich, ChoosesByVersion, UsesTheDefaultDtype, WritesItsShape, LogsWhatItDoes),
            WritesToItsStream,
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_setting_that_changes_no_answer_is_no_reason_to_refuse(model: type[nn.Module]) -> None:
    assert find_unsteady(model) is None


@pytest.mark.parametrize("model", [WritesAsTheLocaleDoes, FormatsAsTheLocaleDoes])
def test_a_number_that_is_written_as_the_locale_does_is_refused(model: type[nn.Module]) -> None:
    found = find_unsteady(model)
    assert found is not None
    assert "(the locale): it writes a number as the locale does (':n')" in found.why


def test_settings_are_afterwards_as_they_were() -> None:
    def read() -> object:
        return (
            *(time.tzname, locale.localeconv(), sys.flags, sys.argv, sys.version_info, sys.platform, np.geterr()),
            *(repr(torch.arange(3) / 7), random.getstate(), LOG.getEffectiveLevel(), id(sys.modules), os.isatty),
            *(resource.getrusage, shutil.get_terminal_size),
        )

    before = read()
    models = (ReadsTheZone, ReadsThePoint, BranchesByOptions, ReadsItsArguments, BranchesByVersion, PrintsATensor)
    more = (ReadsTheSeed, ReadsTheSeedOfPython, DebugsIts, AsksForAPackage, AsksForMemory, AsksForTheWidth)
    for model in (*models, *more):
        find_unsteady(model)
    assert read() == before


def test_a_time_zone_of_the_users_own_is_the_same_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    find_unsteady(ReadsTheZone)
    assert os.environ["TZ"] == "UTC"


class RecordsWarnings(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(record=True) as seen:  # recorded
            warnings.warn("called", stacklevel=1)
        return x * 2 if seen else x


class RaisesWarnings(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        except DeprecationWarning:
            return x * 2
        return x


class Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("called", stacklevel=1)
        return x * 2


class CallsItselfToTheEnd(nn.Module):
    def dive(self, depth: int) -> int:
        try:
            return self.dive(depth + 1)
        except RecursionError:
            return depth

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.dive(0) > 500 else x


class MeasuresItsStream(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sys.stdout.tell() > 10**6 else x  # measured


class NamesAZone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if time.tzname[0] in ("PST", "PDT") else x  # named zone


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (RecordsWarnings, "what is done with warnings"),
        (RaisesWarnings, "what is done with warnings"),
        (CallsItselfToTheEnd, "the depth of calls"),
        (MeasuresItsStream, "the standard streams"),
        (NamesAZone, "the time zone"),
    ],
)
def test_what_is_seldom_otherwise_in_another_process_is_found(model: type[nn.Module], what: str) -> None:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("ignore")
        found = find_unsteady(model)
    assert found is not None
    assert f"({what}): it answers differently where that is another" in found.why


def test_a_warning_that_decides_nothing_is_no_reason_to_refuse() -> None:
    assert find_unsteady(Warns) is None
