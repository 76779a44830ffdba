"""Tables, recommendations, sets, points and graphs."""

from __future__ import annotations

import torch
from bench.zoo.entry import Shelf, edges, flag, ids, mask, real, unit
from torch import Tensor, nn
from torch.nn import functional as F

SHELF = Shelf(group="structured", sizes={"batch": 4, "points": 10, "nodes": 6, "items": 5})


class Regressor(nn.Module):
    """A plain MLP with batch norm; one number for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(8), nn.Linear(8, 16), nn.SELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Mish()
        )
        self.out = nn.Linear(16, 1)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(features)).squeeze(-1)
        return found


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 1)
        self.embeds = nn.ModuleList(nn.Embedding(n, 4) for n in (10, 20, 7))
        self.deep = nn.Sequential(nn.Linear(17, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        found = [embed(kinds[:, i] % embed.num_embeddings) for i, embed in enumerate(self.embeds)]
        return torch.sigmoid(self.wide(numbers) + self.deep(torch.cat([numbers, *found], 1)))


class DeepFm(nn.Module):
    """Second-order interactions by the square of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(40, 1), nn.Embedding(40, 6)
        self.deep = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, fields: Tensor) -> Tensor:
        offsets = torch.tensor([0, 10, 20, 30])
        at = fields + offsets
        v = self.second(at)
        crossed = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1, keepdim=True)
        return (self.first(at).sum(1) + crossed + self.deep(v.flatten(1))).sigmoid().squeeze(1)


class Dlrm(nn.Module):
    """Embedding bags of several ids, and the lower triangle of all dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(5, 8), nn.Linear(8 + 3, 1)
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(2))

    def forward(self, dense: Tensor, left: Tensor, right: Tensor) -> Tensor:
        x = F.relu(self.bottom(dense))
        all_ = torch.stack([x, self.bags[0](left), self.bags[1](right)], dim=1)
        dots = torch.bmm(all_, all_.transpose(1, 2))
        i, j = torch.tril_indices(3, 3, offset=-1)
        found: Tensor = torch.sigmoid(self.top(torch.cat([x, dots[:, i, j]], dim=1)))
        return found


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(60, 8)
        self.user, self.item = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        a = F.normalize(self.user(self.users(user)), dim=-1)
        b = F.normalize(self.item(self.items(item)), dim=-1)
        return (a * b).sum(-1) / 0.07


class DeepInterest(nn.Module):
    """A candidate attends to a history with padding (id 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 8, padding_idx=0)
        self.attend = nn.Sequential(nn.Linear(32, 16), nn.PReLU(), nn.Linear(16, 1))
        self.out = nn.Linear(16, 1)

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        h, c = self.items(history), self.items(candidate).unsqueeze(1).expand(-1, history.size(1), -1)
        score = self.attend(torch.cat([h, c, h - c, h * c], -1)).squeeze(-1)
        score = score.masked_fill(history == 0, -1e4).softmax(1)
        return torch.sigmoid(self.out(torch.cat([(score.unsqueeze(-1) * h).sum(1), c[:, 0]], 1)))


class SasRec(nn.Module):
    """The next item: self-attention over a history, scores of all items, the best five."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(50, 8, padding_idx=0), nn.Embedding(32, 8)
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        n = history.shape[1]
        x = self.items(history) + self.places.weight[:n]
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        y, _ = self.attend(x, x, x, attn_mask=later)
        scores = self.norm(x + y)[:, -1] @ self.items.weight.T
        best = scores.topk(5, dim=-1)
        return best.values, best.indices


class NeuralCf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gmf_u, self.gmf_i = nn.Embedding(30, 4), nn.Embedding(30, 4)
        self.mlp_u, self.mlp_i = nn.Embedding(30, 4), nn.Embedding(30, 4)
        self.mlp, self.out = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = self.gmf_u(user) * self.gmf_i(item)
        deep = self.mlp(torch.cat([self.mlp_u(user), self.mlp_i(item)], dim=-1))
        return self.out(torch.cat([product, deep], dim=-1)).view(-1)


class TabTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.column = nn.Embedding(40, 8), nn.Parameter(torch.randn(4, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(4 * 8 + 5, 2)

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        x = self.body(self.embed(kinds) + self.column).flatten(1)
        found: Tensor = self.head(torch.cat([x, self.norm(numbers)], 1))
        return found


class TabNet(nn.Module):
    """Attentive steps with a prior; sparsemax by sorting."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.step = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prior, hidden, total = torch.ones_like(x), x, torch.zeros(x.shape[0], 8)
        masks = []
        for choose, step in zip(self.choose, self.step, strict=True):
            mask = _sparsemax(choose(hidden) * prior)
            prior = prior * (1.3 - mask)
            masks.append(mask)
            hidden = F.glu(step(x * mask), dim=-1)
            total = total + F.relu(hidden)
        return self.out(total), torch.stack(masks, dim=1)


def _sparsemax(z: Tensor) -> Tensor:
    sorted_, _ = torch.sort(z, dim=-1, descending=True)
    k = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
    sums = sorted_.cumsum(-1)
    support = (1 + k * sorted_ > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, support - 1) - 1) / support
    return torch.clamp(z - tau, min=0)


class SoftTree(nn.Module):
    """A differentiable decision tree: products of sigmoids along the paths."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.leaves = nn.Linear(8, 7), nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        right = torch.sigmoid(self.gates(x))
        reach = torch.ones(x.size(0), 1)
        start = 0
        for level in range(3):
            here = right[:, start : start + 2**level]
            reach = torch.stack([reach * (1 - here), reach * here], dim=2).view(x.size(0), -1)
            start += 2**level
        return reach @ self.leaves


class PointNet(nn.Module):
    """Shared layers over points, a learnt transform, maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU())
        self.turn = nn.Linear(8, 9)
        self.large = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, points: Tensor) -> Tensor:
        x = points.transpose(2, 1)
        turn = self.turn(self.small(x).max(2)[0]).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(points, turn).transpose(2, 1)
        found: Tensor = self.head(torch.max(self.large(x), 2, keepdim=True)[0].view(-1, 16))
        return found


class EdgeConv(nn.Module):
    """DGCNN: the three nearest of each point by distance, gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, points: Tensor) -> Tensor:
        b, n, c = points.shape
        distance = torch.cdist(points, points)
        near = distance.topk(3, largest=False).indices
        flat = near.reshape(b, n * 3, 1).expand(-1, -1, c)
        other = points.gather(1, flat).view(b, n, 3, c)
        own = points.unsqueeze(2).expand(-1, -1, 3, -1)
        x = F.leaky_relu(self.mlp(torch.cat([own, other - own], -1))).amax(2)
        found: Tensor = self.head(x.amax(1))
        return found


class DeepSets(nn.Module):
    """A sum over what the mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.tanh(self.each(x)) * mask.unsqueeze(-1).to(x.dtype)
        found: Tensor = self.all(y.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return found


class SetTransformer(nn.Module):
    """Induced points, then pooling by a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.induced, self.seed = nn.Parameter(torch.randn(1, 3, 8)), nn.Parameter(torch.randn(1, 1, 8))
        self.inside = nn.Linear(4, 8)
        self.a, self.b, self.c = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        few, _ = self.a(self.induced.expand(len(x), -1, -1), x, x)
        x, _ = self.b(x, few, few)
        found, _ = self.c(self.seed.expand(len(x), -1, -1), x, x)
        return found[:, 0]


class GraphConv(nn.Module):
    """Kipf and Welling, the adjacency dense and normalised by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1).clamp(min=1).rsqrt()
        a = degree.unsqueeze(-1) * adjacency * degree.unsqueeze(-2)
        found: Tensor = self.second(a @ F.relu(self.first(a @ x)))
        return found


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Linear(5, 8, bias=False), nn.Linear(16, 1, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.w(x)
        n = h.size(1)
        pairs = torch.cat([h.repeat_interleave(n, dim=1), h.repeat(1, n, 1)], dim=2).view(-1, n, n, 16)
        e = F.leaky_relu(self.a(pairs).squeeze(3))
        e = torch.where(adjacency > 0, e, torch.full_like(e, -9e15))
        return F.elu(F.softmax(e, dim=2) @ h)


class MessagePassing(nn.Module):
    """Three rounds of a gated update over a dense graph; one vector for the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = nn.Linear(5, 5), nn.GRUCell(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        b, n, d = x.shape
        for _ in range(3):
            m = adjacency @ self.message(x)
            x = self.update(m.reshape(b * n, d), x.reshape(b * n, d)).view(b, n, d)
        found: Tensor = self.out(x.mean(1))
        return found


class DuelingQ(nn.Module):
    """Which action, with those that are not allowed left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.gain = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, state: Tensor, allowed: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.body(state))
        gain = self.gain(x)
        q = self.value(x) + gain - gain.mean(1, keepdim=True)
        q = torch.where(allowed, q, torch.tensor(-1e8))
        return {"q": q, "action": q.argmax(dim=1)}


class NeuralOde(nn.Module):
    """Runge and Kutta, a fixed number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = 0.1
        for _ in range(5):
            k1 = self.f(x)
            k2 = self.f(x + h / 2 * k1)
            k3 = self.f(x + h / 2 * k2)
            k4 = self.f(x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


class RadianceField(nn.Module):
    """NeRF: positions as frequencies, colours composed along a ray with a cumulative product."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3 + 3 * 8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, samples: Tensor) -> Tensor:
        bands = 2.0 ** torch.arange(4)
        angles = (samples.unsqueeze(-1) * bands).flatten(-2)
        raw = self.body(torch.cat([samples, angles.sin(), angles.cos()], -1))
        alpha = 1 - torch.exp(-F.softplus(raw[..., 3]) * 0.1)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * clear).unsqueeze(-1) * raw[..., :3].sigmoid()).sum(1)


class Splines(nn.Module):
    """A KAN layer: piecewise linear functions by bucketing."""

    knots: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-2, 2, 9))
        self.values = nn.Parameter(torch.randn(6, 3, 9) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clamp(-1.999, 1.999)
        hat = (1 - (x.unsqueeze(-1) - self.knots).abs() / 0.5).clamp(min=0)
        return torch.einsum("bik,iok->bo", hat, self.values)


def _fill(shelf: Shelf) -> None:
    add = shelf.add
    row, graph = real("batch", 8), {"x": real("batch", "nodes", 5), "adjacency": edges("batch", "nodes", "nodes")}
    cloud = real("batch", "points", 3)
    one = ids(30, "batch")
    add("mlp_regressor", Regressor, {"features": row})
    add("wide_and_deep", WideAndDeep, {"numbers": real("batch", 5), "kinds": ids(20, "batch", 3)})
    add("deepfm", DeepFm, {"fields": ids(10, "batch", 4)})
    add("dlrm", Dlrm, {"dense": real("batch", 5), "left": ids(30, "batch", "items"), "right": ids(30, "batch", 3)})
    add("two_tower", TwoTower, {"user": one, "item": ids(60, "batch")})
    add("deep_interest", DeepInterest, {"history": ids(50, "batch", "items"), "candidate": ids(50, "batch")})
    add("sasrec", SasRec, {"history": ids(50, "batch", "items")})
    add("neural_cf", NeuralCf, {"user": one, "item": one})
    add("tab_transformer", TabTransformer, {"kinds": ids(40, "batch", 4), "numbers": real("batch", 5)})
    add("tabnet", TabNet, {"x": row})
    add("soft_tree", SoftTree, {"x": row})
    add("pointnet", PointNet, {"points": cloud})
    add("dgcnn", EdgeConv, {"points": cloud})
    add("deep_sets", DeepSets, {"x": real("batch", "items", 4), "mask": mask("batch", "items")})
    add("set_transformer", SetTransformer, {"x": real("batch", "items", 4)})
    add("gcn", GraphConv, graph)
    add("gat", GraphAttention, graph)
    add("mpnn", MessagePassing, graph)
    add("dueling_q", DuelingQ, {"state": real("batch", 6), "allowed": flag("batch", 4)})
    add("neural_ode", NeuralOde, {"x": real("batch", 4)})
    add("nerf", RadianceField, {"samples": unit("batch", "points", 3)})
    add("kan", Splines, {"x": real("batch", 6)})


_fill(SHELF)
