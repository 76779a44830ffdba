"""What another process or machine computes otherwise is in no program: a hash, an identity, the order of a set."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.capture.proof.determinism import Unsteady, check_rare
from worlds import marks
from worlds.cases import few


class Config(NamedTuple):
    names: set[str]
    width: int


class HashesAText(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (hash("salt") % 5 + 1)  # hash of a text


class HashesNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (hash((3, x.shape[1])) % 5 + 1)


class ReadsItsIdentity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (id(self) % 7 + 1)  # identity


class KeysByIdentity(nn.Module):
    """An identity as a key, of which nothing but the place in a table depends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norms: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = id(self.layer)
        if key not in self.norms:
            self.norms[key] = float(self.layer.weight.norm())
        found: Tensor = self.layer(x) / self.norms[key]
        return found


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Linear(4, 2) for name in ("age", "size", "kind")})
        self.names = {"age", "size", "kind"}

    def join(self, x: Tensor, names: Iterable[str]) -> Tensor:
        return torch.cat([self.towers[name](x) for name in names], 1)  # in that order


class InTheOrderOfASet(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, set(self.towers) - {"size"})


class InTheOrderOfAKeptSet(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.names)


class InTheOrderOfALiteral(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, {"age", "kind"})


class InTheOrderOfAComprehension(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, {name.lower() for name in ("AGE", "KIND")})


class InTheOrderOfASetInAPartial(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.pick = functools.partial(list, {"age", "size", "kind"})

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.pick())  # partial


class LoopsOverALiteral(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for name in {"a", "bbb", "cc"}:  # a literal
            parts.append(x * len(name))
        return torch.cat(parts, 1)


class InTheOrderOfKeys(Towers):
    def forward(self, x: Tensor) -> Tensor:
        widths = {"age": 1, "kind": 2, "size": 3}
        return self.join(x, widths.keys() - {"size"})


class InTheOrderOfListedSets(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.groups = [{"age", "kind"}, {"size"}]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.join(x, group) for group in self.groups], 1)


class InTheOrderOfASetInATuple(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config(names={"age", "kind"}, width=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.config.names)


class InTheOrderOfADefault(Towers):
    def choose(self, x: Tensor, names: Iterable[str] = frozenset({"age", "kind"})) -> Tensor:
        return self.join(x, names)

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(x)


class InTheOrderOfKeptKeys(Towers):
    def forward(self, x: Tensor) -> Tensor:
        names: Any = {"age": 1, "kind": 2, "size": 3}.keys()
        names &= ("age", "kind", "size")
        return self.join(x, names)


CHOSEN = (lambda: {"age", "kind"}), (lambda: {"size"})  # on one line


class InTheOrderOfTheFirstLambda(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, [*CHOSEN[0](), *CHOSEN[1]()])  # the first set


class SortsByHash(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, sorted(self.towers, key=hash))  # by hash


class AsksALiteral(Towers):
    def forward(self, x: Tensor) -> Tensor:
        names = {"age", "size"}
        return self.join(x, [name for name in self.towers if name in names or name in {"kind", "size"}])


class SortsALiteral(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, sorted({"age", "kind"} | {"size"}))


class LoopsOverNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * number for number in {3, 1, 2}], 1)


class InOrder(Towers):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.names, set)
        assert set(self.towers) == self.names | set()
        return self.join(x, sorted(self.names))


class Sums(Towers):
    """Sums in another order differ in their last digits alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.towers[name](x) for name in self.names]).sum(0)


class CountsProcesses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (os.getpid() % 3 + 1)  # process


class ReadsItsFolder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (len(os.getcwd()) % 7 + 1)  # folder


class BranchesByMachine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if platform.system() == "Linux" else x * 3  # machine


class CountsReferences(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if sys.getrefcount(x) > 1_000 else x  # references


class ReadsItsNode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (uuid.getnode() % 7 + 1)  # node


class AsksForDeterminism(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x  # determinism


class NamesTheProcessor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(torch.backends.cpu.get_cpu_capability())  # processor


class LooksAtItsCaller(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        return x * 2 if caller.f_code.co_name == "serve" else x  # type: ignore[union-attr]  # caller


class LooksThroughTheStack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if any("gunicorn" in one.filename for one in inspect.stack()) else x  # stack


class CountsItsCallers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        frame, count = sys._getframe(), 0  # callers
        while frame.f_back is not None:
            frame, count = frame.f_back, count + 1
        return x * count


class NamesItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        name = inspect.currentframe().f_code.co_name  # type: ignore[union-attr]
        return x * 2 if name == "forward" else x


class BeginsAsTheHostDoes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if socket.gethostname().startswith("gpu-") else x  # host


class InAFolder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if os.getcwd().split("/")[-1] == "production" else x  # in a folder


class ChoosesByMachine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if platform.machine() == "x86_64" else x.clamp(min=0)


def find_unsteady(model: type[nn.Module]) -> Unsteady | None:
    torch.manual_seed(0)
    return check_rare(EagerSession(model().eval(), torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("model", "what", "mark"),
    few(
        [
            (HashesAText, "hash", "hash of a text"),
            (ReadsItsIdentity, "id", "identity"),
            (InTheOrderOfASet, "the order of a set", "in that order"),
            (InTheOrderOfAKeptSet, "the order of a set", "in that order"),
            (InTheOrderOfALiteral, "the order of a set", "in that order"),
            (InTheOrderOfAComprehension, "the order of a set", "in that order"),
            (InTheOrderOfKeys, "the order of a set", "in that order"),
            (LoopsOverALiteral, "the order of a set", "a literal"),
            (InTheOrderOfASetInAPartial, "the order of a set", "partial"),
            (InTheOrderOfListedSets, "the order of a set", "in that order"),
            (InTheOrderOfASetInATuple, "the order of a set", "in that order"),
            (InTheOrderOfADefault, "the order of a set", "in that order"),
            (InTheOrderOfKeptKeys, "the order of a set", "in that order"),
            (InTheOrderOfTheFirstLambda, "the order of a set", "the first set"),
            (SortsByHash, "hash", "by hash"),
            (CountsProcesses, "getpid", "process"),
            (ReadsItsFolder, "getcwd", "folder"),
            (BranchesByMachine, "system", "machine"),
            (ReadsItsNode, "getnode", "node"),
            (AsksForDeterminism, "are_deterministic_algorithms_enabled", "determinism"),
            (NamesTheProcessor, "get_cpu_capability", "processor"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_an_answer_that_follows_the_process_or_the_machine_is_refused_with_its_line(
    model: type[nn.Module], what: str, mark: str
) -> None:
    found = find_unsteady(model)
    assert found is not None
    assert f"({what}): it answers differently in another process or on another machine" in found.why
    assert marks.place_of(__file__, mark) in str(found.place)


class TypedClock(nn.Module):
    """Accepts no number that is more than a float."""

    def forward(self, x: Tensor) -> Tensor:
        now = time.time()  # typed clock
        return x * 2 if type(now) is float and now > 4e9 else x


class ReadsEntropy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with open("/dev/urandom", "rb") as file:  # entropy
            return x * 2 if file.read(4) == b"rare" else x


class DrawsARareNumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if secrets.randbelow(10**9) == 0 else x  # rare number


class DrawsRareBytes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if int.from_bytes(os.urandom(8), "big") == 0 else x  # rare bytes


class ComparesAVariable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if os.environ.get("TRUELINE_TEST_MODE") == "sevenfold" else x  # variable


class GoesThroughVariables(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if any(name.startswith("TRUELINE_TEST_MODE_") for name in os.environ) else x  # variables


class CopiesTheEnvironment(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if dict(os.environ).get("TRUELINE_TEST_MODE") == "sevenfold" else x  # copy


@pytest.mark.parametrize(
    ("model", "words", "mark"),
    [
        (LooksAtItsCaller, r"\(currentframe\): it answers differently when what depends on that", "caller"),
        (LooksThroughTheStack, r"\(stack\): it answers differently when what depends on that", "stack"),
        (CountsItsCallers, r"\(_getframe\): it answers differently where another calls it", "callers"),
        (BeginsAsTheHostDoes, r"\(gethostname\): it answers differently when what depends on that", "host"),
        (InAFolder, r"\(getcwd\): it answers differently when what depends on that", "in a folder"),
        (CountsReferences, r"\(getrefcount\): it answers differently when what depends on that", "references"),
        (TypedClock, r"\(time\): it answers differently at another time", "typed clock"),
        (ReadsEntropy, r"\(/dev/urandom\): it reads that file on each call", "entropy"),
        (DrawsARareNumber, r"\(randbelow.*\), and it answers differently when what depends on that", "rare number"),
        (DrawsRareBytes, r"\(urandom\), and it answers differently when another number is drawn", "rare bytes"),
        (ComparesAVariable, r"TRUELINE_TEST_MODE\): it answers differently when that is 'sevenfold'", "variable"),
        (GoesThroughVariables, r"TRUELINE_TEST_MODE_\): it answers differently when", "variables"),
        (CopiesTheEnvironment, r"TRUELINE_TEST_MODE\): it answers differently when that is 'sevenfold'", "copy"),
    ],
)
def test_what_is_read_outside_is_refused_with_its_line(model: type[nn.Module], words: str, mark: str) -> None:
    before = dict(os.environ)
    found = find_unsteady(model)
    assert found is not None
    assert re.search(words, found.why)
    assert marks.place_of(__file__, mark) in str(found.place)
    assert dict(os.environ) == before


@pytest.mark.jobs
@pytest.mark.parametrize(
    "model",
    [
        *(HashesNumbers, KeysByIdentity, InOrder, Sums, ChoosesByMachine, AsksALiteral, SortsALiteral),
        *(LoopsOverNumbers, NamesItself),
    ],
)
def test_what_is_the_same_everywhere_is_no_reason_to_refuse(model: type[nn.Module]) -> None:
    assert find_unsteady(model) is None


class AsksForAVersion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if importlib.metadata.version("numpy") > "1" else x


def test_which_packages_are_installed_is_no_file_that_a_model_reads() -> None:
    assert find_unsteady(AsksForAVersion) is None


def test_a_replayed_call_that_reads_a_wrong_address_ends_at_once() -> None:
    code = "from trueline.capture.proof.surroundings.elsewhere_script import become_another; become_another(); "
    done = subprocess.run([sys.executable, "-c", code + "import ctypes; ctypes.string_at(8)"], timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV
