"""Models as researchers write them: Python over values and sizes, which no exporter follows as it stands.

`python -m bench.capture --only research` captures each, asks the doctor where no graph is proven, captures the
rewritten model, and compares it with the original on fresh inputs of other sizes.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from bench.zoo.entry import Field, Shelf, flag, ids, lengths, real, unit
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

SHELF = Shelf(group="research", sizes={"batch": 3, "length": 6})
ROWS, STEPS, TOKENS = real("batch", 4), real("batch", "length", 4), ids(1000, "batch", "length")
FEW, ENDS = ids(5, "batch", "length"), lengths("length", "batch")


def model(**fields: Field) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Adds the class below to the shelf."""

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        SHELF.add(cls.__name__, cls, fields)
        return cls

    return add


class Headed(nn.Module):
    """A model with a linear layer, a cell and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.cell, self.table = nn.Linear(4, 4), nn.GRUCell(4, 4), nn.Embedding(16, 4)


# ---- ids and indices in Python


@model(ids=TOKENS)
class HashRows(Headed):
    def forward(self, ids):
        rows = [[(i * 31 + 7) % 16 for i in row] for row in ids.tolist()]
        return self.table(torch.tensor(rows))


@model(ids=TOKENS)
class HashFlat(Headed):
    def forward(self, ids):
        buckets = [i % 13 for i in ids.flatten().tolist()]
        return self.table(torch.tensor(buckets).view(ids.shape)).mean(1)


@model(x=STEPS, lengths=ENDS)
class LastToken(Headed):
    def forward(self, x, lengths):
        last = [n - 1 for n in lengths.tolist()]
        return self.head(x[list(range(len(last))), last])


@model(x=STEPS, lengths=ENDS)
class LastTokenStacked(Headed):
    def forward(self, x, lengths):
        return self.head(torch.stack([x[i, int(n) - 1] for i, n in enumerate(lengths)]))


@model(ids=FEW)
class CountsInDict(nn.Module):
    def forward(self, ids):
        counts = {}
        for i in ids.flatten().tolist():
            counts[i] = counts.get(i, 0) + 1
        return torch.tensor([[counts[i] for i in row] for row in ids.tolist()]).float()


@model(ids=FEW)
class CountsOfCounter(nn.Module):
    def forward(self, ids):
        rows = []
        for row in ids.tolist():
            seen = Counter(row)
            rows.append([seen[k] / len(row) for k in range(5)])
        return torch.tensor(rows)


@model(x=ROWS)
class NonzeroLoop(Headed):
    def forward(self, x):
        out = torch.zeros_like(x)
        for i in (x.sum(1) > 0).nonzero().flatten().tolist():
            out[i] = self.head(x[i])
        return out


@model(x=STEPS)
class NonzeroPairs(nn.Module):
    def forward(self, x):
        out = x * 0.5
        for i, t in (x[..., 0] > 0.5).nonzero().tolist():
            out[i, t] = x[i, t] * 2
        return out


@model(x=real("length", 4))
class SortedByScore(Headed):
    def forward(self, x):
        scores = self.head(x)[:, 0]
        order = sorted(range(len(scores)), key=lambda i: scores[i].item(), reverse=True)
        return x[order]


@model(x=STEPS)
class SortedRows(Headed):
    def forward(self, x):
        scores = x.sum(-1).tolist()
        picked = [max(range(len(row)), key=row.__getitem__) for row in scores]
        return self.head(x[torch.arange(x.shape[0]), picked])


@model(x=real("batch"))
class Buckets(Headed):
    edges = (-1.0, -0.25, 0.3, 0.9)

    def forward(self, x):
        return self.table(torch.tensor([bisect.bisect(self.edges, v) for v in x.tolist()]))


# ---- branches on values


@model(x=ROWS)
class ArgmaxBranch(Headed):
    def forward(self, x):
        k = int(x.sum(0).argmax())
        if k == 0:
            return self.head(x)
        elif k == 1:
            return x * 2
        return x - 1


@model(x=ROWS)
class ArgmaxMatch(Headed):
    def forward(self, x):
        match x.mean(0).argmax().item():
            case 0:
                y = self.head(x)
            case 1 | 2:
                y = x.relu()
            case _:
                y = x - 1
        return y


@model(x=ROWS)
class KeyedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"loud": nn.Linear(4, 3), "quiet": nn.Linear(4, 3)})

    def forward(self, x):
        key = "loud" if x.abs().mean() > 0.8 else "quiet"
        return self.heads[key](x)


@model(x=ROWS)
class NamedBranch(nn.Module):
    def forward(self, x):
        scale = {True: 2.0, False: 0.5}[bool(x.sum() > 0)]
        return x * scale


@model(x=ROWS)
class EarlyReturn(Headed):
    def forward(self, x):
        y = self.head(x)
        if y.softmax(-1).max() > 0.6:
            return y
        return y + self.head(x.tanh())


@model(x=ROWS)
class ExitLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x):
        for layer, leave in zip(self.layers, self.exits):
            x = torch.relu(layer(x))
            logits = leave(x)
            if logits.softmax(-1).amax(-1).min() > 0.55:
                return logits
        return logits


@model(x=ROWS)
class ClipByNorm(nn.Module):
    def forward(self, x):
        norm = x.norm().item()
        if norm > 1.5:
            x = x / norm * 1.5
        return x


@model(x=ROWS)
class RecordsByRecord(Headed):
    def forward(self, x):
        outs = []
        for row in x:
            if row.max() > 1:
                outs.append(self.head(row))
            else:
                outs.append(row * 2)
        return torch.stack(outs)


@model(x=ROWS)
class Repaired(nn.Module):
    def forward(self, x):
        if (x > 2).any():
            x = x.clamp(max=2)
        assert x.max() <= 2
        return x.exp()


@model(x=ROWS, on=flag("batch"))
class FlagCount(nn.Module):
    def forward(self, x, on):
        count = sum(1 for v in on.tolist() if v)
        return x * count / len(on)


# ---- loops over a size


@model(x=STEPS)
class Doubling(nn.Module):
    def forward(self, x):
        n, d = x.shape[1], 1
        while d < n:
            x = x + F.pad(x, (0, 0, d, 0))[:, :n] * 0.5
            d *= 2
        return x


@model(x=STEPS)
class LogSteps(nn.Module):
    def forward(self, x):
        n = x.size(1)
        for k in range(math.ceil(math.log2(n))):
            x = x + torch.roll(x, 2**k, 1)
        return x.tanh()


@model(x=STEPS)
class Halving(Headed):
    def forward(self, x):
        while x.shape[1] > 1:
            if x.shape[1] % 2:
                x = F.pad(x, (0, 0, 0, 1))
            x = self.head(x[:, ::2] + x[:, 1::2]).tanh()
        return x[:, 0]


@model(x=STEPS)
class EverySecond(nn.Module):
    def forward(self, x):
        return torch.stack([x[:, t] for t in range(x.shape[1]) if t % 2 == 0], 1)


@model(x=STEPS)
class LoudSteps(nn.Module):
    def forward(self, x):
        return sum([x[:, t] for t in range(x.shape[1]) if x[:, t].mean() > 0], torch.zeros_like(x[:, 0]))


@model(x=STEPS)
class Recurrence(Headed):
    def forward(self, x):
        h, outs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs.append(h)
        return torch.stack(outs, 1)


@model(x=STEPS)
class Backwards(Headed):
    def forward(self, x):
        h, outs = torch.zeros_like(x[:, 0]), []
        for t in reversed(range(x.shape[1])):
            h = self.cell(x[:, t], h)
            outs.insert(0, h)
        return torch.stack(outs, 1)


@model(x=STEPS)
class BackwardsDiscount(nn.Module):
    def forward(self, x):
        total, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1] - 1, -1, -1):
            total = x[:, t] + 0.9 * total
            out[:, t] = total
        return out


@model(x=STEPS)
class StepWhile(Headed):
    def forward(self, x):
        t, h = 0, x.new_zeros(x.shape[0], 4)
        while t < x.shape[1]:
            h = 0.7 * h + self.head(x[:, t])
            t += 1
        return h


@model(x=STEPS)
class LayersBySize(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer, t in zip(self.layers, range(x.shape[1])):
            x = x + layer(x[:, t : t + 1])
        return x


@model(x=STEPS)
class Pieces(nn.Module):
    def forward(self, x):
        return torch.stack([piece.mean(1) for piece in x.split(5, 1)], 1).amax(1)


@model(x=STEPS)
class Thirds(nn.Module):
    def forward(self, x):
        return torch.cat([part.sum(1) for part in x.tensor_split(3, 1)], -1)


@model(x=STEPS)
class Windows(nn.Module):
    def forward(self, x):
        out = []
        for s in range(0, x.shape[1], 3):
            out.append(x[:, s : s + 3].amax(1))
        return torch.stack(out, 1)


@model(x=STEPS)
class PairProducts(nn.Module):
    def forward(self, x):
        n, rows = x.shape[1], []
        for i in range(n):
            for j in range(i + 1, n):
                rows.append((x[:, i] * x[:, j]).sum(-1))
        return torch.stack(rows, 1).sum(1) if rows else x.new_zeros(x.shape[0])


@model(a=STEPS, b=STEPS)
class Warping(nn.Module):
    def forward(self, a, b):
        cost = torch.cdist(a, b)
        n, m = cost.shape[1:]
        d = torch.full((a.shape[0], n + 1, m + 1), 1e4)
        d[:, 0, 0] = 0
        for i in range(1, n + 1):
            for j in range(1, m + 1):
                best = torch.minimum(torch.minimum(d[:, i - 1, j], d[:, i, j - 1]), d[:, i - 1, j - 1])
                d[:, i, j] = cost[:, i - 1, j - 1] + best
        return d[:, n, m]


@model(x=STEPS)
class Viterbi(nn.Module):
    def __init__(self):
        super().__init__()
        self.moves = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        score, back = x[:, 0], []
        for t in range(1, x.shape[1]):
            best, arg = (score[:, :, None] + self.moves).max(1)
            score = best + x[:, t]
            back.append(arg)
        path = [score.argmax(-1)]
        for arg in reversed(back):
            path.append(arg.gather(1, path[-1][:, None])[:, 0])
        path.reverse()
        return torch.stack(path, 1)


@model(x=STEPS)
class ScaleSizes(nn.Module):
    def forward(self, x):
        sizes = [max(x.shape[1] // k, 1) for k in (1, 2, 4)]
        return torch.cat([x[:, :s].mean(1) for s in sizes], -1)


@model(x=STEPS)
class Square(nn.Module):
    def forward(self, x):
        side = math.isqrt(x.shape[1])
        grid = x[:, : side * side].reshape(x.shape[0], side, side, 4)
        return (grid.sum(1) - grid.transpose(1, 2).sum(1)).abs().sum(1)


@model(x=STEPS)
class Rounded(nn.Module):
    def forward(self, x):
        return x * round(x.shape[1] * 0.137, 2)


@model(x=STEPS)
class NumpyPositions(Headed):
    def forward(self, x):
        pos = torch.from_numpy(np.arange(x.shape[1])).float()
        return x + torch.sin(pos[:, None] / 10)


@model(x=STEPS)
class KeptPositions(nn.Module):
    @functools.lru_cache(maxsize=None)
    def positions(self, n):
        return torch.sin(torch.arange(n)[:, None] / torch.tensor([1.0, 5.0, 20.0, 100.0]))

    def forward(self, x):
        return x + self.positions(x.shape[1])


# ---- lengths, masks and groups


@model(x=STEPS, lengths=ENDS)
class Padded(nn.Module):
    def forward(self, x, lengths):
        rows = [x[i, :n] * 2 for i, n in enumerate(lengths.tolist())]
        return pad_sequence(rows, batch_first=True).sum(1)


@model(x=STEPS, lengths=ENDS)
class LengthMeans(Headed):
    def forward(self, x, lengths):
        return self.head(torch.stack([x[i, : int(lengths[i])].mean(0) for i in range(len(x))]))


@model(x=STEPS, lengths=ENDS)
class MaskedLoop(nn.Module):
    def forward(self, x, lengths):
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        for i, n in enumerate(lengths.tolist()):
            mask[i, :n] = True
        return x.masked_fill(~mask[..., None], -1e9).softmax(1)


@model(x=ROWS)
class RoutedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mask = chosen == k
            if mask.any():
                out[mask] = expert(x[mask])
        return out


@model(x=STEPS, groups=FEW)
class GroupMeans(nn.Module):
    def forward(self, x, groups):
        out = []
        for g in range(5):
            rows = x[groups == g]
            out.append(rows.mean(0) if len(rows) else torch.zeros(4))
        return torch.stack(out)


@model(x=ROWS, task=ids(3))
class TaskAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, task):
        return x + self.adapters[task.item()](x)


# ---- iteration until a value is reached


@model(x=ROWS)
class ShrinkUntil(nn.Module):
    def forward(self, x):
        while x.abs().max() > 1:
            x = x / 2
        return x


@model(x=ROWS)
class Fixpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        z = torch.zeros_like(x)
        for _ in range(30):
            new = 0.5 * torch.tanh(self.body(z)) + x
            if (new - z).abs().max() < 1e-3:
                break
            z = new
        return z


@model(x=ROWS)
class Sinkhorn(nn.Module):
    def forward(self, x):
        p = x.exp()
        for _ in range(8):
            p = p / p.sum(1, keepdim=True)
            p = p / p.sum(0, keepdim=True)
            if torch.allclose(p.sum(1), torch.ones(len(p)), atol=1e-2):
                break
        return p


@model(x=ROWS)
class Greedy(Headed):
    def forward(self, x):
        h, out = x, []
        for _ in range(5):
            h = self.cell(x, h)
            token = self.head(h).argmax(-1)
            out.append(token)
            if (token == 0).all():
                break
        while len(out) < 5:
            out.append(torch.zeros_like(out[0]))
        return torch.stack(out, 1)


@model(boxes=unit("length", 3))
class Suppression(nn.Module):
    def forward(self, boxes):
        order = boxes[:, 2].argsort(descending=True)
        keep = torch.zeros(len(boxes), dtype=torch.bool)
        while order.numel() > 0:
            i = order[0]
            keep[i] = True
            rest = order[1:]
            order = rest[(boxes[rest, :2] - boxes[i, :2]).abs().sum(1) > 0.5]
        return keep


# ---- state


@model(x=ROWS)
class MovingAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.ema = [torch.zeros(4)]

    def forward(self, x):
        self.ema[0] = 0.9 * self.ema[0] + 0.1 * x.mean(0)
        return x - self.ema[0]


@model(x=ROWS)
class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x / self.calls


@model(x=ROWS)
class LastThree(nn.Module):
    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x):
        self.past.append(x.mean(0))
        if len(self.past) > 3:
            self.past.pop(0)
        return x - torch.stack(self.past).mean(0)


@model(x=STEPS)
class KeptMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        n = x.shape[1]
        if n not in self.masks:
            self.masks[n] = torch.tril(torch.ones(n, n))
        return self.masks[n] @ x
