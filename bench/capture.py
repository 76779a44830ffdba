"""Is a sealed program ever wrong, and what is refused? The project's own zoo, captured and judged.

    python -m bench.capture [--only NAME ...] [--shard i/n] [--resume] [--list]

Each architecture is captured in its own process, with limits on time and memory, and its programs are compared with the
eager model on a hundred fresh inputs. Records are appended to a JSONL file, and `--resume` continues a run that was cut
off; the table and the last line, one JSON object, cover all records in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._table import report

Record = dict[str, Any]
OUT = Path("runs/bench-capture.jsonl")
GRAPHS = ("onnx", "torch_export")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="architectures or groups")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th architecture from the i-th")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--list", action="store_true", help="name the architectures, and run none")
    parser.add_argument("--table", action="store_true", help="the table of what --out has already, and run none")
    parser.add_argument("--questions", type=int, default=100, help="fresh questions for each program")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for one architecture")
    parser.add_argument("--limit-mb", type=float, default=6000.0, help="resident memory of one architecture")
    parser.add_argument("--untimed", action="store_true", help="without the plain exporter, and so without time_ratio")
    parser.add_argument("--offload", action="store_true", help="run bench.offload too, where it is")
    parser.add_argument("--size", type=float, help="million parameters: the cost of five models of this size instead")
    args = parser.parse_args()
    if args.size:
        _cost(args.size)
        return
    if args.list:
        _list()
        return
    if not args.table:
        _run(args)
    records = list(_read(args.out).values())
    result = figures(records) | (offload() if args.offload else {"offload_ratio": None})
    report(HEADERS, [row(record) for record in records], result)


def _cost(millions: float) -> None:
    from bench.zoo.large import MODELS, measured

    found = [measured(name, millions) for name in MODELS]
    told = ("wall_s", "cpu_s", "peak_over_weights", "process_over_weights")
    rows = [[one["model"], ", ".join(one["proven"]), *(one[key] for key in told)] for one in found]
    headers = ("model", "proven", "wall s", "CPU s", "peak / weights", "peak of the whole process / weights")
    report(headers, rows, {one["model"]: one for one in found})


def _list() -> None:
    from bench.zoo.catalog import architectures

    found = architectures()
    for name, one in found.items():
        print(f"{name:24} {one.group:14} {', '.join(f'{symbol} {size}' for symbol, size in one.sizes.items())}")
    print(json.dumps({"models": len(found)}))


def _run(args: argparse.Namespace) -> None:
    import torch
    from bench.zoo.catalog import architectures
    from bench.zoo.examined import warm

    torch.set_num_threads(1)  # a forked process has no threads but its first
    known = architectures()
    unknown = [name for name in args.only if name not in known and name not in {one.group for one in known.values()}]
    if unknown:
        raise SystemExit(f"there is no architecture or group {', '.join(unknown)}; --list names them")
    share, shares = map(int, args.shard.split("/"))
    names = [n for n, one in known.items() if not args.only or n in args.only or one.group in args.only]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = _read(args.out) if args.resume else {}
    if not args.resume:
        args.out.unlink(missing_ok=True)
    warm()
    for name in names[share - 1 :: shares]:
        if name in done:
            continue
        record = _worked(name, args)
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(_told(record), file=sys.stderr, flush=True)


def _read(path: Path) -> dict[str, Record]:
    """The last record of each architecture."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {record["name"]: record for record in records}


def _worked(name: str, args: argparse.Namespace) -> Record:
    """The record of an architecture's process: what it wrote, and how it ended."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    record: Record = {"name": name, "stage": "started"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trueline-zoo-") as work:
        process = context.Process(target=_work, args=(name, args, Path(work), sending))
        process.start()
        sending.close()
        ended = ""
        while not ended:
            if receiving.poll(0.5):
                try:
                    record |= json.loads(receiving.recv_bytes())
                except EOFError:
                    process.join()
                    ended = "of itself" if process.exitcode == 0 else f"with exit code {process.exitcode}"
            elif time.monotonic() - started > args.limit_s:
                ended = f"by the limit of {args.limit_s:g} s"
            elif resident_mb(process.pid) > args.limit_mb:
                ended = f"by the limit of {args.limit_mb:g} MB"
        process.kill()
        process.join()
    return record | {"ended": ended, "wall_s": round(time.monotonic() - started, 1)}


def _work(name: str, args: argparse.Namespace, work: Path, sending: Any) -> None:
    import warnings

    from bench.zoo.catalog import architectures
    from bench.zoo.examined import examined

    warnings.simplefilter("ignore")  # torch's exporters warn of themselves; what counts is in the record

    def note(found: Record) -> None:
        sending.send_bytes(json.dumps(found, default=str).encode())

    one = architectures()[name]
    note({"group": one.group})
    try:
        examined(one, work=work, questions=args.questions, plain=not args.untimed, note=note)
    except Exception as error:  # noqa: BLE001 - the process boundary: an error of one model is its record
        said = f"{type(error).__name__}: {error}"[:600]
        note({"stage": "failed", "error": said, "trace": traceback.format_exc()})
    sending.close()


def resident_mb(pid: int | None) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- what is made of the records


def proven(record: Mapping[str, Any], formats: Sequence[str] = ()) -> bool:
    return any(
        rung["verdict"] == "proven" and (not formats or rung["format"] in formats) for rung in record.get("rungs") or ()
    )


def rewritten(record: Mapping[str, Any]) -> bool:
    return proven(record.get("doctor") or {}, GRAPHS)


def wrong(record: Mapping[str, Any]) -> list[str]:
    """Proven programs with a wrong output for a fresh input, before or after a rewrite."""
    found = []
    for part, where in ((record, ""), (record.get("doctor") or {}, "rewritten ")):
        for rung in part.get("rungs") or ():
            judgement = (part.get("judged") or {}).get(rung["format"])
            if rung["verdict"] == "proven" and judgement and judgement["wrong"]:
                found.append(where + rung["format"])
    return found


def false_refusals(record: Mapping[str, Any]) -> list[str]:
    """Refused programs that were right on every fresh input inside their claim."""
    found = []
    for part in (record, record.get("doctor") or {}):
        for rung in part.get("rungs") or ():
            judgement = (part.get("judged") or {}).get(rung["format"])
            if rung["verdict"] == "refused" and judgement and judgement["asked"] >= 20 and not judgement["wrong"]:
                found.append(rung["format"])
    return found


def named(record: Mapping[str, Any]) -> bool:
    """Whether the refusal names a line of the model's own file, by capture or by the doctor with the cause."""
    lines = [rung["line"] for rung in record.get("rungs") or () if rung["verdict"] == "refused"]
    said = [record.get("refusal") or "", *lines, (record.get("doctor") or {}).get("named", "")]
    return any(".py:" in line for line in said)


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """The counts of the issue. A model is refused when no format without Python is proven as it stands."""
    refused = [record for record in records if not proven(record, GRAPHS)]
    programs = [
        rung for record in records for part in (record, record.get("doctor") or {}) for rung in part.get("rungs") or ()
    ]
    ratios = [r["capture_cpu_s"] / r["plain_cpu_s"] for r in records if r.get("plain_cpu_s") and proven(r, GRAPHS)]
    return {
        "models": len(records),
        "proven": sum(proven(record) or rewritten(record) for record in records),
        "wrong": sum(len(wrong(record)) for record in records),
        "refused": len(refused),
        "named_line": sum(named(record) for record in refused),
        "rewritten": sum(rewritten(record) for record in refused),
        "false_refusals": sum(len(false_refusals(record)) for record in records),
        "time_ratio": round(statistics.median(ratios), 2) if ratios else None,
        "without_touching": sum(proven(record) for record in records),
        "as_graph": sum(proven(record, GRAPHS) for record in records),
        "programs": len(programs),
        "questions": sum(j["asked"] for r in records for j in _judgements(r)),
        "left_out": sum(sum(j["left_out"].values()) for r in records for j in _judgements(r)),
        "probes_max": max((rung["probes"] for rung in programs), default=0),
        "timed": len(ratios),
        "capture_cpu_s_median": _median([r["capture_cpu_s"] for r in records if r.get("capture_cpu_s")]),
        "plain_cpu_s_median": _median([r["plain_cpu_s"] for r in records if r.get("plain_cpu_s")]),
        "unfinished": [r["name"] for r in records if r["stage"] != "done"],
        "transformers": importlib.util.find_spec("transformers") is not None,
    }


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 2) if values else None


def _judgements(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(record.get("judged") or {}).values(), *((record.get("doctor") or {}).get("judged") or {}).values()]


HEADERS = (
    "model",
    "group",
    "onnx",
    "export",
    "script",
    "rewrite",
    "line",
    "wrong",
    "falsely",
    "probes",
    "CPU s",
    "plain CPU s",
)


def row(record: Mapping[str, Any]) -> list[object]:
    rungs = {rung["format"]: rung["verdict"] for rung in record.get("rungs") or ()}
    doctor = record.get("doctor") or {}
    probes = max((rung["probes"] for rung in record.get("rungs") or ()), default=0)
    return [
        record["name"],
        record.get("group", ""),
        *(rungs.get(name, "-") for name in (*GRAPHS, "torchscript")),
        "-" if not doctor else "proven" if rewritten(record) else "none" if not doctor.get("rewrites") else "refused",
        "-" if proven(record, GRAPHS) else "yes" if named(record) else "no",
        ",".join(wrong(record)) or "0",
        ",".join(false_refusals(record)) or "0",
        probes,
        record.get("capture_cpu_s") or 0.0,
        record.get("plain_cpu_s") or 0.0,
    ]


def _told(record: Mapping[str, Any]) -> str:
    cells = [str(cell) for cell in row(record)]
    return f"{record['stage']:9} {record['wall_s']:6.1f} s  {'  '.join(cells)}  {record.get('error', '')}"


def offload() -> dict[str, Any]:
    """The last line of `bench.offload`; empty where there is no such benchmark."""
    if importlib.util.find_spec("bench.offload") is None:
        return {"offload_ratio": None}
    done = subprocess.run([sys.executable, "-m", "bench.offload"], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
