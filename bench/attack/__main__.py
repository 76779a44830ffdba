"""Attacks capture with generated models: is one sealed and wrong?

    make attack MINUTES=5 SEED=1
    python -m bench.attack --file runs/attack/NAME.py     judges one written model again
    make attack BENCH=--operators                         torch's own operators, each as a model

Models are composed from a grammar of idioms (`idioms/*.txt`), captured as a user would, and judged without the
project's own comparison. A wrong one is shrunk to a few statements and written to `--out`. Prints a table of them, then
one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._table import report
from bench.attack.grammar import Sketch, sketches, source
from bench.attack.operator_sweep import sweep
from bench.attack.sealed import GRAPHS, Record
from bench.attack.shrink import Small, kinds, shrink
from bench.attack.workers import Worker, warm

REWRITING = 0.2
"""Share of the time that the doctor may take."""


@dataclass
class Tally:
    """What became of the models so far."""

    counts: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    small: dict[str, Small] = field(default_factory=dict)
    at: dict[str, int] = field(default_factory=dict)
    """Name of a shrunk model -> the number of the model it was found with."""
    times: Counter[str] = field(default_factory=Counter)
    rewriting_s: float = 0.0

    def result(self, seed: int, seconds: float) -> dict[str, Any]:
        n = self.counts
        names = ("tried", "wrong", "wrong_nonfinite", "sealed", "graph", "rewritten", "narrow_without_warning")
        more = ("pure", "pure_sealed", "pure_graph", "doctored", "crashed", "hung", "left_out", "asked")
        rates = {"pure_graph_rate": round(n["pure_graph"] / max(n["pure"], 1), 3)}
        classes = Counter(_issue(one) for one in self.small.values())
        found = {name: n[name] for name in names} | {"seed": seed, "minutes": round(seconds / 60, 2)}
        found |= {name: n[name] for name in more} | rates
        return found | {"wrong_by": dict(sorted(self.by_kind.items())), "classes": dict(sorted(classes.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="0: the time decides; it is printed")
    parser.add_argument("--out", type=Path, default=Path("runs/attack"), help="where wrong models are written")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of processor time for one model")
    parser.add_argument("--models", type=int, default=0, help="end after this many, 0: when the time is over")
    parser.add_argument("--log", type=Path, help="a JSONL file with the record of every model")
    parser.add_argument("--file", type=Path, help="judge this written model alone")
    parser.add_argument("--operators", action="store_true", help="torch's own operators instead of generated models")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="operators whose names begin so; * and ? as in a shell"
    )
    parser.add_argument("--samples", type=int, default=1, help="cases of each operator")
    parser.add_argument("--cases", type=Path, help="a file that keeps torch's list, which takes minutes to read")
    parser.add_argument("--resume", action="store_true", help="leave out the operators that --log names already")
    parser.add_argument(
        "--together", type=int, default=4, help="operators in one model, where their examples are equal"
    )
    args = parser.parse_args()
    if args.resume and not (args.operators and args.log):
        parser.error("--resume continues a sweep of --operators from the file that --log names; give both")
    warm()
    worker = Worker(args.limit_s)
    try:
        if args.file is not None:
            print(json.dumps(worker.attempt(args.file.read_text()), indent=1))
            return
        (sweep if args.operators else attack)(args, worker)
    finally:
        worker.close()


def attack(args: argparse.Namespace, worker: Worker) -> None:
    seed = args.seed or int(time.time()) % 1_000_000
    print(f"seed {seed}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tally, started = Tally(), time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # the table of what was tried until then
        try_all(args, worker, seed, tally, started)
    rows = [row(tally, name) for name in tally.small]
    headers = ("model", "wrong in", "class", "found after", "times", "statements", "what")
    report(headers, rows, tally.result(seed, time.monotonic() - started))


def try_all(args: argparse.Namespace, worker: Worker, seed: int, tally: Tally, started: float) -> None:
    """Until the time is over, or the number of models is reached."""
    for sketch in sketches(seed):
        passed = time.monotonic() - started
        if passed > 60 * args.minutes or (args.models and tally.counts["tried"] >= args.models):
            break
        text = source(sketch)
        record = worker.attempt(text, seed=seed)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps({"name": sketch.name, "impure": sketch.impure} | record) + "\n")
        count(tally, sketch, record)
        if kinds(record):
            explain(tally, sketch, record, worker, args.out, seed)
        elif (
            not sketch.impure and not graph(record) and "eager" not in record and tally.rewriting_s < REWRITING * passed
        ):
            rewrite(tally, sketch, text, worker, args.out)


def graph(record: Record) -> bool:
    """Whether it was sealed with a program that is a graph."""
    return any(name in GRAPHS for name in record.get("formats") or ())


def count(tally: Tally, sketch: Sketch, record: Record) -> None:
    n = tally.counts
    if "eager" in record:
        n["left_out"] += 1
        return
    sealed = bool(record.get("formats"))
    n["tried"] += 1
    n["sealed"] += sealed
    n["graph"] += graph(record)
    n["wrong"] += bool(record.get("wrong"))
    n["wrong_nonfinite"] += bool(record.get("wrong_nonfinite"))
    n["narrow_without_warning"] += bool(record.get("narrow"))
    n["crashed"] += "crash" in record
    n["hung"] += "hang" in record
    n["asked"] += record.get("asked", 0)
    if not sketch.impure:
        n["pure"] += 1
        n["pure_sealed"] += sealed
        n["pure_graph"] += graph(record)
    tally.by_kind.update(kinds(record))


def explain(tally: Tally, sketch: Sketch, record: Record, worker: Worker, out: Path, seed: int) -> None:
    """Counts the model under a smaller one that is wrong in the same way, which is found and written when it is new."""
    found = kinds(record)
    known = next((name for name, small in tally.small.items() if small.explains(sketch, found)), None)
    if known is None:
        small = shrink(sketch, record, lambda text: worker.attempt(text, seed=seed))
        known = f"{small.sketch.name}.{'+'.join(sorted(small.kinds))}"
        if known not in tally.small:
            tally.small[known], tally.at[known] = small, tally.counts["tried"]
            (out / f"{known.replace(' ', '_')}.py").write_text(source(small.sketch, comment(small)))
            print(f"{tally.counts['tried']:5}  {known}: {what(small)[:160]}", file=sys.stderr, flush=True)
    tally.times[known] += 1


def rewrite(tally: Tally, sketch: Sketch, text: str, worker: Worker, out: Path) -> None:
    """As the doctor leaves it: sealed as a graph, and right."""
    started = time.monotonic()
    record = worker.attempt(text, rewrite=True)
    tally.rewriting_s += time.monotonic() - started
    tally.counts["doctored"] += 1
    tally.counts["rewritten"] += graph(record) and not kinds(record)
    if kinds(record) - {"narrow"}:
        tally.counts["wrong"] += bool(record["wrong"])
        tally.counts["wrong_nonfinite"] += bool(record["wrong_nonfinite"])
        tally.by_kind.update(f"rewritten {kind}" for kind in kinds(record))
        small = Small(sketch, kinds(record), record, 0)
        name = f"{sketch.name}.rewritten"
        tally.small[name], tally.at[name] = small, tally.counts["tried"]
        tally.times[name] += 1
        (out / f"{name}.py").write_text(source(sketch, comment(small)))


def what(small: Small) -> str:
    said = [*(small.record.get(key) or () for key in ("wrong", "wrong_nonfinite", "narrow"))]
    return "; ".join(one for some in said for one in some)


def comment(small: Small) -> str:
    return f"{what(small)}\n\nClaimed: {small.record.get('range', '')}\n".replace("\\", "/")


def _issue(small: Small) -> str:
    return next((idiom.issue for idiom in small.sketch.idioms if idiom.issue), "other")


def row(tally: Tally, name: str) -> list[object]:
    small = tally.small[name]
    lines = sum(len(idiom.lines) for idiom in small.sketch.idioms)
    kinds_ = ", ".join(sorted(small.kinds))
    return [small.sketch.name, kinds_, _issue(small), tally.at[name], tally.times[name], lines, what(small)[:110]]


if __name__ == "__main__":
    main()
