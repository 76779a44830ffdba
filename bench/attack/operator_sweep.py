"""Captures torch's own operators, each as a small model, and judges what was sealed at the edges of numbers.

    make attack BENCH=--operators
    python -m bench.attack --operators --only 'nn.functional.*' --minutes 20 --log runs/operators.jsonl
    python -m bench.attack --operators --minutes 20 --log runs/operators.jsonl --resume      the next twenty minutes

Cases come from the lists that torch's own tests use (`torch_samples.py`), those that models call most first. Cases with
the same example are asked in one model, which is halved until what is wrong, refused or narrow is alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench._table import report
from bench.attack.operator_case import OperatorCase, read_case, source
from bench.attack.sealed import GRAPHS, Record
from bench.attack.workers import Worker

ORDER = (
    r"ids\.",
    r"nn\.functional\.(?!.*loss)",
    r"(sum|mean|std|var|prod|amax|amin|max|min|norm|logsumexp|all|any|argm|count|median|nan|aminmax|linalg\.vector_norm)",
    r"(gather|scatter|index|take|masked|where|select|narrow|slice|__getitem__|put|diag|tri|roll|flip|rot90|repeat|tile)",
    r"(sort|argsort|msort|topk|kthvalue|unique|mode|searchsorted|bucketize|hist|bincount|cum|logcumsum|diff|trapz)",
    r"(add|sub|mul|div|true_div|floor_div|remainder|fmod|pow|float_power|atan2|maximum|minimum|clamp|round|floor|ceil)",
    r"(trunc|frac|sign|abs|exp|log|sqrt|rsqrt|sin|cos|tan|sigmoid|relu|erf|lerp|copysign|hypot|softmax|log_softmax)",
    r"(matmul|mm|bmm|mv|dot|inner|outer|einsum|tensordot|baddbmm|addmm|addbmm|kron|cross|cdist|stack|cat|split|chunk)",
    r"[A-Z]",
    r"nn\.functional\.",
    r"(?!linalg|fft|special|masked|stft|istft|complex|polar|angle|real|imag|view_as)",
    r"(linalg|special|masked)",
    r"",
)
"""Names of what models call most come first."""
CALLS = 40


@dataclass
class Sweep:
    """What became of the operators so far."""

    worker: Worker
    log: Any
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[list[object]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def try_group(self, cases: Sequence[OperatorCase]) -> None:
        """One model of all; halves of it where that is not the last word on each."""
        started = time.monotonic()
        record = self.worker.attempt(source(cases), seed=self.seed, edges=True, calls=CALLS)
        if len(cases) > 1 and not is_plain(record):
            half = len(cases) // 2
            self.try_group(cases[:half])
            self.try_group(cases[half:])
            return
        for case in cases:
            self.count(case, record, time.monotonic() - started, len(cases))

    def count(self, case: OperatorCase, record: Record, seconds: float, together: int) -> None:
        n, what = self.counts, verdict(record)
        n["tried"] += 1
        n["sealed"] += bool(record.get("formats"))
        n["graph"] += any(one in GRAPHS for one in record.get("formats") or ())
        n["both_graphs"] += all(one in (record.get("formats") or ()) for one in GRAPHS)
        n[what] += 1
        if self.log is not None:
            entry = {"name": case.name, "verdict": what, "seconds": round(seconds, 1), "together": together, **record}
            if what != "right":
                entry["case"] = case.as_record()
            self.log.write(json.dumps(entry) + "\n")
            self.log.flush()
        if what != "right":
            self.rows.append([case.name, what, said(record)[:150]])


def is_plain(record: Record) -> bool:
    """Whether it is right in every usual format: no operator of the model needs a look of its own."""
    return verdict(record) == "right" and not record.get("refused") and all(g in record["formats"] for g in GRAPHS)


def verdict(record: Record) -> str:
    for key, name in (("eager", "left_out"), ("crash", "crashed"), ("hang", "hung"), ("refusal", "refused")):
        if record.get(key):
            return name
    return "wrong" if record["wrong"] else "wrong_nonfinite" if record["wrong_nonfinite"] else "right"


def said(record: Record) -> str:
    named = ("wrong", "wrong_nonfinite", "crash", "hang", "refusal", "eager")
    return next((str(record[key]) for key in named if record.get(key)), "")


def rank(case: OperatorCase) -> int:
    found = next(at for at, words in enumerate(ORDER) if re.match(words, case.name))
    return found + len(ORDER) * case.one_by_one


def cases_of_torch(samples: int, skipped: Counter[str], kept: Path | None = None) -> list[OperatorCase]:
    """All cases, those that models call most first; counts why others are none. The list takes some minutes, and is
    kept in the file `kept`."""
    if kept is None or not kept.exists():
        command = [sys.executable, "-m", "bench.attack.torch_samples", str(samples)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"torch's list of operators cannot be read: {done.stderr.strip().splitlines()[-1]}")
        text = done.stdout
        if kept is not None:
            kept.write_text(text)
    else:
        text = kept.read_text()
    found = []
    for record in map(json.loads, text.splitlines()):
        if "skipped" in record:
            skipped[record["why"]] += 1
        else:
            found.append(read_case(record))
    return sorted(found, key=rank)


def groups(cases: Sequence[OperatorCase], most: int) -> Iterator[list[OperatorCase]]:
    """Cases with one example, together; in the order of ORDER, examples of many operators first."""
    waiting: dict[object, list[OperatorCase]] = {}
    for case in cases:
        waiting.setdefault((rank(case), case.group), []).append(case)
    for members in sorted(waiting.values(), key=lambda members: (rank(members[0]), -len(members))):
        for at in range(0, len(members), most):
            yield members[at : at + most]


def names_in(log: Path) -> set[str]:
    """Names of the operators that a sweep has written to its log. Those of a group that was cut off are not in it."""
    if not log.exists():
        return set()
    return {json.loads(line)["name"] for line in log.read_text().splitlines()}


def sweep(args: argparse.Namespace, worker: Worker) -> None:
    before = names_in(args.log) if args.resume else set()
    with args.log.open("a") if args.log else nullcontext() as log:
        tried = Sweep(worker, log, args.seed or 1)
        cases = cases_of_torch(args.samples, tried.skipped, args.cases)
        chosen = [case for case in cases if not args.only or any(fnmatch(case.name, f"{one}*") for one in args.only)]
        known = [case for case in chosen if case.name not in before]
        started = time.monotonic()
        for group in groups(known, args.together):
            if time.monotonic() - started > 60 * args.minutes:
                break
            tried.try_group(group)
    for why, count in tried.skipped.most_common():
        print(f"left out, {why}: {count}")
    names = ("tried", "sealed", "graph", "both_graphs", "wrong", "wrong_nonfinite", "refused", "crashed", "hung")
    report(
        ("operator", "verdict", "what"),
        tried.rows,
        {
            "operators": len(known),
            "before": len(chosen) - len(known),
            **{name: tried.counts[name] for name in names},
            "left_out": tried.skipped.total() + tried.counts["left_out"],
        },
    )
