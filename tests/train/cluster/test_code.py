"""What a submitted file is: a recipe or a script, with parameter servers or without."""

import pytest

from trueline.errors import RecipeError, UsageError
from trueline.train.cluster.code import expect_script_settings, locate

RECIPE = "def model(): ...\ndef loss(outputs, labels): ...\n"
SCRIPT = "from trueline import Elastic\njob = Elastic(1, 2, 3)\n"


def write(folder, name: str, text: str):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_a_file_that_makes_an_elastic_is_a_script_and_a_common_name_is_that_of_its_folder(tmp_path):
    found = locate(write(tmp_path, "digits/train.py", SCRIPT), {})
    assert (found.is_script, found.name, found.there, found.folder) == (
        True, "digits", "code/train.py", tmp_path / "digits",
    )  # fmt: skip
    assert locate(write(tmp_path, "digits/own_loop.py", SCRIPT), {}).name == "own_loop"
    found = locate(write(tmp_path, "digits/recipe.py", RECIPE), {})
    assert (found.is_script, found.name, found.servers) == (False, "digits", 0)
    assert locate("pkg.mod:recipe", {})[1:4] == ("pkg.mod:recipe", "mod", False)


@pytest.mark.parametrize(
    ("text", "given", "servers"),
    [
        (RECIPE, {"strategy": "ps"}, 1),
        (RECIPE, {"strategy": "ps", "servers": 3}, 3),
        (RECIPE + "strategy = 'ps'\nservers = 2\n", {}, 2),
        (RECIPE + "strategy = 'ps'\n", {"strategy": "allreduce"}, 0),
    ],
)
def test_servers_are_those_of_the_command_or_of_the_recipe(tmp_path, text, given, servers):
    found = locate(write(tmp_path, "recipe.py", text), given)
    assert found.servers == servers
    assert dict(found.settings) == ({"strategy": "ps", "servers": servers} if servers else {})


def test_what_cannot_be_submitted_is_named(tmp_path):
    with pytest.raises(UsageError, match="--strategy hybrid is not submitted"):
        locate(write(tmp_path, "recipe.py", RECIPE), {"strategy": "hybrid"})
    with pytest.raises(RecipeError, match=r"is no Python: line 1"):
        locate(write(tmp_path, "recipe.py", "def model(:"), {})
    with pytest.raises(UsageError, match="--epochs does not apply to a script"):
        expect_script_settings({"checkpoint_every": 5, "epochs": 3})
