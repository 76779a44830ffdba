"""Attention by hand and by torch's own modules: encoders, decoders, vision, speech, conformers, linear attention."""

from __future__ import annotations

import math

import torch
from bench.zoo.entry import Shelf, ids, mask, real
from torch import Tensor, nn
from torch.nn import functional as F

SHELF = Shelf(group="attention", sizes={"batch": 3, "length": 7, "height": 16, "width": 24})
TOKENS = ids(50, "batch", "length")


class Positions(nn.Module):
    """Sines, made once for a longest length and cut to the request's."""

    table: Tensor

    def __init__(self, width: int, longest: int = 64) -> None:
        super().__init__()
        at = torch.arange(longest)[:, None]
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(longest, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.size(1)]


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(50, 16, padding_idx=0), Positions(16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.positions(self.embed(tokens) * 4.0)
        x = self.encoder(x, src_key_padding_mask=~mask)
        weight = mask.unsqueeze(-1).float()
        found: Tensor = self.head((x * weight).sum(1) / weight.sum(1))
        return found


class TorchTranslator(nn.Module):
    """nn.Transformer with a causal mask made for the length at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.positions = nn.Embedding(50, 16), nn.Embedding(40, 16), Positions(16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        self.out = nn.Linear(16, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        x = self.body(self.positions(self.source(source)), self.positions(self.target(target)), tgt_mask=causal)
        found: Tensor = self.out(x)
        return found


class CausalAttention(nn.Module):
    """Written out, with a triangle of the longest length in a buffer."""

    triangle: Tensor

    def __init__(self, width: int, heads: int, longest: int = 64) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("triangle", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.triangle[:, :, :t, :t] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        found: Tensor = self.out(y)
        return found


class NanoGpt(nn.Module):
    """Raises for a sequence longer than its table, as the original does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(5))
        self.attend = nn.ModuleList(CausalAttention(16, 4) for _ in range(2))
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.out = nn.Linear(16, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        _, t = tokens.size()
        assert t <= 64, f"a sequence of {t} is longer than 64"
        x = self.words(tokens) + self.places(torch.arange(0, t, dtype=torch.long, device=tokens.device))
        for i, (attend, mix) in enumerate(zip(self.attend, self.mix, strict=True)):
            x = x + attend(self.norms[2 * i](x))
            x = x + mix(self.norms[2 * i + 1](x))
        found: Tensor = self.out(self.norms[4](x))
        return found


class RotaryDecoder(nn.Module):
    """Rotary positions, RMS norm, grouped queries, SwiGLU, scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.q, self.kv, self.o = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)

    def _turned(self, x: Tensor) -> Tensor:
        rate = 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4))
        angle = torch.outer(torch.arange(x.shape[2]).float(), rate)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        half = torch.cat((-x[..., 2:], x[..., :2]), dim=-1)
        return x * cos + half * sin

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, t, 4, 4).transpose(1, 2)
        k, v = (one.view(b, t, 2, 4).transpose(1, 2) for one in self.kv(y).chunk(2, -1))
        k, v = (one.repeat_interleave(2, dim=1) for one in (k, v))
        a = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, 16))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x @ self.embed.weight.T


class AlibiEncoder(nn.Module):
    """Distances as a bias, einsum throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(6, 3 * 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = self.proj(x).reshape(x.shape[0], n, 3, 2, 4).unbind(2)
        away = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs()
        slope = torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)
        weight = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.5 - slope * away).softmax(-1)
        found: Tensor = self.out(torch.einsum("bhij,bjhd->bihd", weight, v).flatten(-2))
        return found


class LinearAttention(nn.Module):
    """Features by elu + 1; keys and values summed first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x)
        memory = torch.einsum("bnd,bne->bde", k, v)
        scale = 1 / torch.einsum("bnd,bd->bn", q, k.sum(dim=1)).clamp(min=1e-3)
        return torch.einsum("bnd,bde,bn->bne", q, memory, scale)


class Windowed(nn.Module):
    """Attention inside windows of four steps; the length is padded to whole windows."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inside = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        pad = (4 - n % 4) % 4
        x = F.pad(self.inside(x), (0, 0, 0, pad)).view(-1, 4, 8)
        y, _ = self.attend(x, x, x, need_weights=False)
        return y.reshape(b, n + pad, 8)[:, :n]


class VisionTransformer(nn.Module):
    """Patches, a class token, learnt positions; the size of the image is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 10))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        found: Tensor = self.head(self.body(x)[:, 0])
        return found


class AnySizeTransformer(nn.Module):
    """As above, with the grid of positions scaled to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 16, 4, 4) * 0.02)
        self.attend, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image)
        x = x + F.interpolate(self.places, size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = self.norm(x.flatten(2).permute(0, 2, 1))
        y, _ = self.attend(x, x, x)
        found: Tensor = self.head((x + y).mean(1))
        return found


class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm1, self.norm2, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        found: Tensor = self.head(x.mean(dim=1))
        return found


class GatedMlp(nn.Module):
    """gMLP: steps mixed by a learnt matrix, cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside, self.norm = nn.Linear(6, 16), nn.Linear(8, 6), nn.LayerNorm(8)
        self.weight, self.bias = nn.Parameter(torch.randn(32, 32) * 0.1), nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        u, v = F.gelu(self.inside(x)).chunk(2, dim=-1)
        v = torch.einsum("bnd,mn->bmd", self.norm(v), self.weight[:n, :n]) + self.bias[:n, None]
        found: Tensor = self.outside(u * v)
        return x + found


class Fourier(nn.Module):
    """FNet: mixing by a Fourier transform over steps and features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        found: Tensor = self.mix(self.norm(x + y))
        return found


class Conformer(nn.Module):
    """Convolution and attention over mel frames, subsampled by four."""

    def __init__(self) -> None:
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU())
        self.inside, self.attend = nn.Linear(4 * 3, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.point, self.depth = nn.Conv1d(8, 16, 1), nn.Conv1d(8, 8, 5, padding=2, groups=8)
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 12)

    def forward(self, mels: Tensor) -> Tensor:
        x = self.sub(mels.unsqueeze(1))
        b, c, t, f = x.size()
        x = self.inside(x.transpose(1, 2).reshape(b, t, c * f))
        y, _ = self.attend(x, x, x)
        x = x + y
        z = F.glu(self.point(x.transpose(1, 2)), dim=1)
        x = x + F.silu(self.norm(self.depth(z))).transpose(1, 2)
        return self.out(x).log_softmax(-1)


class Perceiver(nn.Module):
    """A few latents read a long input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 8) * 0.1)
        self.inside, self.read = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.think = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        latents = self.latents.unsqueeze(0).repeat(x.size(0), 1, 1)
        y, _ = self.read(latents, x, x, need_weights=False)
        return self.think(latents + y).mean(1)


class BlockDetr(nn.Module):
    """Queries attend to the features of a convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.queries = nn.Embedding(5, 8)
        self.rows, self.columns = nn.Parameter(torch.rand(50, 4)), nn.Parameter(torch.rand(50, 4))
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.box, self.label = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = self.features(image)
        h, w = x.shape[-2:]
        columns = self.columns[:w].unsqueeze(0).repeat(h, 1, 1)
        rows = self.rows[:h].unsqueeze(1).repeat(1, w, 1)
        places = torch.cat([columns, rows], dim=-1).flatten(0, 1).unsqueeze(0)
        queries = self.queries.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        y = self.decoder(queries, x.flatten(2).permute(0, 2, 1) + places)
        return {"pred_boxes": self.box(y).sigmoid(), "pred_logits": self.label(y)}


class Performer(nn.Module):
    """Random features that are drawn once, in a buffer."""

    features: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 24)
        self.register_buffer("features", torch.randn(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (F.relu(one @ self.features) + 1e-3 for one in (q, k))
        found: Tensor = (q @ (k.transpose(1, 2) @ v)) / (q @ k.sum(1).unsqueeze(-1))
        return found


def _fill(shelf: Shelf) -> None:
    add, steps = shelf.add, real("batch", "length", 6)
    picture = real("batch", 3, 16, 16)
    add("torch_encoder", TorchEncoder, {"tokens": TOKENS, "mask": mask("batch", "length", like="bool")})
    add("torch_transformer", TorchTranslator, {"source": TOKENS, "target": ids(40, "batch", "steps")}, steps=5)
    add("nano_gpt", NanoGpt, {"tokens": TOKENS})
    add("rotary_decoder", RotaryDecoder, {"tokens": TOKENS})
    add("alibi", AlibiEncoder, {"x": steps})
    add("linear_attention", LinearAttention, {"x": steps})
    add("windowed_attention", Windowed, {"x": steps})
    add("tiny_vit", VisionTransformer, {"image": picture})
    add("any_size_vit", AnySizeTransformer, {"image": real("batch", 3, "height", "width")})
    add("mlp_mixer", MlpMixer, {"image": picture})
    add("gmlp", GatedMlp, {"x": steps})
    add("fnet_block", Fourier, {"x": real("batch", "length", 8)})
    add("conformer", Conformer, {"mels": real("batch", "frames", 16)}, frames=24)
    add("perceiver", Perceiver, {"x": steps})
    add("tiny_detr", BlockDetr, {"image": real("batch", 3, "height", "width")})
    add("performer", Performer, {"x": steps})


_fill(SHELF)
