"""The context in which torch.export follows a model: no gradients, quiet, and the patches of torch switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from trueline.capture.export.silence import quiet
from trueline.capture.model.signature import as_trained
from trueline.capture.patches import (
    Patch,
    causal_mask,
    einsum_order,
    module_to,
    packed_sequence,
    recurrent,
    symbolic_sizes,
)
from trueline.capture.patches.decomposition_cache import looked_up_once

PATCH = Patch(
    issue="none found",
    versions="torch 2.13",
    cost="under 0.1 ms",
    helps=("all",),
)


@contextmanager
def followable() -> Iterator[None]:
    """Parts of torch that its own exporter fixes or refuses are such as it can follow."""
    with ExitStack() as held:
        for way in (
            recurrent.whole,
            packed_sequence.padded,
            causal_mask.masks_as_given,
            symbolic_sizes.free_sizes,
            module_to.left_alone,
            einsum_order.ordered_by_example,
        ):
            held.enter_context(way())
        yield


@contextmanager
def tracing() -> Iterator[None]:
    """What holds while torch.export follows a model."""
    before = len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), as_trained(), quiet(), looked_up_once(), followable():
            yield
    finally:
        # torch.export leaves its own mode behind when it fails while another is on (torch 2.13), and all that is traced
        # in this process afterwards would go through it
        while len(_get_current_function_mode_stack()) > before:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
