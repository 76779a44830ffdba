"""What a derived recipe changes. Pure; the plan stands in the recipe's file, so that its digest tells plans apart."""

from __future__ import annotations

import ast
import pprint
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from trueline.errors import UsageError, join_names

GLOBAL = "global"
STRUCTURAL = ("channels", "heads", "experts")
"""Parts that are removed; all other names are of layers whose weights become zero."""
Kind = Literal["masks", "channels", "taught", "qat"]
SHORTER, RATE = 3, 0.1
"""A model that is trained already gets a third of the recipe's epochs, at a tenth of its learning rate."""
SHARE = 0.5
_HINT = (
    "conv=0.2,linear=0.4 sets weights of these layers to zero; channels=0.3, heads=0.25 and experts=0.5 remove what "
    "they name"
)


class DerivePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A recipe (import path, or path, relative to the derived recipe) whose model, with the parameters of `checkpoint`
    if there is one, is changed and trained."""

    kind: Kind
    recipe: str
    checkpoint: str = ""
    title: str = ""
    """Of a plan that follows another one: both names."""
    amounts: dict[str, float] = {}
    rounds: int = 1
    """In which masks reach their amounts, over `steps` steps of the training."""
    steps: int = 0
    heads: dict[str, list[int]] = {}
    """Those that stay, by the name of their attention block."""
    experts: dict[str, list[int]] = {}
    """Those that stay, by the name of their container."""
    epochs: int = 1
    rate: float = 1.0
    """Times the recipe's learning rate."""
    answers: str = ""
    """Folder of the teacher's answers to the training records."""
    classes: int = 0
    """Axis of the answers that has the logits of classes; 0: there is none."""
    yes_or_no: Literal["", "logits", "probabilities"] = ""
    """What each element of the answers is, where it decides between two classes; empty, and no classes: a number."""
    temperature: float = 0.0
    """Of these; 0: not known before the teacher has answered, or the answers are numbers."""
    share: float = SHARE
    """Of the loss that is the teacher's."""
    distance: str = ""
    """The recipe's own function of outputs and the teacher's answers; empty: divergence of classes, or squares."""
    layers: dict[str, list[int]] = {}
    """Of a ready student, which is the teacher's model: the layers that stay, by the name of their stack."""
    matches: dict[str, str] = {}
    """Submodule of the student -> submodule of the teacher whose output it learns."""
    ranges: dict[str, tuple[float, float]] = {}
    """Of the inputs of each layer that computes in int8."""

    @property
    def name(self) -> str:
        """As in the rows of the report."""
        if self.title:
            return self.title
        amounts = ",".join(f"{name}={amount:g}" for name, amount in self.amounts.items())
        kept = "".join(f",{len(places)} of {name or 'the layers'}" for name, places in self.layers.items())
        how = self.distance or (f"{self.temperature:g}" if self.temperature else "")
        taught = f"distill{':' * bool(how)}{how}{kept}" + ",features" * bool(self.matches)
        slowly = f" in {self.rounds} rounds" if self.rounds > 1 else ""
        return {"taught": taught, "qat": "qat"}.get(self.kind, f"prune:{amounts}{slowly}")

    @classmethod
    def read(cls, file: Path) -> DerivePlan | None:
        """The plan that stands in the file of a derived recipe; None where there is no such file."""
        if not file.is_file():
            return None
        _, _, rest = file.read_text().partition(_BEGINS)
        return msgspec.convert(ast.literal_eval(rest.partition(_ENDS)[0]), cls)

    @property
    def text(self) -> str:
        """The file of the derived recipe."""
        plan = pprint.pformat(msgspec.to_builtins(self), width=110, sort_dicts=True)
        return _FILE.format(derived=DERIVED, plan=plan)


DERIVED = "A recipe that Trueline derived from another one"
"""How such a file begins."""
_BEGINS, _ENDS = "\nPLAN = ", "\nglobals()"
_FILE = f'''"""{{derived}}; PLAN says how."""

from trueline.compress.derive.define import define
{_BEGINS}{{plan}}{_ENDS}.update(define(PLAN, __file__))
'''


def parse_amounts(text: str) -> dict[str, float]:
    """The shares to prune by layer. Raises UsageError.

    >>> parse_amounts("conv=0.2,linear=0.4")
    {'conv': 0.2, 'linear': 0.4}
    """
    amounts: dict[str, float] = {}
    for part in text.split(","):
        name, separator, number = (piece.strip() for piece in part.partition("="))
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if not separator or not name or not 0 < amount < 1:
            raise UsageError(
                f"prune is '{text}', and '{part}' is not LAYER=SHARE with a share between 0 and 1", hint=_HINT
            )
        if name in amounts:
            raise UsageError(f"prune is '{text}', which names '{name}' twice")
        amounts[name] = amount
    parts = [name for name in amounts if name in STRUCTURAL]
    if parts and len(parts) < len(amounts):
        raise UsageError(
            f"prune is '{text}': {join_names(parts)} are removed from the model, the others become zero; a model is "
            "pruned in one of these ways",
            hint=f"name masks in another search, and here --prune {parts[0]}={amounts[parts[0]]:g}",
        )
    return amounts


def parse_matches(texts: Sequence[str]) -> dict[str, str]:
    """`STUDENT=TEACHER`, names of submodules whose outputs have one shape. Raises UsageError.

    >>> parse_matches(["encoder.layers.2=encoder.layers.5"])
    {'encoder.layers.2': 'encoder.layers.5'}
    """
    matches = {}
    for text in texts:
        student, separator, teacher = (part.strip() for part in text.partition("="))
        if not separator or not student or not teacher:
            raise UsageError(f"match is '{text}', expected STUDENT=TEACHER, the names of two submodules")
        matches[student] = teacher
    return matches


def kind_of(amounts: Mapping[str, float]) -> Kind:
    return "channels" if amounts.keys() & set(STRUCTURAL) else "masks"
