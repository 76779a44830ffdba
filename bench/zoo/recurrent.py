"""Sequence models without attention: recurrent, convolutional over time, gated; and forecasters."""

from __future__ import annotations

import torch
from bench.zoo.entry import Shelf, ids, lengths, real
from torch import Tensor, nn
from torch.nn import functional as F

SHELF = Shelf(group="recurrent", sizes={"batch": 3, "length": 9, "history": 24})
STEPS = real("batch", "length", 6)
TOKENS = ids(50, "batch", "length")


class SentimentLstm(nn.Module):
    """Bidirectional, the last states of both directions joined."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(tokens))
        found: Tensor = self.head(torch.cat([hidden[-2], hidden[-1]], dim=1))
        return found


class CharGru(nn.Module):
    """A language model: a GRU with a start state that it makes itself, weights tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.gru = nn.GRU(12, 12, batch_first=True)
        self.out = nn.Linear(12, 50)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        start = torch.zeros(1, tokens.size(0), 12)
        x, _ = self.gru(self.embed(tokens), start)
        found: Tensor = self.out(x)
        return found


class Elman(nn.Module):
    """A plain RNN; the state goes out as well."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(6, 8, batch_first=True, nonlinearity="relu")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.rnn(x)
        return out[:, -1], state.transpose(0, 1)


class LastStep(nn.Module):
    """The state at each record's last valid step, gathered by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.gru(x)
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, out.size(2))
        found: Tensor = self.head(out.gather(1, last).squeeze(1))
        return found


class PooledLstm(nn.Module):
    """Mean and maximum over the valid steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.lstm(x)
        valid = (torch.arange(x.size(1))[None] < lengths[:, None]).unsqueeze(-1)
        mean = (out * valid).sum(1) / lengths[:, None].to(out.dtype)
        most = out.masked_fill(~valid, -1e9).max(dim=1).values
        found: Tensor = self.head(torch.cat([mean, most], -1))
        return found


class Seq2Seq(nn.Module):
    """An encoder's state starts a decoder; Bahdanau's attention over the encoder's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(50, 8), nn.Embedding(40, 8)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.query, self.key, self.energy = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
        self.out = nn.Linear(16, 40)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(source))
        x, _ = self.decoder(self.target(target), state)
        energy = self.energy(torch.tanh(self.query(x)[:, :, None] + self.key(memory)[:, None])).squeeze(-1)
        context = torch.bmm(energy.softmax(-1), memory)
        found: Tensor = self.out(torch.cat([x, context], -1))
        return found


class TextCnn(nn.Module):
    """Kim's classifier: kernels of several widths, maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.convs = nn.ModuleList(nn.Conv1d(8, 4, k) for k in (2, 3, 4))
        self.head = nn.Linear(12, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        pooled = [F.relu(conv(x)).max(dim=-1)[0] for conv in self.convs]
        found: Tensor = self.head(torch.cat(pooled, 1))
        return found


class Causal(nn.Module):
    """A temporal convolution that sees the past only: padded on the left, or cut on the right."""

    def __init__(self, inside: int, outside: int, dilation: int, cut: bool = False) -> None:
        super().__init__()
        self.pad, self.cut = 2 * dilation, cut
        self.conv = nn.Conv1d(inside, outside, 3, padding=self.pad if cut else 0, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        if self.cut:
            return self.conv(x)[:, :, : -self.pad]
        found: Tensor = self.conv(F.pad(x, (self.pad, 0)))
        return found


class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Causal(6, 6, 2**i, cut=True) for i in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        for layer in self.layers:
            y = F.relu(layer(y)) + y
        found: Tensor = self.head(y[:, :, -1])
        return found


class WaveNet(nn.Module):
    """Gated, dilated, with skips summed over the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Conv1d(1, 8, 1)
        self.gates = nn.ModuleList(Causal(8, 16, 2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 16, 1))

    def forward(self, wave: Tensor) -> Tensor:
        x = self.inside(wave.unsqueeze(1))
        total: Tensor | float = 0.0
        for gate, skip in zip(self.gates, self.skips, strict=True):
            a, b = gate(x).chunk(2, dim=1)
            z = torch.tanh(a) * torch.sigmoid(b)
            total = total + skip(z)
            x = x + z
        found: Tensor = self.out(total)
        return found


class Qrnn(nn.Module):
    """A linear recurrence written with cumulative sums: no loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, -1)
        decay = F.logsigmoid(gate).cumsum(1)
        weight = torch.exp(decay[:, :, None] - decay[:, None])
        weight = weight * torch.ones(x.size(1), x.size(1)).tril()[None, :, :, None]
        return (weight * value[:, None]).sum(2)


class DLinear(nn.Module):
    """A forecaster: trend by a moving average, seasons apart, both linear. The history is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.season = nn.Linear(24, 6), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        front, back = x[:, :1].repeat(1, 2, 1), x[:, -1:].repeat(1, 2, 1)
        mean = F.avg_pool1d(torch.cat([front, x, back], 1).permute(0, 2, 1), 5, 1)
        rest = x.permute(0, 2, 1) - mean
        return (self.trend(mean) + self.season(rest)).permute(0, 2, 1)


class NBeats(nn.Module):
    """Blocks that subtract what they explain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 24 + 6)) for _ in range(3)
        )

    def forward(self, history: Tensor) -> Tensor:
        scale = history.abs().mean(1, keepdim=True) + 1e-3
        rest, forecast = history / scale, torch.zeros(history.size(0), 6)
        for one in self.blocks:
            back, ahead = one(rest).split([24, 6], dim=1)
            rest, forecast = rest - back, forecast + ahead
        return forecast * scale


class DeepAr(nn.Module):
    """Normalised by the history's mean; a distribution's parameters come out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(10, 4), nn.LSTM(5, 8, batch_first=True)
        self.mean, self.spread = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, history: Tensor, series: Tensor) -> tuple[Tensor, Tensor]:
        scale = history.abs().mean(dim=1, keepdim=True).clamp(min=1e-2)
        x = torch.cat([(history / scale).unsqueeze(-1), self.embed(series)[:, None].expand(-1, history.size(1), -1)], 2)
        out, _ = self.lstm(x)
        return self.mean(out).squeeze(-1) * scale, F.softplus(self.spread(out)).squeeze(-1) * scale


class Normalized(nn.Module):
    """Reversible instance normalisation around a linear forecaster with patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.out = nn.Linear(8, 8), nn.Linear(5 * 8, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True, unbiased=False) + 1e-2
        y = ((x - mean) / std).unfold(1, 8, 4)
        y = F.gelu(self.patch(y)).flatten(1)
        return self.out(y) * std + mean


class Tagger(nn.Module):
    """Words and their characters: two lengths, characters folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.char = nn.Embedding(50, 8), nn.Embedding(20, 4)
        self.chars = nn.Conv1d(4, 4, 3, padding=1)
        self.lstm = nn.LSTM(12, 6, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(12, 5)

    def forward(self, words: Tensor, characters: Tensor) -> Tensor:
        b, n, c = characters.shape
        x = self.char(characters).view(b * n, c, 4).transpose(1, 2)
        spelled = self.chars(x).amax(-1).view(b, n, 4)
        out, _ = self.lstm(torch.cat([self.word(words), spelled], -1))
        return self.tags(out).argmax(-1)


class Spectral(nn.Module):
    """Keyword spotting: a spectrum from a convolution with fixed waves, then a GRU."""

    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        t = torch.arange(16, dtype=torch.float32)
        waves = torch.stack([torch.cos(t * k * 0.2) for k in range(8)] + [torch.sin(t * k * 0.2) for k in range(8)])
        self.register_buffer("waves", waves[:, None])
        self.gru, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, wave: Tensor) -> Tensor:
        real, imaginary = F.conv1d(wave[:, None], self.waves, stride=8).split(8, 1)
        power = torch.log1p(real**2 + imaginary**2).transpose(1, 2)
        out, _ = self.gru(power)
        found: Tensor = self.head(out.mean(1))
        return found


def _fill(shelf: Shelf) -> None:
    add = shelf.add
    add("bilstm", SentimentLstm, {"tokens": TOKENS})
    add("char_gru", CharGru, {"tokens": TOKENS})
    add("elman_rnn", Elman, {"x": STEPS})
    add("last_step", LastStep, {"x": STEPS, "lengths": lengths("length", "batch")})
    add("pooled_lstm", PooledLstm, {"x": STEPS, "lengths": lengths("length", "batch")})
    add("seq2seq", Seq2Seq, {"source": TOKENS, "target": ids(40, "batch", "steps")}, steps=5)
    add("text_cnn", TextCnn, {"tokens": TOKENS})
    add("tcn", Tcn, {"x": STEPS})
    add("wavenet", WaveNet, {"wave": real("batch", "samples")}, samples=32)
    add("qrnn", Qrnn, {"x": STEPS})
    add("dlinear", DLinear, {"x": real("batch", 24, 3)})
    add("nbeats", NBeats, {"history": real("batch", 24)})
    add("deepar", DeepAr, {"history": real("batch", "history"), "series": ids(10, "batch")})
    add("patch_forecast", Normalized, {"x": real("batch", 24)})
    add("tagger", Tagger, {"words": TOKENS, "characters": ids(20, "batch", "length", "letters")}, letters=7)
    add("keyword_spotter", Spectral, {"wave": real("batch", "samples")}, samples=64)


_fill(SHELF)
