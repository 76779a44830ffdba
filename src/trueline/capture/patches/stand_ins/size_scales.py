"""`interpolate` by a factor that is made of sizes (`scale_factor=(rows + 0.1) / 14`), as DINO does with its positions.

torch's own operators take a factor as a number: torch.export keeps that of the example, and a guard that other sizes
fail. Here each dimension is resized by weights of the rows around each place. Source:
`area_pixel_compute_source_index` and `cubic_interp1d` in torch's UpSample.h.
"""

from collections.abc import Callable
from typing import Any

import torch

from trueline.capture.patches import Patch

PATCH = Patch(issue="none found", versions="torch 2.13", cost="2 to 4 rows read per row", helps=("dino", "faster_rcnn"))
LINEAR = ("linear", "bilinear", "trilinear")
SHARPNESS = -0.75


def resize_by(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`interpolate`: linear or cubic by free factors in whole here; all else is the original."""

    def interpolate(
        input: torch.Tensor,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
        antialias: bool = False,
    ) -> torch.Tensor:
        given = tuple(scale_factor) if isinstance(scale_factor, list | tuple) else (scale_factor,) * (input.ndim - 2)
        if not any(isinstance(one, torch.SymFloat | torch.SymInt) for one in given) or len(given) != input.ndim - 2:
            return original(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        sizes = [torch.sym_int(before * by) for before, by in zip(input.shape[2:], given, strict=True)]  # type: ignore[no-untyped-call]
        if recompute_scale_factor or align_corners:  # of the sizes alone
            return original(input, sizes, None, mode, align_corners, None, antialias)
        if antialias or mode not in (*LINEAR, "bicubic"):
            return original(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        for axis, (after, by) in enumerate(zip(sizes, given, strict=True), 2):
            input = _resize_axis(input, axis, after, by, cubic=mode == "bicubic")
        return input

    return interpolate


def _resize_axis(input: torch.Tensor, axis: int, after: Any, by: Any, *, cubic: bool) -> torch.Tensor:
    """`input` with `after` places along `axis`, which are `by` times as dense."""
    finer = torch.promote_types(input.dtype, torch.float32)  # torch computes places of halves so
    before, each = input.shape[axis], torch.arange(after, dtype=finer, device=input.device)
    place, last = (each + 0.5) * (1.0 / by) - 0.5, before - 1
    if not cubic:  # torch copies where the sizes are equal, by whatever factor
        place = torch.where(torch.scalar_tensor(after) == torch.scalar_tensor(before), each, place.clamp(min=0))
    first = place.floor()
    part = (place - first).to(input.dtype).reshape([-1, *(1,) * (input.ndim - axis - 1)])
    weights = enumerate(_weigh_cubic(part), -1) if cubic else enumerate((1 - part, part))
    rows = first.long()
    return sum(input.index_select(axis, (rows + step).clamp(0, last)) * weight for step, weight in weights)  # type: ignore[return-value]


def _weigh_cubic(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Weights of the two places before and the two after, of which the second is `part` behind."""
    return _weigh_far(part + 1), _weigh_near(part), _weigh_near(1 - part), _weigh_far(2 - part)


def _weigh_near(distance: torch.Tensor) -> torch.Tensor:
    return ((SHARPNESS + 2) * distance - (SHARPNESS + 3)) * distance * distance + 1


def _weigh_far(distance: torch.Tensor) -> torch.Tensor:
    return ((SHARPNESS * distance - 5 * SHARPNESS) * distance + 8 * SHARPNESS) * distance - 4 * SHARPNESS
