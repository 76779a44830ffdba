"""What a file is that is submitted: a recipe, or a script with a loop of its own. It is read, not run. No torch."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trueline.engine.hosts import folder as travel
from trueline.errors import RecipeError, UsageError
from trueline.recipe.settings import TrainingSettings
from trueline.settings import declared_settings

COMMON = ("train", "main", "run", "__main__")
"""A script that has a common name is called by its folder."""
OF_SCRIPTS = ("compile", "find_unused_parameters", "readers", "backend", "device", "evaluate_every", "monitor",
              "patience")  # fmt: skip
"""Settings that a script decides itself, beside those that a resumed job keeps."""


class SubmittedCode(NamedTuple):
    """`folder` travels; `there`: the file's path on a host, or `module:object`; `name`: of the job. `servers`: the
    parameter servers that the job has."""

    folder: Path
    there: str
    name: str
    is_script: bool = False
    servers: int = 0
    settings: Mapping[str, Any] = {}
    """Settings that the recipe has and that decide where the job can run."""


def locate(recipe: str | Path, given: Mapping[str, Any]) -> SubmittedCode:
    """Raises RecipeError for a file that is no Python, UsageError for a strategy that is not submitted."""
    text = str(recipe)
    if ":" in text and not Path(text).exists() and "/" not in text:
        return _count_servers(
            SubmittedCode(Path.cwd(), text, text.partition(":")[0].rpartition(".")[2]), ast.Module([], []), given
        )
    path = Path(text).resolve()
    path = path / "recipe.py" if path.is_dir() else path
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except SyntaxError as error:
        raise RecipeError(f"the recipe {path} is no Python: line {error.lineno}: {error.msg}") from error
    script = is_script(tree)
    by_folder = path.name == "recipe.py" or (script and path.stem in COMMON)
    name = path.parent.name if by_folder else path.stem
    found = SubmittedCode(path.parent, f"{travel.CODE}/{path.name}", name, script)
    return found if script else _count_servers(found, tree, given)


def is_script(tree: ast.Module) -> bool:
    """Whether a file has a loop of its own: it makes an `Elastic`, which no recipe does.

    >>> is_script(ast.parse("job = trueline.Elastic(model)")), is_script(ast.parse("def model(): ..."))
    (True, False)
    """
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any("Elastic" in (getattr(call, "id", ""), getattr(call, "attr", "")) for call in calls)


def _count_servers(found: SubmittedCode, tree: ast.Module, given: Mapping[str, Any]) -> SubmittedCode:
    own = {name: _read_constant(tree, name) for name in ("strategy", "servers")} | dict(given)
    strategy = own["strategy"] or "allreduce"
    if strategy == "hybrid":
        raise UsageError(
            "a job with --strategy hybrid is not submitted: its tables are on one machine",
            hint="--strategy ps runs as a whole on one host of the engine; or train there: trueline train",
        )
    servers = int(own["servers"] or 1) if strategy == "ps" else 0
    return found._replace(servers=servers, settings={"strategy": strategy, "servers": servers} if servers else {})


def _read_constant(tree: ast.Module, name: str) -> Any:
    constants = (one for one in tree.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant))
    for one in constants:
        if any(isinstance(target, ast.Name) and target.id == name for target in one.targets):
            return ast.literal_eval(one.value)
    return None


def expect_script_settings(given: Mapping[str, Any]) -> None:
    """Raises UsageError for settings that a script decides itself."""
    for one in declared_settings(TrainingSettings):
        if one.name in given and (one.setting.fixed or one.name in OF_SCRIPTS):
            raise UsageError(
                f"--{one.flag} does not apply to a script with a loop of its own",
                hint="its own Elastic decides that: give the script an argument, after --",
            )
