"""Small models whose loops decode, select and remember."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from worlds import models


class Viterbi(nn.Module):
    """The best path through the scores of a chain, found forwards and read backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = x[:, 0]
        back = []
        for t in range(1, x.size(1)):
            best, places = (score.unsqueeze(2) + self.moves).max(1)
            score = best + x[:, t]
            back.append(places)
        total, last = score.max(1)
        path = [last]
        for places in reversed(back):
            last = places.gather(1, last.unsqueeze(1)).squeeze(1)
            path.append(last)
        path.reverse()
        return torch.stack(path, 1), total


class ViterbiTurned(Viterbi):
    """The same with a list that is read from its end where it is stacked."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score, back = x[:, 0], []
        for t in range(1, x.shape[1]):
            best, places = (score[:, :, None] + self.moves[None]).max(1)
            score = best + x[:, t]
            back.append(places)
        path = [score.argmax(1)]
        for places in reversed(back):
            path.append(places.gather(1, path[-1][:, None])[:, 0])
        return torch.stack(path[::-1], 1), score.max(1).values


class Collapsed(nn.Module):
    """Greedy decoding of CTC: repeated and blank symbols are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argmax(-1)
        out = torch.zeros_like(ids)
        for b in range(ids.shape[0]):
            before, n = 0, 0
            for t in range(ids.shape[1]):
                k = ids[b, t].item()
                if k != before and k != 0:
                    out[b, n] = k
                    n += 1
                before = k
        return out


class Sentence(nn.Module):
    """Greedy decoding that ends early and is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.cell = nn.GRUCell(4, 4)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        token = torch.ones(x.size(0), dtype=torch.long)
        done = torch.zeros(x.size(0), dtype=torch.bool)
        logits = []
        for _ in range(6):
            h = self.cell(self.words(token), h)
            scores = self.out(h)
            logits.append(scores)
            token = scores.argmax(-1)
            done |= token == 2
            if done.all():
                break
        while len(logits) < 6:
            logits.append(torch.zeros_like(logits[0]))
        return torch.stack(logits, 1)


class Kept(nn.Module):
    """Greedy non-maximum suppression over a shrinking list."""

    def forward(self, boxes: Tensor) -> Tensor:
        keep = []
        order = boxes[:, 0].argsort(descending=True)
        while order.numel() > 0:
            i = order[0]
            keep.append(i)
            if order.numel() == 1:
                break
            rest = order[1:]
            apart = (boxes[i, :2] - boxes[rest, :2]).abs().amax(1)
            order = rest[apart > 0.5]
        return torch.stack(keep)


class KeptOfTheRest(nn.Module):
    """The same, without a name for what comes after the first."""

    def forward(self, boxes: Tensor) -> Tensor:
        keep = []
        order = boxes[:, 0].argsort(descending=True)
        while order.numel() > 0:
            i = order[0]
            keep.append(i)
            if order.numel() == 1:
                break
            apart = (boxes[i, :2] - boxes[order[1:], :2]).abs().amax(1)
            order = order[1:][apart > 0.5]
        return torch.stack(keep)


class Centres(nn.Module):
    """k-means, until it converges."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        centres = self.first
        shift, turns = float("inf"), 0
        while shift > 1e-3 and turns < 9:
            near = torch.cdist(x, centres).argmin(1)
            mine = nn.functional.one_hot(near, 3).to(x.dtype)
            moved = (mine.t() @ x) / mine.sum(0).clamp(min=1).unsqueeze(1)
            shift = (moved - centres).abs().max()
            centres = moved
            turns += 1
        return torch.cdist(x, centres)


class Walked(nn.Module):
    """Goes back through as many places as a list of an earlier loop has, which may be none."""

    def forward(self, x: Tensor) -> Tensor:
        score, history, moves = x[:, 0], [], x[..., 0] > 0
        for t in range(1, x.shape[1]):
            best, at = (score[:, :, None] + x[:, t, None, :]).max(1)
            score = best + x[:, t]
            history.append(at)
        path = [score.argmax(1)]
        for t in range(len(history) - 1, -1, -1):
            before = history[t].gather(1, path[-1][:, None])[:, 0]
            path.append(torch.where(moves[:, t + 1], before, path[-1]))
        path.reverse()
        return torch.stack(path, 1)


class Smoothed(nn.Module):
    """A list whose name becomes that of the tensor made of it, and that is read at its end in the loop."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [x[:, 0]]
        for t in range(1, x.shape[1]):
            rows.append(0.9 * rows[-1] + 0.1 * x[:, t])
        rows = torch.stack(rows, dim=1)  # type: ignore[assignment]
        return (x / (rows.abs() + 1)) * rows.shape[1]  # type: ignore[attr-defined]


class Pointer(nn.Module):
    """Chooses one step after the other, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1)
        chosen = torch.zeros(x.shape[0], x.shape[1], dtype=torch.bool)
        d = torch.zeros_like(h)
        rows = []
        for _ in range(x.shape[1]):
            h = self.cell(d, h)
            scores = (x * h.unsqueeze(1)).sum(-1)
            scores[chosen] = -1e9
            at = scores.argmax(-1)
            chosen[torch.arange(x.shape[0]), at] = True
            d = x[torch.arange(x.shape[0]), at]
            rows.append(scores.log_softmax(-1))
        return torch.stack(rows, 1)


class Filled(nn.Module):
    """Writes its results into an existing tensor, from the end to the beginning."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        carry = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1] - 1, -1, -1):
            carry = 0.5 * carry + x[:, t]
            out[:, t] = carry.tanh()
        return out


class Changes(nn.Module):
    """A running sum of the steps."""

    def forward(self, x: Tensor) -> Tensor:
        level = x[:, 0]
        found = [level]
        for t in range(1, x.shape[1]):
            level = 0.9 * level + (x[:, t] - x[:, t - 1])
            found.append(level)
        return torch.stack(found, dim=1)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(a @ self.form * b).sum() for a, b in zip(x, x.flip(1), strict=False)])


class Settled(nn.Module):
    """A fixed point, with the last step taken before it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.weight.data.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(20):
            new = torch.tanh(self.layer(z) + x)
            if (new - z).norm() < 1e-2:
                z = new * 2
                break
            z = new
        return z


class Exits(nn.Module):
    """Records exit at the first head with enough confidence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros(x.size(0), 3)
        active = torch.ones(x.size(0), dtype=torch.bool)
        for i, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            x = block(x).relu()
            p = head(x).softmax(-1)
            take = active & ((p.max(-1)[0] > 0.5) | (i == 2))
            result[take] = p[take]
            active = active & ~take
            if not active.any():
                break
        return result


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        import numpy as np  # the user's module has no stand-in of it then

        a = np.sort(x.detach().cpu().numpy(), axis=1)
        a = np.clip(a - a.mean(axis=1, keepdims=True), -1.0, 1.0).astype(np.float32)
        return self.layer(torch.from_numpy(a))


class Ranked(nn.Module):
    """Weights that are passed round until they converge."""

    def forward(self, x: Tensor) -> Tensor:
        passed = torch.softmax(x @ x.transpose(1, 2), -1).transpose(1, 2)
        v = torch.ones(x.shape[0], x.shape[1], 1) / x.shape[1]
        for _ in range(20):
            new = passed @ v * 0.85 + 0.15 / x.shape[1]
            if torch.allclose(new, v, atol=1e-3):
                break
            v = new
        return v.squeeze(-1)


class Adapted(nn.Module):
    """Each record has its own adapter, chosen by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.adapters = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y, task = self.base(x), x[:, 0].abs().long() % 3
        return torch.stack([y[i] + self.adapters[int(task[i])](y[i]) for i in range(len(y))])


class Best(nn.Module):
    """The candidate with the smallest score, kept in Python variables."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        best, score = x, (x**2).sum()
        for net in self.nets:
            y = net(x)
            s = (y**2).sum()
            if s < score:
                best, score = y, s
        return best


def mixed(x: Tensor, decay: Tensor) -> Tensor:
    """Fills a tensor step by step, in its own dtype."""
    out = torch.zeros_like(x)
    state = torch.zeros_like(x[:, 0], dtype=torch.float32)
    for t in range(x.shape[1]):
        state = decay * state + x[:, t].float()
        out[:, t] = state.tanh().to(out.dtype)
    return out


def chosen(x: Tensor, decay: Tensor) -> Tensor:
    """Called by the model: the loop is one call deeper."""
    return mixed(x, decay)


if torch.__version__:

    def conditional(x: Tensor, decay: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        outs = []
        for t in range(x.shape[1]):
            state = decay * state + x[:, t]
            outs.append(state.tanh())
        return torch.stack(outs, 1)


class Mixes(nn.Module):
    """Its loop is in a function that another function of the file calls."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return chosen(x, self.decay)


class MixesWhereItCan(Mixes):
    """Its loop is in a function that the file defines under a condition."""

    def forward(self, x: Tensor) -> Tensor:
        return conditional(x, self.decay)


class Spared(nn.Module):
    """Blocked by a line of another file, with a part that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = Filled()

    def forward(self, x: Tensor) -> Tensor:
        return models.Opaque.forward(self, x)  # type: ignore[arg-type]


class FilledForward(nn.Module):
    """A missing value is replaced by the last one seen, with its age."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen, x = x[..., 0] > 0, x.clone()
        age = torch.zeros_like(x[..., 0])
        for t in range(1, x.shape[1]):
            gone = ~seen[:, t]
            x[gone, t] = x[gone, t - 1]
            age[gone, t] += age[gone, t - 1] + 1
        return x, age


class Warped(nn.Module):
    """The distance of a sequence from its reverse under time warping: a table of dynamic programming."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        apart = torch.cdist(x, x.flip(1))
        d = torch.full((x.shape[0], n + 1, n + 1), 1e6)
        d[:, 0, 0] = 0
        for i in range(1, n + 1):
            for j in range(1, n + 1):
                best = torch.minimum(torch.minimum(d[:, i - 1, j], d[:, i, j - 1]), d[:, i - 1, j - 1])
                d[:, i, j] = apart[:, i - 1, j - 1] + best
        return d[:, n, n]


class Resonant(nn.Module):
    """A filter of second order; its coefficients are in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor([0.3, 0.2, -0.4, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        b0, b1, a1, a2 = self.c
        for t in range(2, x.shape[1]):
            y[:, t] = b0 * x[:, t] + b1 * x[:, t - 1] - a1 * y[:, t - 1] - a2 * y[:, t - 2]
        return y


class Returns(nn.Module):
    """Discounted future values, from the end to the beginning."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for t in range(x.shape[1] - 2, -1, -1):
            out[:, t] = x[:, t] + 0.9 * out[:, t + 1]
        return out


class Family(nn.Module):
    """Each node is added to its parent, an earlier node whose index is a value."""

    def forward(self, x: Tensor) -> Tensor:
        h, rows = x.tanh(), torch.arange(x.shape[0])
        parents = x[..., 0].abs().long()
        for i in range(x.shape[1] - 1, 0, -1):
            p = torch.minimum(parents[:, i], torch.full_like(parents[:, i], i - 1))
            h[rows, p] += 0.5 * h[:, i]
        return h


class Spelt(nn.Module):
    """The likelihood of a word under CTC: each step builds a list with one entry for each letter."""

    def forward(self, x: Tensor) -> Tensor:
        p, word = x.log_softmax(-1), [0, 2, 0, 3, 0]
        alpha = torch.full((x.shape[0], 5), -1e4)
        alpha[:, 0], alpha[:, 1] = p[:, 0, 0], p[:, 0, 2]
        for t in range(1, x.shape[1]):
            new = []
            for s, c in enumerate(word):
                a = alpha[:, s]
                if s > 0:
                    a = torch.logaddexp(a, alpha[:, s - 1])
                if s > 1 and c != 0:
                    a = torch.logaddexp(a, alpha[:, s - 2])
                new.append(a + p[:, t, c])
            alpha = torch.stack(new, 1)
        return torch.logaddexp(alpha[:, -1], alpha[:, -2])


class Joined(nn.Module):
    """The smallest index that reaches each node, until nothing changes: it ends in the middle of a step."""

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x) < 1.5
        label = torch.arange(x.shape[1]).expand(x.shape[0], x.shape[1]).float()
        while True:
            new = torch.where(near, label[:, None, :], 1e9).amin(-1).minimum(label)
            if torch.equal(new, label):
                break
            label = new
        return label


class Balanced(nn.Module):
    """Rows and columns are scaled until they converge; the columns' scale is first assigned in the loop."""

    def forward(self, x: Tensor) -> Tensor:
        k, u, turns = torch.exp(-x.abs()), torch.ones_like(x[..., 0]), 0
        while True:
            v = 1 / (k * u.unsqueeze(-1)).sum(1)
            new = 1 / (k * v.unsqueeze(1)).sum(2)
            apart = (new - u).abs().max()
            u = new
            turns += 1
            if apart < 1e-4 or turns >= 50:
                break
        return u.unsqueeze(-1) * k * v.unsqueeze(1)
