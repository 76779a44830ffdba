"""One of torch's operators as a model: the expression, its constants, and the recipe file that calls it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

inf, nan = float("inf"), float("nan")
"""
TAIL = """\
def as_called(batch):
    return batch["x"]


def model():
    torch.manual_seed(0)
    return Model().eval()


def examples():
    for size in SIZES:
        rows = torch.arange(size) % len(SAMPLE)
        yield as_called({"x": SAMPLE[rows].clone()})


def loss(outputs, labels):
    raise NotImplementedError


def optimizer(params):
    raise NotImplementedError


def dataset(mode):
    raise NotImplementedError
"""
END = """
def read(y):
    \"\"\"The tensors of an answer; complex ones as two real numbers.\"\"\"
    parts = [y] if isinstance(y, torch.Tensor) else list(y)
    return [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts]
"""


@dataclass(frozen=True)
class OperatorCase:
    name: str
    """As torch's list has it, with the variant and the number of the sample."""
    expression: str
    """Python of `x` and the constants `C0`, `C1`, ...; `M(...)` calls the module."""
    sample: str
    """Python of the example: its first axis is the batch."""
    field: str
    """The input as `subject.draw` knows it."""
    sizes: tuple[int, ...]
    """Of the batches that examples() yields."""
    constants: tuple[str, ...] = ()
    module: str = ""
    """Python of the module, where it is one."""

    @property
    def group(self) -> tuple[object, ...]:
        """Operators with one group can be asked in one model."""
        return self.sample, self.field, self.sizes

    @property
    def one_by_one(self) -> bool:
        """Whether the operator takes no batch."""
        return self.expression.startswith("torch.stack([(lambda x:")

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def read_case(record: dict[str, Any]) -> OperatorCase:
    """From JSON."""
    return OperatorCase(**{**record, "sizes": tuple(record["sizes"]), "constants": tuple(record["constants"])})


def source(cases: Sequence[OperatorCase]) -> str:
    """The recipe file of a model that calls each of `cases` with its one input."""
    first = cases[0]
    init, lines = [], []
    for at, case in enumerate(cases):
        if case.module:
            init.append(f"self.m{at} = {case.module}")
        for number, literal in enumerate(case.constants):
            init.append(f'self.register_buffer("c{at}_{number}", {literal})')
        text = re.sub(r"\bC(\d+)\b", rf"self.c{at}_\1", case.expression)
        text = re.sub(r"\bM\(", f"self.m{at}(", text)
        lines.append(f"found += read({text})")
    body = [
        HEAD,
        f"SAMPLE = {first.sample}",
        f"SIZES = {first.sizes!r}",
        f'INPUTS = {{"x": {first.field!r}}}',
        END,
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in init),
        "",
        "    def forward(self, x):",
        "        found = []",
        *(f"        {line}" for line in lines),
        "        return found[0] if len(found) == 1 else tuple(found)",
        "",
        "",
        TAIL,
    ]
    return "\n".join(body)
