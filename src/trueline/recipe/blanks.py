"""The check of every blank: present, callable, with the right arguments, spelt correctly.

Pure except for reading source lines. It collects all problems before it raises, so that one run of the command shows
one list. A public function whose name is similar to that of an undefined blank counts as a misspelling: an error is
better than training without the scheduler because it is called `sheduler`.
"""

import difflib
import functools
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from trueline import files
from trueline.columns import declared
from trueline.data.source import find_rule_fault
from trueline.errors import RecipeError, join_names, name_type
from trueline.recipe import elasticdl
from trueline.recipe.contract import BLANKS, Blank, Recipe, takes_columns
from trueline.recipe.settings import TrainingSettings
from trueline.settings import DeclaredSetting, declared_settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LABELS = {"label", "labels", "target", "targets", "y_true"}
_OUTPUTS = {"output", "outputs", "prediction", "predictions", "pred", "preds", "logits", "y_pred"}
_REQUIRED_CUTOFF = 0.6
_OPTIONAL_CUTOFF = 0.85
"""How similar (difflib's ratio) a name must be to count as a misspelling. A required blank that is missing is an error
anyway; a helper with a name like an optional one must not be."""
_VALUES = {one.name: one for one in declared_settings(TrainingSettings) if one.setting.recipe}
"""The settings that a recipe may have at its top level."""
_OTHER_NAMES = {
    "batchsize": "global_batch", "numepochs": "epochs", "maxepochs": "epochs", "clip": "clip_norm",
    "gradclip": "clip_norm", "maxgradnorm": "clip_norm", "microbatchsize": "micro_batch", "emadecay": "ema",
    "evalevery": "evaluate_every", "numworkers": "readers", "torchcompile": "compile", "randomseed": "seed",
}  # fmt: skip
"""Other tools' names of these settings, where they are not similar; letters only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definitions:
    """The names of a recipe's file or object, unchecked."""

    values: Mapping[str, Any]
    where: str
    """For messages: the path as the user gave it, or the kind of object."""
    module: str
    """Name of the module whose own functions may be misspelt blanks; empty: every function may."""
    default_name: str
    path: Path | None
    """Set where loading this file again gives the same recipe."""
    digest: str


@dataclass(frozen=True, slots=True)
class Problem:
    text: str
    hint: str = ""


def fill(found: Definitions, needs: Sequence[str] | None = None) -> Recipe:
    """The Recipe that `found` describes; of its required blanks only `needs` have to be there. Raises RecipeError with
    everything that is wrong with it."""
    problems: list[Problem] = []
    filled: dict[str, Any] = {}
    for blank in BLANKS:
        spellings = (blank.name, *blank.aliases)
        spelling = next((name for name in spellings if found.values.get(name) is not None), None)
        if spelling is None and blank.required and needs is not None and blank.name not in needs:
            filled[blank.name] = functools.partial(_raise_absent, blank, found.where)
        elif spelling is None:
            problems += _check_absent(blank, found)
        else:
            value = found.values[spelling]
            problems += _check_value(blank, spelling, value, columns="columns" in found.values)
            filled[blank.name] = _convert(blank, spelling, value)
    if needs is not None and _is_absent(filled.get("dataset")) and "examples" not in filled:
        text = "neither 'examples' nor 'dataset' is defined; expected `examples() -> inputs of a small batch`"
        problems.append(Problem(text))
    if elasticdl.takes_records(filled.get("dataset")):
        filled["feed"] = elasticdl.Feed(filled["dataset"], together=elasticdl.takes_features(filled.get("model")))
        filled["dataset"] = elasticdl.DataPlaces(found.values)
    values, wrong = _settings(found)
    problems += wrong
    if "missing" in found.values and not callable(found.values["missing"]):
        filled["missing"] = found.values["missing"]
        problems += [Problem(why) for why in [find_rule_fault(filled["missing"])] if why]
    if "columns" in found.values and not callable(found.values["columns"]):
        filled["columns"] = found.values["columns"]
        problems += map(Problem, declared.find_faults(filled["columns"]))
        if "missing" in filled:
            problems.append(Problem("'missing' and 'columns' are both set", "say it in columns: Number(missing=...)"))
    name = found.values.get("name", found.default_name)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        hint = 'set name = "..." at the top level of the recipe'
        problems.append(Problem(f"its name {name!r} has to consist of letters, digits and _ . -", hint))
    hint = "; ".join(dict.fromkeys(problem.hint for problem in problems if problem.hint))
    if len(problems) == 1:
        raise RecipeError(f"{found.where}: {problems[0].text}", hint=hint)
    if problems:
        lines = "".join(f"\n  {number}. {problem.text}" for number, problem in enumerate(problems, 1))
        raise RecipeError(f"{found.where} has {len(problems)} problems:{lines}", hint=hint)
    return Recipe(name=name, digest=found.digest, path=found.path, defaults=TrainingSettings(**values), **filled)


def known_names() -> list[str]:
    """What a recipe may define: blanks in all spellings, columns, then settings."""
    spellings = [name for blank in BLANKS for name in (blank.name, *blank.aliases)]
    return [*spellings, "columns", "name", "missing", *_VALUES]


def _raise_absent(blank: Blank, where: str, *_: object) -> Any:
    raise RecipeError(
        f"{where}: blank '{blank.name}' is missing; expected `{blank.form}` ({blank.meaning})",
        hint="a recipe without it can be captured, and neither trained nor evaluated",
    )


def _is_absent(value: Any) -> bool:
    return isinstance(value, functools.partial) and value.func is _raise_absent


def _check_absent(blank: Blank, found: Definitions) -> Iterator[Problem]:
    cutoff = _REQUIRED_CUTOFF if blank.required else _OPTIONAL_CUTOFF
    candidates = dict(_own_functions(found))
    near = _nearest(blank, candidates, cutoff) if blank.guessed else None
    want = f"`{blank.form}` ({blank.meaning})"
    if near:
        at = _place(candidates[near])
        text = f"blank '{blank.name}' is not defined, but '{near}'{at} is; expected {want}"
        yield Problem(text, f"rename '{near}' to '{blank.name}', or to '_{near}' if it is a helper")
    elif blank.required:
        text = f"blank '{blank.name}' is missing; expected {want}; found {join_names(sorted(candidates))}"
        yield Problem(text)


def _own_functions(found: Definitions) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions of the recipe itself that are not blanks."""
    known = {name for blank in BLANKS for name in (blank.name, *blank.aliases)}
    for name, value in found.values.items():
        function = isinstance(value, FunctionType | MethodType)
        own = not found.module or getattr(value, "__module__", None) == found.module
        if function and own and name not in known and not name.startswith("_"):
            yield name, value


def _nearest(blank: Blank, names: Mapping[str, object], cutoff: float) -> str | None:
    scores = {name: max(_likeness(name, spelling) for spelling in (blank.name, *blank.aliases)) for name in names}
    best = max(scores, key=lambda name: scores[name], default=None)
    return best if best is not None and scores[best] >= cutoff else None


def _likeness(one: str, other: str) -> float:
    left, right = (name.lower().replace("_", "") for name in (one, other))
    return difflib.SequenceMatcher(None, left, right).ratio()


def _check_value(blank: Blank, spelling: str, value: Any, *, columns: bool) -> Iterator[Problem]:
    what = f"'{spelling}'{_place(value)}"
    if not callable(value):
        yield Problem(f"{what} is {name_type(value)}, expected a function `{blank.form}`")
    elif blank.name in ("model", "loss") and _is_module(value) == (blank.name == "model"):
        kind, hint = name_type(value), "write `def model(): return ...`, so that every worker can make its own"
        if blank.name == "loss":
            kind = f"the class {value.__name__}"
            hint = "write `loss = torch.nn.CrossEntropyLoss()`, an instance and not its class"
        yield Problem(f"{what} is {kind}, expected a function `{blank.form}`", hint)
    elif blank.name != "dataset" or not elasticdl.takes_records(value):
        signature = elasticdl.signature_of(value)
        try:
            if signature is not None:
                fitted = ("columns",) if blank.name == "model" and columns and takes_columns(value) else ()
                signature.bind(*blank.arguments, *fitted)
        except TypeError as error:
            takes = f"({', '.join(signature.parameters)})" if signature is not None else ""
            yield Problem(f"{what} takes {takes}, expected `{blank.form}`: {error}")


def _is_module(value: Any) -> bool | None:
    """True for an instance of torch.nn.Module, False for a class of them, None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, type):
        return False if issubclass(value, torch.nn.Module) else None
    return True if isinstance(value, torch.nn.Module) else None


def _convert(blank: Blank, spelling: str, value: Any) -> Any:
    """`value` in the form in which Trueline calls it: ElasticDL passes the labels first, Trueline last."""
    if blank.name == "loss" and _labels_first(value):
        return functools.partial(_call_swapped, value)
    if blank.name == "optimizer" and elasticdl.takes_rate(value):
        return elasticdl.RatedOptimizer(value)
    if blank.name == "metrics" and callable(value):
        return functools.partial(_convert_metrics, value, spelling != blank.name)
    return value


def _labels_first(function: Any) -> bool | None:
    """Whether the first two parameters are named so; None when their names do not tell."""
    signature = elasticdl.signature_of(function) if callable(function) else None
    names = list(signature.parameters)[:2] if signature else []
    if len(names) == 2 and names[0] in _LABELS and names[1] not in _LABELS:
        return True
    return False if names and names[0] in _OUTPUTS else None


def _call_swapped(function: Callable[[Any, Any], Any], outputs: Any, labels: Any) -> Any:
    return function(labels, outputs)


def _convert_metrics(metrics: Callable[[], Mapping[str, Any]], elasticdl: bool) -> dict[str, Any]:
    returned = metrics()
    if not isinstance(returned, Mapping) or not all(map(callable, returned.values())):
        raise RecipeError(f"metrics() returned {name_type(returned)}, expected {{name: function(outputs, labels)}}")
    ours = {}
    for name, function in returned.items():
        first = _labels_first(function)
        swap = elasticdl if first is None else first
        ours[name] = functools.partial(_call_swapped, function) if swap else function
    return ours


def _settings(found: Definitions) -> tuple[dict[str, Any], list[Problem]]:
    usual = {name: one.default for name, one in _VALUES.items()}
    values = {name: _plain(found.values[name]) for name in usual if found.values.get(name) is not None}
    problems: list[Problem] = []
    for name, value in values.items():
        problems += _wrong_value(_VALUES[name], value)
    for other, value in found.values.items():
        if other in usual or other.startswith("_") or not other.islower() or not isinstance(value, int | float | str):
            continue
        near = _similar_setting(other, value, usual)
        if near is not None and near not in values:
            text = f"'{near}' is not set, but '{other} = {value!r}' is"
            hint = f"rename '{other}' to '{near}', or to '_{other}' if it is your own"
            problems.append(Problem(text, hint))
    return values, problems


def _plain(value: Any) -> Any:
    """`value`; of `device = torch.device("cuda")` the name. No torch is imported here."""
    return str(value) if (type(value).__module__, type(value).__name__) == ("torch", "device") else value


def _similar_setting(other: str, value: object, usual: Mapping[str, object]) -> str | None:
    """The setting that `other` is likely to mean: a similar name, or another tool's name for it."""
    alike = max(usual, key=lambda name: _likeness(name, other))
    near = alike if _likeness(alike, other) >= _OPTIONAL_CUTOFF else _OTHER_NAMES.get(other.replace("_", ""))
    # A string is not a misspelt number: `seeds = "a.csv"` is the user's own.
    return near if near is not None and isinstance(value, str) == isinstance(usual[near], str) else None


def _wrong_value(expected: DeclaredSetting, value: Any) -> Iterator[Problem]:
    text, setting, kind = f"{expected.name} = {value!r}", expected.setting, expected.kind
    if kind is bool:
        if not isinstance(value, bool):
            yield Problem(f"{text} is not a truth value, expected True or False")
    elif kind is str:
        if not isinstance(value, str):
            yield Problem(f"{text}, expected a text", f"call it '_{expected.name}' if it is your own")
        elif setting.choices and value not in setting.choices:
            yield Problem(f"{text}, expected one of {', '.join(setting.choices)}")
    elif isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        yield Problem(f"{text}, expected a {'whole ' if kind is int else ''}number of {setting.bounds}")
    elif not setting.allows(value) or abs(value) >= (2**63 if kind is int else math.inf):
        yield Problem(f"{text}, expected a number of {setting.bounds}")


def _place(value: Any) -> str:
    """` (file.py:12)` for a function of a file, otherwise nothing."""
    code = getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""


def blame(error: BaseException, folder: Path) -> str:
    """`file.py:12`, the last line under `folder` that led to `error`; empty when none did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if folder in Path(frame.filename).parents]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def source_file(found: object, values: Mapping[str, Any]) -> Path | None:
    """The file of the object `found`, or else of its model."""
    for candidate in (found, type(found), *(values.get(name) for name in ("model", "CustomModel"))):
        try:
            name = inspect.getsourcefile(candidate)  # type: ignore[arg-type]  # anything else is a TypeError
        except TypeError:
            continue
        if name and Path(name).is_file():
            return Path(name).resolve()
    return None


def digest_without_file(values: Mapping[str, Any]) -> str:
    """A digest over the code of the blanks, for a recipe without a file, e.g. one typed into a prompt."""
    parts = []
    for blank in BLANKS:
        value = values.get(blank.name)
        code = getattr(value, "__code__", None)
        if value is not None:
            text = f"{code.co_code.hex()}:{code.co_names}" if code else type(value).__qualname__
            parts.append(f"{blank.name}:{text}")
    return files.sha256_bytes("\n".join(parts).encode())
