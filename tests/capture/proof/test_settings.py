"""What is set for a process or machine is in no program: the time zone, the locale, how Python was started."""

from __future__ import annotations

import datetime
import locale
import multiprocessing
import os
import sys
import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import Unsteady, check_rare
from worlds import marks


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


class ChoosesByVersion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if sys.version_info >= (3, 9) else x.clamp(min=0)


class CountsProcessors(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(os.sched_getaffinity(0))  # processors


class ReadsErrorStates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if np.geterr()["divide"] == "warn" else x  # error state


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
        (CountsProcessors, "the machine", "processors"),
        (ReadsErrorStates, "numpy's error state", "error state"),
    ],
)
def test_an_answer_that_follows_a_setting_of_the_process_is_refused_with_its_line(
    model: type[nn.Module], what: str, mark: str
) -> None:
    found = find_unsteady(model)
    assert found is not None
    assert f"({what}): it answers differently where that is another" in found.why
    assert marks.place_of(__file__, mark) in str(found.place)


@pytest.mark.parametrize("model", [ReadsTheHourInGreenwich, ChoosesByVersion, UsesTheDefaultDtype])
def test_a_setting_that_changes_no_answer_is_no_reason_to_refuse(model: type[nn.Module]) -> None:
    assert find_unsteady(model) is None


def test_settings_are_afterwards_as_they_were() -> None:
    def read() -> object:
        return time.tzname, locale.localeconv(), sys.flags, sys.argv, sys.version_info, sys.platform, np.geterr()

    before = read()
    for model in (ReadsTheZone, ReadsThePoint, BranchesByOptions, ReadsItsArguments, BranchesByVersion):
        find_unsteady(model)
    assert read() == before
