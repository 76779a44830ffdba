"""Whatever is wrong with a recipe is one error that names the blank, its form and what was found."""

from __future__ import annotations

import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import RecipeError
from trueline.recipe.contract import BLANKS, Recipe
from trueline.recipe.load import load_recipe
from worlds.cases import few

WHOLE = """
def model(): return "model"
def loss(outputs, labels): return outputs - labels
def optimizer(params): return params
def dataset(mode): return [mode]
"""


def write(folder: Path, text: str, name: str = "r.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def refused(source: object) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    return caught.value


def test_a_whole_recipe_loads_from_a_file_with_its_digest_and_name(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, WHOLE))
    assert (recipe.name, recipe.path) == ("r", tmp_path / "r.py")
    assert recipe.model() == "model"  # type: ignore[comparison-overlap]  # a stand-in without torch
    assert recipe.feed is None
    assert recipe.digest != load_recipe(write(tmp_path, WHOLE + "\n")).digest
    assert load_recipe(recipe) is recipe


def test_a_recipe_is_named_by_itself_its_folder_or_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    assert load_recipe(write(folder, WHOLE, "recipe.py")).name == "digits"
    assert load_recipe(str(folder)).name == "digits"
    assert load_recipe(write(folder, WHOLE, "other.py")).name == "other"
    assert load_recipe(write(folder, WHOLE + "name = 'given-1.2'")).name == "given-1.2"
    error = refused(write(folder, WHOLE + "name = 'two words'"))
    assert "'two words' has to consist of letters" in error.message


def test_a_misspelt_blank_is_named_with_its_form_and_where_the_misspelling_is(tmp_path: Path) -> None:
    error = refused(write(tmp_path, WHOLE.replace("optimizer", "optimzer")))
    assert "blank 'optimizer' is not defined, but 'optimzer' (r.py:4) is" in error.message
    assert "`optimizer(params) -> torch.optim.Optimizer`" in error.message
    assert error.hint == "rename 'optimzer' to 'optimizer', or to '_optimzer' if it is a helper"


def test_everything_that_is_missing_is_listed_at_once(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "def build_model(): pass\ndef helper(): pass\nepochs = 'ten'"))
    assert "has 5 problems" in error.message
    assert "'build_model' (r.py:1)" in error.message
    for name in ("loss", "optimizer", "dataset"):
        assert f"blank '{name}' is missing; expected `{name}(" in error.message
    assert "found build_model, helper" in error.message
    assert "epochs = 'ten', expected a whole number of at least 1" in error.message


@pytest.mark.parametrize("written", ["sheduler(optimizer)", "metric()", "pre_process(request)", "feeds(records, mode)"])
def test_an_optional_blank_that_is_misspelt_is_not_silently_left_out(tmp_path: Path, written: str) -> None:
    error = refused(write(tmp_path, WHOLE + f"def {written}: pass"))
    assert f"'{written.partition('(')[0]}' (r.py:6)" in error.message


@pytest.mark.parametrize(
    "helper",
    few(["preprocess_image(x)", "_metric()", "score(a)", "make_feed()", "accuracy(a, b)"], 1, pytest.mark.jobs),
)
def test_helpers_that_merely_sound_like_a_blank_are_left_alone(tmp_path: Path, helper: str) -> None:
    load_recipe(write(tmp_path, WHOLE + f"def {helper}: pass"))


def test_imported_functions_are_not_taken_for_misspellings(tmp_path: Path) -> None:
    write(tmp_path, "def sheduler(): pass", "imported_ones.py")
    load_recipe(write(tmp_path, "from imported_ones import sheduler\n" + WHOLE))


@pytest.mark.parametrize(
    ("line", "words"),
    few(
        [
            ("model = 3", "'model' is an int, expected a function `model()"),
            ("metrics = {'accuracy': 1}", "'metrics' is a dict, expected a function `metrics()"),
            ("dataset = 's3://there'", "'dataset' is a str, expected a function `dataset(mode)"),
            ("def loss(outputs): pass", r"'loss' (r.py:6) takes (outputs), expected `loss(outputs, labels)"),
            ("def model(width): pass", r"'model' (r.py:6) takes (width), expected `model()"),
            ("def examples(count): pass", "'examples' (r.py:6) takes (count)"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_blank_of_the_wrong_kind_is_named_with_what_it_takes(tmp_path: Path, line: str, words: str) -> None:
    assert words in refused(write(tmp_path, WHOLE + line)).message


def test_blanks_may_take_more_if_they_can_be_called_with_less(tmp_path: Path) -> None:
    load_recipe(write(tmp_path, WHOLE + "def model(width=3, *more): pass\ndef loss(*both, **rest): pass"))


def test_a_module_where_a_function_was_wanted_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = WHOLE + "import torch\nmodel = torch.nn.Linear(1, 1)\nloss = torch.nn.MSELoss"
    error = refused(write(tmp_path, text))
    assert "'model' is a Linear, expected a function `model()" in error.message
    assert "'loss' is the class MSELoss" in error.message
    assert "def model(): return" in error.hint
    load_recipe(write(tmp_path, text.replace("MSELoss", "MSELoss()").replace("model = ", "_model = ")))


def test_plain_values_are_the_defaults_and_are_checked(tmp_path: Path) -> None:
    text = WHOLE + "epochs = 3\nglobal_batch = 32\nseed = 7\nfind_unused_parameters = True"
    defaults = load_recipe(write(tmp_path, text)).defaults
    assert (defaults.epochs, defaults.global_batch, defaults.seed) == (3, 32, 7)
    assert defaults.find_unused_parameters
    for line in ("epochs = 0", "epochs = True", "global_batch = 2.5", "seed = -1", "find_unused_parameters = 1"):
        assert line.partition(" ")[0] in refused(write(tmp_path, WHOLE + line)).message


def test_a_misspelt_value_is_not_silently_left_out(tmp_path: Path) -> None:
    error = refused(write(tmp_path, WHOLE + "epoch = 5"))
    assert "'epochs' is not set, but 'epoch = 5' is" in error.message
    load_recipe(write(tmp_path, WHOLE + "SEED = 5\nepochs = 1\n_epoch = 2"))


@pytest.mark.parametrize(
    ("line", "words"),
    few(
        [
            ("precision = 'fp8'", "precision = 'fp8', expected one of fp32, bf16, fp16"),
            ("precision = 16", "precision = 16, expected a text"),
            ("clip_norm = -1", "clip_norm = -1, expected a number of at least 0"),
            ("clip_norm = float('nan')", "clip_norm = nan, expected a number of at least 0"),
            ("ema = 1.0", "ema = 1.0, expected a number of at least 0 and below 1"),
            ("compile = 1", "compile = 1 is not a truth value"),
            ("micro_batch = 2.5", "micro_batch = 2.5, expected a whole number of at least 0"),
            ("clip = 0.5", "'clip_norm' is not set, but 'clip = 0.5' is"),
            ("microbatch = 8", "'micro_batch' is not set, but 'microbatch = 8' is"),
            ("batch_size = 8", "'global_batch' is not set, but 'batch_size = 8' is"),
            ("precison = 'bf16'", "'precision' is not set, but 'precison = 'bf16'' is"),
        ],
        1,
        pytest.mark.jobs,
    ),
)
def test_a_value_of_the_wrong_kind_or_name_is_refused_in_words(tmp_path: Path, line: str, words: str) -> None:
    assert words in refused(write(tmp_path, WHOLE + line)).message


@pytest.mark.parametrize(
    "line",
    few(
        ["clip_norm = 1", "clip_norm = 1e30", "ema = 0", "seeds = 'a.csv'", "_clip = 0.5", "threshold = 0.5"],
        1,
        pytest.mark.jobs,
    ),
)
def test_values_that_are_right_or_the_users_own_are_left_alone(tmp_path: Path, line: str) -> None:
    assert load_recipe(write(tmp_path, WHOLE + line)).name


def test_syntax_and_import_errors_carry_file_and_line(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "def model(:\n"))
    assert "is not valid Python, at r.py:1" in error.message
    error = refused(write(tmp_path, WHOLE + "import absent_library"))
    assert "at r.py:6: ModuleNotFoundError" in error.message
    assert "install absent_library" in error.hint
    write(tmp_path, "\n\n1 / 0", "broken_helper.py")
    error = refused(write(tmp_path, "import broken_helper"))
    assert "at broken_helper.py:3: ZeroDivisionError" in error.message
    assert "SystemExit" in refused(write(tmp_path, "raise SystemExit(3)")).message


def test_a_file_that_is_not_there_or_no_python_is_an_error(tmp_path: Path) -> None:
    assert "trueline init" in refused(tmp_path / "absent.py").hint
    assert "No such file" in refused(str(tmp_path)).message
    assert "is not a Python file" in refused(write(tmp_path, WHOLE, "r.txt")).message


@pytest.mark.jobs
def test_helpers_beside_the_recipe_are_imported_and_those_of_another_recipe_are_not_mistaken_for_them(
    tmp_path: Path,
) -> None:
    text = "from beside import answer\n" + WHOLE + "def examples():\n    import later\n    return answer + later.more"
    for folder, answer in (("one", 1), ("two", 2)):
        write(tmp_path / folder, f"answer = {answer}", "beside.py")
        write(tmp_path / folder, f"more = {answer * 10}", "later.py")
        examples = load_recipe(write(tmp_path / folder, text)).examples
        assert examples is not None
        assert examples() == answer * 11


def test_classes_of_a_recipe_can_be_pickled_and_have_one_name_in_every_process(tmp_path: Path) -> None:
    text = WHOLE + (
        "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass Point:\n    x: int\n"
        "def examples(): return Point(3)"
    )
    path = write(tmp_path, text)
    examples = load_recipe(path).examples
    assert examples is not None
    assert pickle.loads(pickle.dumps(examples())) == examples()
    assert load_recipe(path).examples is examples
    code = f"from trueline.recipe.load import load_recipe; print(load_recipe({str(path)!r}).examples.__module__)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == examples.__module__


def test_a_recipe_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(sys.modules)
    refused(write(tmp_path, "raise ValueError('no')"))
    assert not {name for name in set(sys.modules) - before if "recipe" in name}
    assert str(tmp_path) not in sys.path[:1]


class Filled:
    name = "filled"
    epochs = 2

    def model(self) -> str:
        return "m"

    def loss(self, outputs: Any, labels: Any) -> Any:
        return outputs, labels

    def optimizer(self, params: Any) -> Any:
        return params

    def dataset(self, mode: str) -> Any:
        return [mode]


@pytest.mark.parametrize(
    "source",
    [
        Filled(),
        Filled,
        {"name": "filled", "epochs": 2, **{n: getattr(Filled(), n) for n in ("model", "loss", "optimizer", "dataset")}},
        types.SimpleNamespace(
            name="filled", epochs=2, **{n: getattr(Filled(), n) for n in ("model", "loss", "optimizer", "dataset")}
        ),
    ],
)
def test_objects_classes_mappings_and_namespaces_are_recipes_too(source: object) -> None:
    recipe = load_recipe(source)
    assert (recipe.name, recipe.defaults.epochs, recipe.path) == ("filled", 2, None)
    assert recipe.dataset("training") == ["training"]
    assert len(recipe.digest) == 64


def test_an_import_path_leads_to_a_module_or_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inner = "\n".join("    " + line for line in WHOLE.replace("(", "(self, ").strip().splitlines())
    write(tmp_path / "pack", WHOLE + f"class Other:\n{inner}\nother = Other()", "zoo.py")
    assert load_recipe("pack.zoo").name == "zoo"
    assert load_recipe("pack.zoo:other").name == "Other"
    assert load_recipe("pack.zoo:other").path is None
    error = refused("pack.zoo:othr")
    assert (error.message, error.hint) == ("'pack.zoo' has no 'othr'", "did you mean 'other'?")
    assert "cannot import 'pack.absent'" in refused("pack.absent:other").message


def test_a_loaded_module_is_a_recipe(tmp_path: Path) -> None:
    module = types.ModuleType("typed_in")
    exec(WHOLE, module.__dict__)
    recipe = load_recipe(module)
    assert recipe.name == "typed_in"
    assert len(recipe.digest) == 64


ELASTICDL = """
class CustomModel: pass
def loss(labels, predictions): return ("labels", labels, "predictions", predictions)
def optimizer(params, lr=0.1): return params
def dataset_fn(mode): return [mode]
def eval_metrics_fn(): return {
    "first": lambda labels, predictions: ("labels", labels, "predictions", predictions),
    "unnamed": lambda a, b: ("labels", a, "predictions", b),
    "ours": lambda outputs, labels: ("labels", labels, "predictions", outputs),
}
"""


def test_elasticdl_spellings_and_its_order_of_arguments_are_understood(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, ELASTICDL))
    assert type(recipe.model()).__name__ == "CustomModel"
    expected: Any = ("labels", "L", "predictions", "O")
    assert recipe.loss("O", "L") == expected
    assert recipe.metrics is not None
    for name, function in recipe.metrics().items():
        assert function("O", "L") == expected, name


def test_our_metrics_keep_their_order_and_have_to_be_functions(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, WHOLE + "def metrics(): return {'m': lambda a, b: (a, b)}"))
    assert recipe.metrics is not None
    assert recipe.metrics()["m"]("O", "L") == ("O", "L")
    wrong = load_recipe(write(tmp_path, WHOLE + "def metrics(): return {'m': 3}"))
    assert wrong.metrics is not None
    with pytest.raises(RecipeError, match="metrics\\(\\) returned"):
        wrong.metrics()


def test_the_loader_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    code = (
        f"import sys; from trueline import load_recipe; load_recipe({str(path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_blank_is_a_field_of_the_recipe_and_says_its_arguments() -> None:
    fields = set(Recipe.__dataclass_fields__)
    assert {blank.name for blank in BLANKS} <= fields
    assert {blank.name: blank.arguments for blank in BLANKS}["loss"] == ("outputs", "labels")
    assert {blank.name: blank.arguments for blank in BLANKS}["model"] == ()
