"""`make mutants`: puts deliberate faults into the modules that decide, and counts those that the quick tests catch.

mutmut writes the faults (mutants), finds out which tests reach each function and runs those in forked processes, on a
copy of the sources in `mutants/`. This script draws a sample of the mutants with a seed, adds two kinds of faults that
mutmut lacks (a negated condition, a call statement left out), ends the run in time, and prints what survived.

    python tests/mutants.py [--seed N] [--sample N] [--minutes M] [--only PATTERN] [--jobs N]

Left out are mutants that change nothing but text for people (literals of several words, the message or hint of an
exception) or what only guards against our own mistakes (`strict` of a zip, `ignore_errors` of a clean-up).
`equivalent_mutants.toml` beside this file lists mutants that no test can catch, each with the reason.
The last line is one JSON object. The exit status is 1 when less than 90 % of the sample was caught.

Modules, tests and time limits: `[tool.mutmut]` in pyproject.toml. A mutant counts as a timeout when its tests take ten
times as long as without it. Source: mutmut 3.8, https://mutmut.readthedocs.io
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import libcst as cst

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
TARGET = 0.9
RUN = "run-mutmut"
"""First argument of the process that runs mutmut itself."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: mutmut's name for it, the function (`module.Class.name`), and the changed lines before and after."""

    name: str
    function: str
    was: str
    now: str


def negated_conditions(node: cst.If) -> Iterator[cst.If]:
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test), whitespace_before_test=cst.SimpleWhitespace(" "))


def dropped_calls(node: cst.Expr) -> Iterator[cst.Pass]:
    if isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


def add_operators() -> None:
    from mutmut.mutation.mutators import mutation_operators

    mutation_operators += [(cst.If, negated_conditions), (cst.Expr, dropped_calls)]  # type: ignore[operator]


# The mutants, and which of them are worth a run. -----------------------------------------------------------------


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a source file but those that change only text for people, in mutmut's order."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name, orig_function_and_class_names_from_key

    file = path.relative_to(ROOT)
    made = mutate_file_contents(str(file), path.read_text())
    nodes = ast.walk(ast.parse(made.code))
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found, originals = [], dict[str, tuple[str, list[str]]]()
    for short in made.mutant_names:
        base = short.partition("__mutmut_")[0]
        if base not in originals:
            originals[base] = _dump(functions[f"{base}__mutmut_orig"]), _lines(functions[f"{base}__mutmut_orig"])
        text, lines = originals[base]
        if _dump(functions[short]) == text:
            continue
        name = get_mutant_name(file, short)
        function, of = orig_function_and_class_names_from_key(name)
        module = name.rpartition(".")[0]
        was, now = _difference(lines, _lines(functions[short]))
        found.append(Mutant(name, ".".join([module, *([of] if of else []), function]), was, now))
    return found


class _WithoutText(ast.NodeTransformer):
    """Takes out what only people read, and what only guards against our own mistakes."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [one for one in node.keywords if one.arg not in ("strict", "ignore_errors")]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            texts = (ast.JoinedStr, ast.Constant)
            node.exc.args = [ast.Constant("") if isinstance(one, texts) else one for one in node.exc.args]
            node.exc.keywords = [one for one in node.exc.keywords if one.arg != "hint"]
        return self.generic_visit(node)


def _dump(function: ast.AST) -> str:
    """The function's code without its name and without text for people."""
    bare = _WithoutText().visit(ast.parse(ast.unparse(function)).body[0])
    bare.name = ""
    return ast.dump(bare)


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(function.args), *(line for part in function.body for line in ast.unparse(part).splitlines())]


def _difference(before: list[str], after: list[str]) -> tuple[str, str]:
    was, now = list[str](), list[str]()
    for kind, one, end, other, other_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            was += before[one:end]
            now += after[other:other_end]
    return "\n".join(line.strip() for line in was), "\n".join(line.strip() for line in now)


def all_mutants() -> list[Mutant]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    return [mutant for file in settings["only_mutate"] for mutant in mutants_of(ROOT / file)]


def chosen(mutants: list[Mutant], only: Sequence[str], sample: int, seed: int) -> list[Mutant]:
    found = [one for one in mutants if not only or any(fnmatch(one.function, pattern) for pattern in only)]
    return random.Random(seed).sample(found, sample) if sample and sample < len(found) else found


def reasons() -> dict[tuple[str, str, str], str]:
    """Why a mutant is equivalent, by function, line before and line after."""
    listed = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {(one["function"], one["was"], one["now"]): one["why"] for one in listed}


# The run. --------------------------------------------------------------------------------------------------------


def run(names: Sequence[str], jobs: int, limit_s: float) -> bool:
    """Runs mutmut on these mutants in a process of its own; False when it broke off before the first mutant."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    sources = FOLDER / "src"
    sources.mkdir(parents=True)  # Python looks for folders of PYTHONPATH once, when it starts
    env = {**os.environ, "PYTHONPATH": str(sources)}
    command = [sys.executable, __file__, RUN, "run", "--max-children", str(jobs), *names]
    mutmut = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        mutmut.wait(limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        mutmut.send_signal(signal.SIGINT)
        try:
            mutmut.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(mutmut.pid, signal.SIGKILL)
        if isinstance(error, KeyboardInterrupt):
            raise
        return True
    return mutmut.returncode == 0


def verdicts() -> dict[str, str]:
    """What became of each mutant, in mutmut's words."""
    from mutmut.stats import status_by_exit_code

    found = dict[str, str]()
    for meta in FOLDER.glob("src/**/*.meta"):
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        found |= {name: status_by_exit_code[code] for name, code in codes.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description="Counts the deliberate faults that tests catch.")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="of the sample (default: drawn)")
    parser.add_argument("--sample", type=int, default=1200, help="mutants to try; 0: all (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=29, help="the run ends then (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="functions, such as '*.ledger.*'"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: %(default)s)"
    )
    options = parser.parse_args()

    began = time.monotonic()
    mutants, equivalent = all_mutants(), reasons()
    sample = {one.name: one for one in chosen(mutants, options.only, options.sample, options.seed)}
    if not sample:
        parser.error(f"no function that is mutated matches {', '.join(options.only)}; the modules: pyproject.toml")
    for function, was, now in equivalent.keys() - {(one.function, one.was, one.now) for one in mutants}:
        print(f"{EQUIVALENT.name} lists what is no mutant any more: {function}: {was!r} -> {now!r}")
    print(f"{len(sample)} mutants, seed {options.seed}", flush=True)
    if not run(list(sample), options.jobs, options.minutes * 60):
        # mutmut keeps what its tests print to itself.
        print("mutmut could not begin: the tests have to pass on the copy without a fault. To see which fails:\n"
              "  cd mutants && MUTANT_UNDER_TEST= PYTHONPATH=src python -m pytest -x -m 'not slow and not jobs'",
              file=sys.stderr)  # fmt: skip
        return 2

    found = verdicts()
    count = Counter(found.get(name, "not checked") for name in sample)
    missed = [sample[name] for name in sample if found.get(name) in ("survived", "no tests")]
    alive = [one for one in missed if (one.function, one.was, one.now) not in equivalent]
    for one in sorted(alive, key=lambda mutant: mutant.function):
        print(f"\nsurvived: {one.function}  ({one.name})\n  - " + one.was.replace("\n", "\n  - "))
        print("  + " + one.now.replace("\n", "\n  + "))
    untried = count["not checked"]
    tried = len(sample) - untried - (len(missed) - len(alive))
    rate = (tried - len(alive)) / tried if tried else 0.0
    if untried:
        print(f"\n{untried} of {len(sample)} mutants were not tried within {options.minutes:g} minutes")
    print(f"\n{rate:.1%} of {tried} caught; {len(missed) - len(alive)} more are equivalent to the code, with a reason")
    report = {
        "tried": tried,
        "caught": tried - len(alive) - count["timeout"],
        "timeouts": count["timeout"],
        "survivors": len(alive),
        "equivalent": len(missed) - len(alive),
        "untried": untried,
        "rate": round(rate, 4),
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(report))
    return 0 if rate >= TARGET else 1


if __name__ == "__main__":
    add_operators()
    if sys.argv[1:2] == [RUN]:
        from mutmut.__main__ import cli

        cli(sys.argv[2:])
    sys.exit(main())
