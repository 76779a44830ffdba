"""torch.istft makes a number of the length that a signal is to have.

Here frames are added up in blocks of one hop: a frame is as long as several blocks, and block k of all frames is moved
by k. Source: torch's documentation of `istft`, with its check that no part of the signal is without a window.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trueline.capture.patches import Patch

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("enhancement by a mask of a spectrogram", "iSTFTNet vocoders"),
)

_LEAST = 1e-11
"""Of a window's sum of squares, as in torch."""


@contextmanager
def keep_lengths() -> Iterator[None]:
    """In the block, the lengths of a signal that is made of a spectrum stay free."""
    originals = torch.istft, torch.Tensor.istft
    torch.istft, torch.Tensor.istft = map(_if_free, originals)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.istft, torch.Tensor.istft = originals  # type: ignore[method-assign]


def _if_free(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def call(input: Tensor, n_fft: int, *args: Any, **options: Any) -> Tensor:
        free = any(isinstance(one, torch.SymInt) for one in (input.shape[-1], *args, *options.values()))
        real = not options.get("return_complex") and options.get("onesided") is not False and len(args) < 6
        real = real and input.shape[-2] == n_fft // 2 + 1
        return (invert if free and real else original)(input, n_fft, *args, **options)

    return call


def invert(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, normalized: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """`torch.istft` of a real signal's spectrum, [records, frequencies, frames] or without records; `options` may have
    a `length`."""
    length: Any = options.get("length")
    spectrum = input if input.ndim == 3 else input.unsqueeze(0)
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    plain: Tensor = torch.ones(width, device=input.device) if window is None else window
    before = (n_fft - width) // 2
    plain = F.pad(plain, (before, n_fft - width - before))
    frames = torch.fft.irfft(spectrum.transpose(1, 2), n_fft, norm="ortho" if normalized else "backward")
    whole: Any = n_fft + hop * (spectrum.shape[2] - 1)
    start = n_fft // 2 if center else 0
    end = whole - start if length is None else torch.sym_min(start + length, whole)  # type: ignore[no-untyped-call]
    signal = _add_up(frames * plain, hop)[:, start:end]
    weights = _add_up((plain * plain).expand(1, spectrum.shape[2], n_fft), hop)[:, start:end]
    torch._assert_async((weights.abs() > _LEAST).all(), "torch.istft refuses windows that leave a part out")
    found: Tensor = signal / weights
    if length is not None:
        found = F.pad(found, (0, length - (end - start)))
    return found if input.ndim == 3 else found[0]


def _add_up(frames: Tensor, hop: int) -> Tensor:
    """[records, frames, width] -> [records, whole blocks], each frame `hop` after the one before."""
    records, count, width = frames.shape
    blocks = -(-width // hop)
    parts = F.pad(frames, (0, blocks * hop - width)).reshape(records, count, blocks, hop)
    moved = [F.pad(parts[:, :, at], (0, 0, at, blocks - 1 - at)) for at in range(blocks)]
    return torch.stack(moved).sum(0).reshape(records, (count + blocks - 1) * hop)
