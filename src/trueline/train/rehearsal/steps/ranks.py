"""What `torch.distributed` answers to code of the user's in a process that looks like another worker of a larger job.

A worker trains in a group of Trueline's own, which torch's functions show. A loss that uses the rank or the number of
workers depends on membership, and a collective of the loop's own meets workers that have no records in a step, or that
have another step. So the first collective is noted, and does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from trueline.errors import UsageError
from trueline.train.rehearsal.pretence import HOST, Pretence

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "barrier", "gather", "gather_object", "isend", "irecv", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip
_DIFFERENTIABLE = ("all_gather", "all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter")


def list_ranks(pretence: Pretence) -> list[tuple[Any, str, Any]]:
    """Modules, a name in each, and what is there instead; torch's own code gets what it had."""
    if not dist.is_available():
        return []

    def other(name: str, read: Callable[[], Any]) -> Callable[..., Any]:
        plain = getattr(dist, name)

        def answer(*given: Any, **named: Any) -> Any:
            if _is_torchs():
                return plain(*given, **named)
            pretence.note(HOST)
            return read()

        return answer

    answers = {"is_initialized": lambda: True, "get_rank": lambda: 1 + pretence.number,
               "get_world_size": lambda: 3 + pretence.number}  # fmt: skip
    found: list[tuple[Any, str, Any]] = [(dist, name, other(name, read)) for name, read in answers.items()]
    found += [(dist, name, _note_call(pretence, name)) for name in _COLLECTIVES if hasattr(dist, name)]
    for room in (sys.modules.get("torch.distributed.nn.functional"), sys.modules.get("torch.distributed.nn")):
        if room is not None:
            found += [(room, name, _note_call(pretence, name, room)) for name in _DIFFERENTIABLE if hasattr(room, name)]
    return found


class _Done:
    """A collective that runs by itself, and has ended."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _note_call(pretence: Pretence, name: str, room: Any = dist) -> Callable[..., Any]:
    plain = getattr(room, name)

    def note(*given: Any, **named: Any) -> Any:
        if _is_torchs():
            return plain(*given, **named)
        frame = sys._getframe(1)
        pretence.refusal = pretence.refusal or UsageError(
            f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)} calls torch.distributed's {name}: "
            "members of the job have different numbers of records in a step, some none, and none of them takes part",
            hint="leave it out: job.step(loss) sums over the workers. A mean by a count of all workers is "
            'job.step(loss, weight=count); a loss that compares records has reduction = "mean" and micro_batch = N',
        )
        if room is dist:
            return _Done() if named.get("async_op") or name in ("isend", "irecv") else None
        return [given[0]] if "gather" in name else given[0]

    return note


def _is_torchs() -> bool:
    """Whether torch itself calls what called this."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch.")
