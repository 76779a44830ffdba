"""The house rules of `src/trueline`, read from the syntax trees: `make check` runs this.

    import circles     none; imports for types and inside functions count
    sizes              of folders, files, functions, signatures, Protocols, and of all of it
    names              a class name stands once; a function is named by a verb, not by a bare participle; words that
                       docs/glossary.md lists as not used name no module, class or function

Prints one line for each breach, then a line of figures. Exit code 1 when there is a breach.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_LINES = 58_000 + 4_800 + 7_500 + 300 + 7_500 + 4_500 + 5_800 + 6_600 + 1_230 + 3_000 + 2_900 + 960 + 900 + 420
"""What stood after the house was rebuilt; bounds, secrets and checks for serving under attack (decision 0019); claims
that are probed or follow from a guard (0020); the trial of a loss before the first step, and float64 on demand
(0021); the first hour (0022); many machines (0023); compression (0025);
the parameter server, which is more than a room's 5,000 because its processes and its wire are its own (0024);
hybrid training, the gRPC face, servers on the page, the compiled search; clusters (0026); jobs of FfDL's manifests
(0027); submitted jobs on Ray, the page of all jobs; Kubernetes (0026); columns of lists of numbers, columns in words
(0022)."""
MAX_LINES += 1_200  # deltas of bundles, and jobs that publish them (0024)
MAX_LINES += 1_100  # chains, heads, experts, schedules and choices by operator of compression (0025)
MAX_LINES += 300  # scripts and parameter servers on the engines of `submit` (0026)
MAX_LINES += 700  # scripts, clocks and the history of a job on many machines (0023)
MAX_LINES += 600  # large whole numbers in ONNX, draws and places from outside
MAX_LINES += 400  # what loops keep in buffers, hooks, optimizers and collate functions (0021)
MAX_LINES += 180  # the noise of wide and of large models, answers compared by parts
MAX_LINES += 140  # int8 machine code that is right; a warm standby
MAX_LINES += 60  # int8 machine code that is right
MAX_LINES += 900  # hybrid: norms, averages, changing servers; files of tables; copies of hot rows (0024)
MAX_LINES += 320  # resumed jobs without torch, hosts of other versions, stores with two launches (0023)
MAX_LINES += 300  # own loops after a step, borders of NaN, hot rows and table files, merged
MAX_LINES += 620  # half precision, losses of later steps, a halt with too few workers, lines on a full disk (0021)
MAX_LINES += 150  # numbers that attributes keep, errors that threads and __del__ drop, sizes asked by hasattr
MAX_LINES += 90  # far sizes of several symbols together, quotients of two sizes, articles of types
MAX_LINES += 920  # layers after quantize_dynamic, functions, bits and tables of a size, operators that crash
MAX_LINES += 150  # matches of shapes as ifs, sums in the dtype of their answer
MAX_LINES += 340  # parameter servers of jobs on many machines; changes of a model in words (0024)
MAX_LINES += 500  # what code keeps in plain Python and optimizers in attributes, gates, reading that mixes (0021)
MAX_LINES += 480  # channels of one size, rounding between int8 layers only, blame for light operators (0025)
MAX_LINES += 650  # hosts that take what waits in a store themselves (0026)
MAX_LINES += 600  # servers without room on the disk or memory, sights of ids (0024)
MAX_LINES += 800  # steps that are not finite, averages of any form, what closures and iterators keep (0021)
MAX_LINES += 220  # what three branches added beside one another
MAX_LINES += 400  # what masks and runs choose, quantized values, the lowest numbers, words of refusals
MAX_LINES += 560  # steps that are not finite, averages of any form, what closures and iterators keep (0021)
MAX_LINES += 700  # what a loss reads is that of the first worker, scales of training, compilers on demand (0021, 0025)
MAX_LINES += 420  # what a loss remembers without a name, items of collections, comparing under ps (0021, 0024)
MAX_LINES += 185  # unique ids by a compiled sort, large answers in a file (0020, 0024)
MAX_LINES += 130  # a teacher's temperature, limits of trainings, steps that stay, small values at far sizes (0025)
MAX_LINES += 50  # sums over the tails of sigmoids, a program with a wide range is served
MAX_LINES += 480  # losses of later steps and beyond bounds, other times and entropy, layers that are dropped (0021)
MAX_LINES += 300  # rows copied and summed by compiled code, ids entered in pieces, logs written over
MAX_LINES += 300  # what needs no training first, why none is faster (0025)
MAX_LINES += 200  # captures in less time: operators prepared once, weights widened as they lie in memory
MAX_LINES += 60  # checkpoints whose disk and digest work at once, states read in threads (0021)
MAX_LINES += 265  # attention in the layout of its inputs, parts of weights (0025)
MAX_LINES += 180  # frames in memory that a worker and a server share (0024)
MAX_LINES += 100  # keys of attention in rows (0025)
MAX_LINES += 680  # rare branches of entropy and time, generators of loops, steps while a checkpoint is read (0021)
MAX_LINES += 265  # moves of buckets in pieces, and their benchmark (0024)
MAX_LINES += 350  # files of a trial that pretends to be another worker (0021)
MAX_LINES += 130  # one copy of a state on its way to the disk (0021)
MAX_LINES += 280  # programs of OpenVINO for the sizes of one request, proven and measured (0025)
MAX_LINES += 380  # outputs by their places, answers of one process, far calls of dear models
MAX_LINES += 470  # sets written in code, settings of a process, weights within limits
MAX_LINES += 620  # numpy and folds of sizes in a trace, lengths that values end, bounded loops
MAX_LINES += 150  # numbers that attributes keep, errors that threads and __del__ drop, sizes asked by hasattr
MAX_LINES += 90  # far sizes of several symbols together, quotients of two sizes, articles of types
MAX_LINES += 480  # what a value decides unseen by a trace, state behind methods of C, checks in ONNX
MAX_LINES += 225  # what a step's checks cost, how programs are timed, and their tests (0025)
MAX_LINES += 430  # yes or no in distillation, layers that stay in float32 (0025)
MAX_LINES += 260  # inputs that a claim holds at one value, further functions of sizes
MAX_LINES += 770  # texts, hashes, callers and draws that decide, numbers that helpers compare
MAX_LINES += 800  # rounded numbers of sizes, checks of values, sizes that follow from each other
MAX_LINES += 240  # a search alone in its folder, promises before a training, masks of infinity (0025)
MAX_LINES += 60  # the states of generators, read where they lie, in a file of their own
MAX_LINES += 100  # modes of parts, lists with gaps, losses in double precision (0021)
MAX_LINES += 345  # later values of iterators and files, rare draws of torch, unseeded generators
MAX_LINES += 75  # extremes and powers of large whole numbers along a dimension
MAX_LINES += 16  # probes that a trace follows
MAX_LINES += 120  # scalers in loops, jobs and checkpoints of newer versions, text among numbers (0021, 0022, 0023)
MAX_LINES += 225  # a rewrite of loops over parts of a tensor; which models may catch an error
MAX_LINES += 90  # powers of whole numbers, short steps (0020, 0023)
MAX_LINES += 330  # signals of a free length, sizes that values or branches choose, capture's word in the doctor
MAX_LINES += 80  # parameters that a step leaves out, bounds of numbers that a loss looks at (0021)
MAX_LINES += 1_100  # what a model reads of its process, machine and thread, whatever tells it
MAX_LINES += 100  # numbers beside doubles, shifts, and rules of an optimizer that are left out
MAX_LINES += 500  # sums of one host by reading the members' memory (0021)
MAX_LINES += 240  # what decides by a count, a list or an array is tried before the first step (0021)
MAX_LINES += 180  # diagonals, parts and places of free sizes, products of masks, lengths of transforms
MAX_LINES += 720  # doubles, half precision and images of a free size in ONNX
MAX_LINES += 265  # attention that reads beyond its values; checks of values in the words of a refusal; marks of jobs
MAX_LINES += 330  # slices that a number or a size ends, windows in ONNX, guards measured by their numbers
MAX_LINES += 265  # what a loop kept before its trial, optimizers for as many steps as a job has; sparse sums
MAX_LINES += 330  # rows that values shorten, as greedy CTC decoding has them, keep their length in the doctor's rewrite
MAX_LINES += 225  # a rewrite of loops over parts of a tensor; which models may catch an error
MAX_LINES += 270  # records that were replaced, what a trial reads again, folders of killed launches, counts
MAX_LINES += 680  # unequal lists are counted; loops are tried at steps, counts and losses that they name
MAX_LINES += 90  # loops over lists of a size, slices by their numbers, shares that are one
MAX_LINES += 1_000  # complex numbers, gamma, quantiles, Bessel functions and further writes in ONNX
MAX_LINES += 560  # loops over time whose first or last step goes another way
MAX_LINES += 100  # the ends of pieces, zip of different lengths
MAX_LINES += 300  # what recipes and optimizers change where a count has become a number of their code
MAX_LINES += 110  # numbers beside halves
MAX_LINES += 180  # loops behind generators, keys of tables, numbers that are not finite, a fork that hangs
MAX_LINES += 850  # what rewrites leave out or run always for a reason that the statements give
MAX_LINES += 600  # lists of the last few tensors, elements whose places values choose
MAX_LINES += 1_000  # parts of a length of their own and lists that grow, followed through what is computed of them
MAX_LINES += 50  # fewer records of models whose calls take long, answers measured by parts
MAX_LINES += 55  # orders of infinity and NaN
MAX_LINES += 95  # quotients of sizes that guards round, as whole divisions
MAX_LINES += 60  # sizes by a factor in torch's precision, linspace's bits, sparse indices that are checked
MAX_LINES += 85  # loops refused: buffers changed after a step, records made of weights, a second loop
MAX_LINES += 655  # numbers that code computes, whole numbers beyond 64 bits, errors of a trace alone, sizes filled up
MAX_LINES += 250  # a rewrite of loops over parts of a tensor; which models may catch an error; what ONNX lacks
MAX_LINES += 195  # losses that are 0 for the records that are tried, epsilons of weights, modes of the next batch
MAX_LINES += 70  # errors of blanks, gaps and losses that are no tensor
MAX_LINES += 110  # noise that is seeded by the step alone
MAX_LINES += 75  # averages in hooks of an optimizer, collections of copies of the weights
MAX_LINES += 210  # noise of numpy and random that is seeded by the step alone
MAX_LINES += 95  # ranks and collectives of torch.distributed in loops
MAX_LINES += 110  # means by counts that are drawn
MAX_LINES += 620  # conditions of the user's code on sizes, sizes that break a guard, quotients in whole numbers
MAX_LINES += 150  # numbers that attributes keep, errors that threads and __del__ drop, sizes asked by hasattr
MAX_LINES += 90  # far sizes of several symbols together, quotients of two sizes, articles of types
MAX_FOLDER_FILES = 20
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 8
MAX_PROTOCOL_METHODS = 4
WIDE_PROTOCOLS: Mapping[str, str] = {
    "Engine": "add, kill, watch, list and capacity are what every engine has; each is one call of its API"
}
"""Protocols of more methods, and why."""
WIDE_SIGNATURES: Mapping[str, str] = {
    "capture": "the public call: model, checkpoint and target, and the options of the verb",
    "compress": "the public call, with the options of the verb",
    "ship": "the public call, with the options of the verb",
    "capture_file": "the public call for a file, with the options of the verb",
    "translate": "torch's operators of recurrent layers have as many arguments",
}
"""Functions of more parameters, and why."""
PARTICIPLES = frozenset(
    """
    begun bound broken brought built caught chosen come done drawn fallen fed felt found given gone got grown had heard
    held hidden kept known laid led left lent lost made meant met paid put said seen sent shown shut spent stood taken
    taught thought thrown told torn understood won worn written
    """.split()  # noqa: SIM905 - as prose they take four lines
)
"""Those that do not end in -ed."""
VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "seed", "shed", "speed"})
METHODS_OF_FUTURES = frozenset({"done", "cancelled"})
"""asyncio's names, which a class that stands in for a future has to have."""


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules_of(root: Path) -> dict[str, Module]:
    """The modules below the package folder `root`, without generated code."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found[name] = Module(name, path, len(text.splitlines()), ast.parse(text))
    return found


def imports_of(module: Module, names: Mapping[str, Module]) -> set[str]:
    """The modules of `names` that `module` imports, wherever in it."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in names else base)
    return {name for name in found if name in names and name != module.name}


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for name in edges:
        if name not in index:
            visit(name)
    return found


def is_participle(name: str) -> bool:
    """Whether a function's name is a participle and nothing else.

    >>> [name for name in ("told", "_opened", "open_store", "feed", "found_in") if is_participle(name)]
    ['told', '_opened']
    """
    word = name.strip("_")
    if name.startswith("__") and name.endswith("__"):  # Python's own, such as __reversed__
        return False
    return word in PARTICIPLES or (word.endswith("ed") and "_" not in word and word not in VERBS_IN_ED)


def breaches(root: Path, unused: frozenset[str]) -> Iterator[str]:
    """A line for each breach of the rules below the package folder `root`; `unused`: words that name nothing."""
    modules = modules_of(root)
    for circle in circles({name: imports_of(module, modules) for name, module in modules.items()}):
        yield f"import circle: {' '.join(circle)}"
    yield from _sizes(root, modules)
    yield from _names(root, modules, unused)


def _sizes(root: Path, modules: Mapping[str, Module]) -> Iterator[str]:
    total = sum(module.lines for module in modules.values())
    if total > MAX_LINES:
        yield f"{root}: {total} lines, {MAX_LINES} at most"
    folders: dict[Path, int] = defaultdict(int)
    for module in modules.values():
        folders[module.path.parent] += 1
        if module.lines > MAX_FILE_LINES:
            yield f"{module.path}: {module.lines} lines, {MAX_FILE_LINES} at most"
        for node in ast.walk(module.tree):
            yield from _size_of(module, node)
    for folder, count in folders.items():
        if count > MAX_FOLDER_FILES:
            yield f"{folder}: {count} files, {MAX_FOLDER_FILES} at most"


def _size_of(module: Module, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        parameters = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in parameters if name not in ("self", "cls")])
        where = f"{module.path}:{node.lineno}: {node.name}"
        if lines > MAX_FUNCTION_LINES:
            yield f"{where} has {lines} lines, {MAX_FUNCTION_LINES} at most"
        if count > MAX_PARAMETERS and node.name not in WIDE_SIGNATURES:
            yield f"{where} takes {count} parameters, {MAX_PARAMETERS} at most"
    elif isinstance(node, ast.ClassDef) and _is_protocol(node) and node.name not in WIDE_PROTOCOLS:
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        count = sum(not one.decorator_list for one in methods)
        if count > MAX_PROTOCOL_METHODS:
            yield f"{module.path}:{node.lineno}: {node.name} has {count} methods, {MAX_PROTOCOL_METHODS} at most"


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] in ("Protocol", "typing.Protocol") for base in node.bases)


def _names(root: Path, modules: Mapping[str, Module], unused: frozenset[str]) -> Iterator[str]:
    classes: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        if "compat" in module.path.parts:  # names that TorchServe gave
            continue
        if module.path.stem.strip("_") in unused:
            yield f"{module.path}: docs/glossary.md has another word for {module.path.stem}"
        for node in module.tree.body:  # one inside a function is that function's own
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{module.path}:{node.lineno}")
        for node in ast.walk(module.tree):
            where = f"{module.path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if is_participle(node.name) and node.name not in METHODS_OF_FUTURES and not _is_property(node):
                    yield f"{where}: {node.name} is a participle; a function is named by what it does"
            elif not isinstance(node, ast.ClassDef):
                continue
            if node.name.strip("_").lower() in unused:
                yield f"{where}: docs/glossary.md has another word for {node.name}"
    for name, places in classes.items():
        if len(places) > 1 and not name.startswith("_"):
            yield f"class {name} stands {len(places)} times: {' '.join(places)}"


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(one) or ast.unparse(one).endswith(".setter") for one in node.decorator_list)


def unused_words(glossary: str) -> frozenset[str]:
    """The words of the glossary's section "Not used": a list whose items begin with one word in backticks."""
    section = glossary.partition("## Not used")[2].partition("\n## ")[0]
    return frozenset(word.lower() for word in re.findall(r"^- `(\w+)`", section, re.MULTILINE))


def main() -> int:
    root = ROOT / "src" / "trueline"
    glossary = ROOT / "docs" / "glossary.md"
    unused = unused_words(glossary.read_text()) if glossary.is_file() else frozenset()
    found = list(breaches(root, unused))
    for line in found:
        print(line.replace(f"{ROOT}/", ""))
    modules = modules_of(root)
    print(f"{sum(one.lines for one in modules.values())} lines in {len(modules)} modules; {len(found)} breaches")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
