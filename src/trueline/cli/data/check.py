"""`trueline data check`."""

from trueline.cli.options import Output, recipe_argument, verb

_EXAMPLES = """
trueline data check recipe.py
    what is wrong with the recipe and its records, before any training; errors first

trueline data check recipe.py --json
    the same for a script; the exit code is 1 if there is an error
"""


@verb("check", examples=_EXAMPLES, shows_progress=True)
@recipe_argument
def command(recipe: str) -> Output:
    """Read RECIPE and its records together, and take one step of two records.

    Names missing values, values that only the evaluation records have, texts that are cut, columns that are constant,
    equal, or decide the label, and labels that do not fit the model's outputs.
    """
    from trueline.recipe.load import load_recipe

    loaded = load_recipe(recipe)  # before the import of torch, so that a wrong path is an error at once
    from trueline.batch.check import check

    report = check(loaded)
    return Output(report.as_text(), report.as_dict(), 0 if report.sound else 1)
