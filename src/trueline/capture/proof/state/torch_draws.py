"""Random numbers of torch whose draw changes the answer once in a long time: dropout of one element in a million, a
branch that is taken for one number of 100,000. Each draw is replaced by what chance makes of it as seldom.

A draw whose generator stands at the same place in each call (`torch.manual_seed(3)` in forward) is no random number.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trueline.capture.model import code_paths, explicit_state
from trueline.capture.model.allowance import Allowance
from trueline.capture.model.code_paths import Event, SourceLine
from trueline.capture.model.dispatch import OperatorMode
from trueline.capture.model.python_state import Memento
from trueline.capture.proof.state.influence import BUDGET, Influence, Question

FAR = 6.0
"""Deviations from the mean that a normal number exceeds once in a thousand million draws; exponential numbers exceed
three times as much as seldom."""
CONSTANTS = 24
"""Numbers in the code of the model that are drawn."""
Replace = Callable[[int, Any, Any, torch.Tensor], torch.Tensor]
"""What is drawn in place of a draw: of its number, operator, arguments and numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    operator: str
    place: SourceLine | None
    before: bytes
    """The state of the generator."""


class WriteWatch(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes the operators that draw random numbers or write into buffers, with the user's line that called each."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.draws: list[tuple[str, SourceLine | None]] = []
        self.writes: list[SourceLine | None] = []
        self._memory = {_memory(buffer) for buffer in buffers} - {0}

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        written = args[0] if args and func._schema.is_mutable else None
        if isinstance(written, torch.Tensor) and _memory(written) in self._memory:
            self.writes.append(code_paths.current_line())
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operator that may draw. Attention, without dropout, only may: its generator then stays as it was."""
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        result = func(*args, **kwargs)
        on_cpu = not any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves(result))
        if not on_cpu or not torch.equal(before, generator.get_state()):
            self.draws.append((str(func), code_paths.current_line()))
        return result


def _memory(tensor: torch.Tensor) -> int:
    """Address of the tensor's elements; 0 where they are not in one place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


class _DrawWatch(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes what is drawn, and replaces the draws that `chosen` takes by others."""

    def __init__(self, replace: Replace | None, chosen: Sequence[bool]) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self._replace, self._chosen = replace, chosen

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state().numpy().tobytes()
        place = func._schema.arguments[0].alias_info is not None  # it is only written into
        given = [one.clone() if isinstance(one, torch.Tensor) else one for one in args[place:]]
        result = func(*args, **kwargs)
        if before == generator.get_state().numpy().tobytes():
            return result  # attention without dropout only may draw
        number = len(self.draws)
        self.draws.append(Draw(operator=str(func), place=code_paths.current_line(), before=before))
        leaves = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if self._replace is not None and leaves and (number >= len(self._chosen) or self._chosen[number]):
            leaves[0].copy_(self._replace(number, func, given, leaves[0]).reshape(leaves[0].shape))
        return result


def find_draw_influence(question: Question) -> Influence | None:
    """The first draw whose rare numbers change the answer."""
    noted = [_note(question) for _ in range(2)]
    if not noted[0] or not noted[1]:
        return None
    chosen = [one.before != other.before for one, other in zip(*noted, strict=False)]
    memento, allowance = Memento(explicit_state.users_own(question.eager.module)), Allowance(*BUDGET)
    for replace in _replacements(question.way):
        with allowance.charging():
            watch = _DrawWatch(replace, chosen)
            with torch.random.fork_rng(devices=[]), watch:
                why = question.differs(memento)
        if why:
            first = next((one for one, random in zip(watch.draws, chosen, strict=False) if random), watch.draws[0])
            how = f"it answers differently when another number is drawn ({why})"
            return Influence(path=first.operator, how=how, place=first.place, draws=True)
        if not allowance.allows():
            break
    return None


def _note(question: Question) -> list[Draw]:
    watch = _DrawWatch(None, ())
    try:
        with watch:
            question.eager.run(question.inputs)
    except Exception:  # noqa: BLE001 - the user's forward, which answered the same input before: later calls show it
        return []
    return watch.draws


def _replacements(way: Sequence[Event]) -> Iterator[Replace]:
    for every in (1, 2):
        for first in (False, True):
            yield partial(_draw_ends, every, first)
    for number in _constants(way):
        for more in (0, 1e-6, -1e-6) if isinstance(number, float) else (0,):
            yield partial(_draw_number, number + more)


def _draw_ends(every: int, first: bool, number: int, func: Any, args: Any, drawn: torch.Tensor) -> torch.Tensor:
    """The largest numbers if `first`, else the smallest; with `every` of 2 in turn."""
    places = torch.arange(drawn.numel()).reshape(drawn.shape) + number
    return _at_ends(func, args, drawn, (places % every).bool() ^ first)


def _draw_number(wanted: float, number: int, func: Any, args: Any, drawn: torch.Tensor) -> torch.Tensor:
    """This number wherever it may be drawn."""
    low, high = (_at_ends(func, args, drawn, torch.full(drawn.shape, end)) for end in (False, True))
    fits = drawn.is_floating_point() or wanted == int(wanted)
    return torch.where((low <= wanted) & (wanted <= high), wanted, drawn) if fits else drawn


def _at_ends(func: Any, args: Any, drawn: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The smallest numbers that may be drawn, and the largest where `high`; as drawn for an operator that is not
    known."""
    name = func.overloadpacket.__name__.removesuffix("_")
    numbers = [one for one in args if isinstance(one, int | float) and not isinstance(one, bool)]
    first: Any = args[0] if args else None
    if name in ("rand", "rand_like", "uniform"):
        start, end = numbers if name == "uniform" and len(numbers) == 2 else (0.0, 1.0)
        return torch.where(high, end - (end - start) * 2**-24, start)
    if name in ("randn", "randn_like", "normal"):
        given = [] if name != "normal" else [one for one in args if isinstance(one, int | float | torch.Tensor)]
        mean, deviation = (*given, *(0.0, 1.0)[len(given) :])[:2]
        return mean + torch.where(high, FAR, -FAR) * deviation
    if name == "bernoulli":
        likely = numbers[0] if numbers else first
        rate = likely if isinstance(likely, torch.Tensor) else torch.full(drawn.shape, likely, dtype=torch.float64)
        return torch.where(high, rate > 0, rate >= 1).to(drawn.dtype)
    if name in ("randint", "randint_like", "random") and numbers:
        least, most = numbers if len(numbers) > 1 else (0, numbers[0])
        return torch.where(high, most - 1, least)
    if name == "exponential":
        pace = numbers[0] if numbers else 1.0
        return torch.where(high, 3 * FAR / pace, 1e-8 / pace)
    if name == "geometric" and numbers:
        return torch.where(high, 1 + math.floor(3 * FAR / -math.log1p(-numbers[0])), 1) if numbers[0] < 1 else drawn
    if name == "poisson":
        return torch.where(high & (first > 0), first + FAR * first.sqrt() + 2, 0).floor()
    if name == "native_dropout":
        return drawn * high / (1 - args[1]) if 0 < args[1] < 1 else drawn
    return _of_some(name, args, drawn, high)


def _of_some(name: str, args: Any, drawn: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The same of draws out of a collection, in which each element stands once, and of slopes."""
    first: Any = args[0] if args else None
    if name == "randperm":
        return drawn.sort(descending=bool(high.reshape(-1)[:1].any())).values
    if name == "multinomial":
        possible = (first > 0).double()
        last = possible.shape[-1] - 1 - possible.flip(-1).argmax(-1, keepdim=True)
        again = len(args) > 2 and bool(args[2])
        one = torch.where(high, last, possible.argmax(-1, keepdim=True))
        return one if again or drawn.shape[-1] == 1 else drawn.flip(-1)
    if name == "rrelu_with_noise" and len(args) > 4 and args[4]:
        return torch.where(first <= 0, first * torch.where(high, args[3], args[2]), first)
    return drawn


def _constants(way: Sequence[Event]) -> list[float]:
    """The numbers in the code that ran."""
    waiting: list[Any] = list(dict.fromkeys(constant for _, code, _ in way for constant in code.co_consts))
    numbers: list[float] = []
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, tuple | frozenset):
            waiting += one
        elif isinstance(one, CodeType):
            waiting += one.co_consts
        elif isinstance(one, int | float) and not isinstance(one, bool):
            numbers.append(one)
    return list(dict.fromkeys(numbers))[:CONSTANTS]
