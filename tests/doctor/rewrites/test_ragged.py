"""What is computed of a part, or of what a list holds so far, is computed of the whole with a mask and is the same."""

from __future__ import annotations

import ast
import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trueline.capture.model.eager import EagerSession
from trueline.doctor.api import calls_of
from trueline.doctor.patch import patch_module
from trueline.doctor.rewrites.scope import Scope
from trueline.doctor.rewrites.tensors.ragged import NoRule, Traced, Tracer
from trueline.doctor.survey import survey

pytestmark = pytest.mark.slow
WITH_MASK = "and what is computed of it are of the whole, with a mask"
TABLE = "is a table with a mask"


class Attends(nn.Module):
    """Inside each record, without its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, n in enumerate(lengths.tolist()):
            s = x[i, :n]
            w = torch.softmax(self.q(s) @ self.k(s).t() / 4**0.5, -1)
            out[i, :n] = w @ self.v(s)
        return out


class Pools(nn.Module):
    """A weight for each step, the weighted sum, the mean, and the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = []
        for i in range(x.size(0)):
            n = int(lengths[i])
            part = x[i, :n]
            weight = self.score(part).squeeze(-1).softmax(0)
            centred = part - part.mean(0, keepdim=True)
            rows.append(torch.cat([(weight[:, None] * part).sum(0), (centred * centred).mean(0), part[-1]]))
        return torch.stack(rows)


class SumsOfAll(nn.Module):
    """From the end of each record on: turning a part around has no rule."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, n in enumerate(lengths.tolist()):
            part = x[i, :n]
            out[i, :n] = part.flip(0).cumsum(0)
        return out


class Renames(nn.Module):
    """The part is of what the name held before."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = []
        for n in lengths.tolist():
            part = x[0, :n]
            x = torch.where(x > 1e6, x * 2, x)
            out.append(torch.softmax(part, 0).sum(0) + (part @ part.t()).mean(0).sum(0, keepdim=True))
        return torch.stack(out)


class Padded(nn.Module):
    """Records that are normed by themselves, and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        cut = [row[:n] for row, n in zip(x, lengths.tolist(), strict=False)]
        cut = [self.f(one - one.mean(0, keepdim=True)) for one in cut]
        return nn.utils.rnn.pad_sequence(cut, padding_value=-1.0)


class Best(nn.Module):
    """The rows of the best, record by record: torch takes equal scores in an order of its own, and ONNX in another."""

    def forward(self, x: Tensor) -> Tensor:
        _, at = x.sum(-1).topk(2, 1)
        return torch.stack([rows[places] for rows, places in zip(x, at, strict=True)])


class Spreads(nn.Module):
    """Which nodes an adjacency reaches; it has to be square, and torch broadcasts it at sizes 1 and n."""

    def forward(self, x: Tensor) -> Tensor:
        linked = (x > 0) | (x > 0).t()
        reached = torch.zeros(x.shape[0], dtype=torch.bool)
        reached[0] = True
        front = reached.clone()
        while front.any():
            front = linked[front].any(0) & ~reached
            reached = reached | front
        return reached


class Decodes(nn.Module):
    """Token by token, over lists of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys, values, out = [], [], []
        for t in range(x.size(1)):
            token = x[:, t]
            keys.append(self.k(token))
            values.append(self.v(token))
            k, v = torch.stack(keys, 1), torch.stack(values, 1)
            scores = (k @ self.q(token)[..., None]).squeeze(-1) / math.sqrt(4)
            out.append((scores.softmax(-1)[..., None] * v).sum(1))
        return torch.stack(out, 1)


class Remembers(nn.Module):
    """Each step attends over the states before it."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        states: list[Tensor] = []
        for t in range(x.size(1)):
            q = self.q(x[:, t])
            if states:
                past = torch.stack(states, 1)
                w = torch.softmax((past @ q[..., None])[..., 0], -1)
                h = torch.tanh(q + (w[..., None] * past).sum(1))
            else:
                h = torch.tanh(q)
            states.append(h)
        return torch.stack(states, 1)


class Filters(nn.Module):
    """A Kalman filter, whose steps take views of the model's own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        self.noise = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        m = torch.stack([x[:, 0, 0], torch.zeros_like(x[:, 0, 0])], -1)
        p = torch.eye(2).expand(x.size(0), 2, 2)
        track = []
        for t in range(x.size(1)):
            m, p = m @ self.a.T, self.a @ p @ self.a.T + 0.1 * torch.eye(2)
            gain = p[:, :, 0] / (p[:, 0, 0] + self.noise)[:, None]
            m = m + gain * (x[:, t, 0] - m[:, 0])[:, None]
            p = p - gain[:, :, None] * p[:, :1]
            track.append(m)
        return torch.stack(track, 1)


class Edits(nn.Module):
    """The edit distance to the record in the other order, row by row of the table."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x[..., 0] > 0).long(), (x[..., 1] > 0).long()
        before = torch.arange(b.shape[1] + 1).expand(a.shape[0], -1)
        for i in range(a.shape[1]):
            row = [torch.full((a.shape[0],), i + 1)]
            for j in range(b.shape[1]):
                changed = before[:, j] + (a[:, i] != b[:, j]).long()
                row.append(torch.minimum(torch.minimum(before[:, j + 1] + 1, row[-1] + 1), changed))
            before = torch.stack(row, 1)
        return before[:, -1].float()


def steps_and_edited(model: nn.Module, *inputs: Tensor) -> tuple[str, nn.Module]:
    """Steps of the rewrite of `model`, and the model with it."""
    given = inputs if len(inputs) > 1 else inputs[0]
    eager = EagerSession(copy.deepcopy(model).eval(), given, dynamic_shapes={"x": {1: "length"}})
    found = survey(model.eval(), calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = found.rows["(model)"]
    return " ".join(row.rewrite.steps if row.rewrite else ()), patch_module(model, found.texts)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("kind", "words"), [(Attends, WITH_MASK), (Pools, "is a scan"), (Padded, "records are padded")]
)
def test_what_is_computed_of_a_part_sees_nothing_beyond_it(kind: type[nn.Module], words: str) -> None:
    torch.manual_seed(0)
    model, lengths = kind(), torch.tensor([5, 2, 1])
    steps, edited = steps_and_edited(model, torch.randn(3, 5, 4), lengths)
    assert words in steps
    for x, counts in ((torch.randn(3, 5, 4), lengths), (torch.randn(2, 9, 4), torch.tensor([4, 9]))):
        beyond = torch.arange(x.shape[1])[None, :, None] >= counts[:, None, None]
        for filled in (x, x.masked_fill(beyond, torch.nan), x.masked_fill(beyond, 1e20)):
            with torch.no_grad():
                torch.testing.assert_close(edited(filled, counts), model(filled, counts))


def test_a_part_without_a_rule_for_all_that_is_computed_of_it_is_left_as_it_is() -> None:
    steps, _ = steps_and_edited(SumsOfAll(), torch.randn(3, 5, 4), torch.tensor([5, 2, 1]))
    assert WITH_MASK not in steps


@pytest.mark.long
@pytest.mark.parametrize(("kind", "words"), [(Decodes, TABLE), (Remembers, TABLE), (Filters, "scan"), (Edits, "scan")])
def test_a_loop_over_time_answers_at_every_length_as_a_scan(kind: type[nn.Module], words: str) -> None:
    torch.manual_seed(0)
    model = kind()
    steps, edited = steps_and_edited(model, torch.randn(3, 5, 4))
    assert words in steps
    for shape in ((3, 5, 4), (1, 2, 4), (2, 9, 4), (4, 1, 4)):
        x = torch.randn(*shape)
        with torch.no_grad():
            torch.testing.assert_close(edited(x), model(x))


W = torch.randn(4, 4)
ROW = torch.randn(4)
RULES = [
    "s.sum(0)", "s.mean(0, keepdim=True)", "s.prod(0)", "s.mean(1)", "s.amax(-1)", "s.softmax(0)", "s.log_softmax(-1)",
    "torch.softmax(s @ s.t(), -1) @ s", "s.t() @ s", "(s @ w).tanh() - row", "s - s.mean(0)", "s * s.sum(1)[:, None]",
    "s[-1]", "s[:, 2]", "s[..., 1].sum(0)", "s.transpose(0, 1).sum(1)",
    "(s.unsqueeze(0) - s.unsqueeze(1)).abs().sum(-1)", "(s[:, None] * s[None]).sum(0)",
    "s.mT.softmax(-1) @ s", "torch.where(s > 0, s, -s).cumsum(0)", "s.T.mean(1) / len(s)", "s @ row", "-s.size(0) * s",
]  # fmt: skip
NO_RULES = [
    "s.flip(0)",
    "s.amax(0)",
    "s.sort(0).values",
    "s @ torch.ones(3)",
    "s + torch.ones(3, 1)",
    "torch.cat([s, s])",
]


@pytest.mark.parametrize("text", RULES)
def test_a_rule_gives_of_the_whole_what_the_expression_gives_of_the_part(text: str) -> None:
    whole, n = torch.randn(5, 4), 3
    whole[n:] = torch.nan
    function = ast.parse("def f(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    tracer = Tracer(Scope(text="", function=function, seen={"w": W, "row": ROW}), "here", "count")
    tracer.known["s"] = Traced("x", 2, frozenset([0]))
    traced = tracer.trace(ast.parse(text, mode="eval").body)
    values = {"torch": torch, "x": whole, "w": W, "row": ROW, "here": torch.arange(5) < n, "count": torch.tensor(n)}
    found = eval(traced.text, values)
    assert found.ndim == traced.rank
    cut = tuple(slice(n) if dim in traced.dims else slice(None) for dim in range(traced.rank))
    torch.testing.assert_close(found[cut], eval(text, {"torch": torch, "s": whole[:n], "w": W, "row": ROW}))


@pytest.mark.parametrize("text", NO_RULES)
def test_an_expression_that_sees_how_long_the_part_is_has_no_rule(text: str) -> None:
    function = ast.parse("def f(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    tracer = Tracer(Scope(text="", function=function, seen={}), "here", "count")
    tracer.known["s"] = Traced("x", 2, frozenset([0]))
    with pytest.raises(NoRule):
        tracer.trace(ast.parse(text, mode="eval").body)


@pytest.mark.jobs
def test_a_part_whose_tensor_has_another_value_later_is_no_part_of_that() -> None:
    _, edited = steps_and_edited(Renames(), torch.randn(3, 5, 4), torch.tensor([5, 2, 1]))
    x, lengths = torch.full((3, 5, 4), 1e7), torch.tensor([4, 3, 2])
    with torch.no_grad():
        torch.testing.assert_close(edited(x, lengths), Renames()(x, lengths))


@pytest.mark.jobs
def test_rows_that_a_program_cannot_save_as_they_stand_are_taken_by_a_vmap() -> None:
    steps, edited = steps_and_edited(Best(), torch.randn(3, 5, 4))
    assert "torch.vmap" in steps
    x = torch.randint(0, 2, (4, 7, 4)).float()  # equal scores
    torch.testing.assert_close(edited(x), Best()(x))


@pytest.mark.jobs
def test_a_search_over_a_square_matrix_is_a_loop_of_the_program() -> None:
    model, x = Spreads(), torch.randn(5, 5) - 1
    eager = EagerSession(copy.deepcopy(model).eval(), x, dynamic_shapes={"x": {1: "nodes"}})
    found = survey(model.eval(), calls_of(eager), onnx=None, base=Path(__file__).parent)
    row = found.rows["(model)"]
    assert row.rewrite is not None, row.why_not
    for size in (2, 5, 9, 16):
        x = torch.randn(size, size) - 1
        assert torch.equal(patch_module(model, found.texts)(x), model(x))
