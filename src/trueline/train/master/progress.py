"""The progress of a job: reported steps, the cost of regroups, the epochs' certificates.

Pure bookkeeping over workers' reports and the journal's rows. A step may be reported twice and by several workers; the
first report counts, and one with another digest is a fault. Torch-free.
"""

import json
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueline.events import Field
from trueline.train.master.journal import REMEMBERED, Row
from trueline.train.membership.health import describe_transfer
from trueline.train.membership.state import State
from trueline.train.settings import JobSettings
from trueline.train.step import ledger
from trueline.train.step.plan import DRAWN, order_of
from trueline.wire import train_pb2 as pb

RATE_S = 10.0
_COMMIT = ("step", "generation", "records", "digest", "loss", "workers", "gap_ms", "at_ns")
_FORMED = ("generation", "step", "gap_ms", "workers")
_TIMES = ("data_ms", "compute_ms", "wait_ms", "commit_ms", "redone")
_MEASURED = ("learning_rate", "gradient_norm")
_SIGNED = ("epoch", "steps", "records", "digest", "tally_min", "tally_max")
_NAMED = ("set_aside", "set_aside_of")
_STATED = ("reduction", "shard_records")
_EVALUATED = ("step", "records", "loss", "metrics", "best", "stop")


@dataclass(slots=True)
class ReportOutcome:
    """What a worker's report leads to: rows for the journal, events to publish, and a fault (empty: none)."""

    rows: list[Row] = field(default_factory=list)
    events: list[tuple[str, dict[str, Field]]] = field(default_factory=list)
    fault: str = ""


class JobProgress:
    """Replayed from the journal's rows by a restarted master."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.num_records = self.total_steps = self.shard_records = 0
        self.blocks: tuple[int, ...] = ()
        """Records that lie together in the source, where the order is one of windows."""
        self.logged = 0  # steps in the log: the next step to be logged
        self.loss = 0.0
        self.rates: tuple[int, tuple[float, ...]] = (-1, ())
        """Generation, and the records a second that each rank of it computes."""
        self.digests: dict[int, int] = {}
        """Of the newest `REMEMBERED` steps, for comparison with later reports of the same one."""
        self.certificates: dict[int, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.regroups: dict[int, dict[str, Any]] = {}
        self._formed: set[int] = set()  # generations of which a step is in the log
        self.records_applied = 0
        """Records of all steps that were reported to this master, repeated steps included."""
        self.reading_s = self.steps_s = 0.0
        """Seconds that the reporting worker spent in these steps: on reading, and in all."""
        self.recent: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        for kind, body in rows:
            self.apply(kind, body)

    def apply(self, kind: str, body: dict[str, Any]) -> None:
        """Enters a row of the journal."""
        match kind:
            case "FACTS":
                self.num_records, self.total_steps = body["num_records"], body["total_steps"]
                self.shard_records = body["shard_records"]
                self.blocks = tuple(body.get("blocks", ()))
            case "COMMIT":
                self.logged, self.loss = body["step"] + 1, body["loss"]
                self._remember(body["step"], body["digest"])
                self._update_gap(body)
            case "FORMED":
                self._formed.add(body["generation"])
                self._update_gap(body)
            case "TRUNCATE":
                self.truncate(body["steps"])
            case "EPOCH":
                self.certificates[body["epoch"]] = body
            case "EVAL":
                self.evaluations[body["step"]] = body
            case "VIEW":
                self.begin_regroup(body["generation"], body["reason"])

    def accept_facts(
        self, num_records: int, total_steps: int, shard_records: int, blocks: tuple[int, ...] = ()
    ) -> tuple[str, list[Row]]:
        """Compares a worker's data and model with the others'; returns the fault (empty: none) and journal rows."""
        if not self.total_steps:
            facts: dict[str, Any] = {"num_records": num_records, "total_steps": total_steps}
            facts |= {"shard_records": shard_records, **({"blocks": list(blocks)} if blocks else {})}
            self.apply("FACTS", facts)
            return "", [("FACTS", facts)]
        if (num_records, total_steps) != (self.num_records, self.total_steps):
            seen = f"{num_records} records ({total_steps} steps)"
            return f"a worker sees {seen}, the others {self.num_records} ({self.total_steps} steps)", []
        if shard_records != self.shard_records:
            cut = f"{_describe_shards(shard_records)}, the others {_describe_shards(self.shard_records)}"
            return f"a worker takes steps {cut}: its model differs or its trial of a forward failed", []
        if blocks != self.blocks:
            seen = f"{len(blocks)} blocks, the others {len(self.blocks)}"
            return f"a worker finds the records in other blocks ({seen}): its files differ, or were rewritten", []
        return "", []

    def begin_regroup(self, generation: int, reason: str) -> None:
        self.regroups[generation] = {"generation": generation, "reason": reason, "gap_ms": 0.0, "workers": 0}

    def truncate(self, steps: int) -> None:
        """Drops the steps after `steps`, which the surviving state has not applied."""
        self.logged = min(self.logged, steps)
        for kept in (self.digests, self.evaluations):
            for step in [step for step in kept if step > steps or (step == steps and kept is self.digests)]:
                del kept[step]

    def reconstruct(self, steps: int) -> None:
        """Counts `steps` steps as logged: the surviving state has applied them, though their reports are lost."""
        self.logged = max(self.logged, steps)

    def enter_report(self, progress: pb.Progress, now: float = 0.0) -> ReportOutcome:
        """Enters what is new in a worker's report."""
        outcome = ReportOutcome()
        for applied in progress.applied:
            self._enter_step(applied, outcome, now)
        for signed in progress.certificates:
            certificate = {name: getattr(signed, name) for name in _SIGNED}
            certificate |= {name: list(getattr(signed, name)) for name in _NAMED if getattr(signed, name)}
            certificate |= {name: getattr(signed, name) for name in _STATED if getattr(signed, name)}
            if self.certificates.get(signed.epoch) != certificate:
                self.certificates[signed.epoch] = certificate
                outcome.rows.append(("EPOCH", certificate))
                aside = {name: json.dumps(certificate[name]) for name in _NAMED if name in certificate}
                outcome.events.append(("epoch.certified", {**certificate, "set_aside": "[]", **aside}))
        for evaluated in progress.evaluations:
            evaluation = {name: getattr(evaluated, name) for name in _EVALUATED}
            if evaluated.step not in self.evaluations:
                self.evaluations[evaluated.step] = evaluation
                outcome.rows.append(("EVAL", evaluation))
                outcome.events.append(("evaluation.done", evaluation))
        return outcome

    def _enter_step(self, applied: pb.Applied, outcome: ReportOutcome, now: float) -> None:
        body = {name: getattr(applied, name) for name in _COMMIT}
        self._update_gap(body)
        if applied.step != self.logged:
            if self.digests.get(applied.step, applied.digest) != applied.digest:
                outcome.fault = f"two workers report different records for step {applied.step}"
            return
        self.logged, self.loss = applied.step + 1, applied.loss
        self._remember(applied.step, applied.digest)
        self.records_applied += applied.records
        self.recent.append((now, applied.records))
        if applied.rates:
            self.rates = (applied.generation, tuple(applied.rates))
        outcome.rows.append(("COMMIT", body))
        if applied.generation in self.regroups and (applied.gap_ms or applied.generation not in self._formed):
            self._formed.add(applied.generation)
            outcome.rows.append(("FORMED", {name: body[name] for name in _FORMED}))
        rates = "[" + ", ".join([f"{rate:.1f}" for rate in applied.rates]) + "]"
        times = {name: getattr(applied, name) for name in _TIMES}
        self.reading_s += applied.data_ms / 1e3
        self.steps_s += (applied.data_ms + applied.compute_ms + applied.wait_ms + applied.commit_ms) / 1e3
        fields: dict[str, Field] = {"total": self.total_steps, **body, "rates": rates, **times}
        fields |= {name: getattr(applied, name) for name in _MEASURED if getattr(applied, name)}
        if applied.shares:  # other ones than before
            fields["shares"] = "[" + ", ".join(map(str, applied.shares)) + "]"
        outcome.events.append(("step.applied", fields))

    def _remember(self, step: int, digest: int) -> None:
        self.digests[step] = digest
        self.digests.pop(step - REMEMBERED, None)

    def _update_gap(self, body: dict[str, Any]) -> None:
        regroup = self.regroups.get(body["generation"])
        if regroup is not None and body["gap_ms"] > regroup["gap_ms"]:
            regroup["gap_ms"] = body["gap_ms"]
        if regroup is not None:
            regroup["workers"] = body["workers"]

    def records_per_s(self, now: float) -> float:
        """Over the last ten seconds."""
        while self.recent and now - self.recent[0][0] > RATE_S:
            self.recent.popleft()
        if len(self.recent) < 2:
            return sum(records for _, records in self.recent) / RATE_S
        (began, first), *_ = self.recent
        return (sum(records for _, records in self.recent) - first) / max(now - began, 0.1)

    @property
    def last_step(self) -> int:
        """Steps of the whole job: fewer than planned when an evaluation has stopped it."""
        stops = [step for step, evaluation in self.evaluations.items() if evaluation["stop"]]
        return min(stops, default=self.total_steps)

    def find_faults(self, job: JobSettings, set_aside: Collection[int] = ()) -> list[str]:
        """The faults of the epochs, up to an early stop; none if every record was applied exactly once in each."""
        epoch_steps = max(1, self.total_steps // job.epochs)
        faults = []
        for epoch in range(-(-self.last_step // epoch_steps)):
            certificate = self.certificates.get(epoch)
            if certificate is None:
                faults.append(f"epoch {epoch} has no certificate")
                continue
            steps = min(epoch_steps, self.last_step - epoch * epoch_steps)
            out = sorted(set(certificate.get("set_aside", ())))
            planned = plan_records(job, self.num_records, self.blocks, epoch=epoch, steps=steps, named=out)
            drawn = self.blocks == DRAWN
            own = find_certificate_faults(certificate, steps=steps, planned=planned, set_aside=set_aside, drawn=drawn)
            faults += [f"epoch {epoch}: {fault}" for fault in own]
        return faults

    def summarize(self, job: JobSettings, state: State) -> dict[str, Any]:
        """The finished job in numbers, for users and for the bundle's lineage."""
        # Views that led to no step have no gap.
        regroups = [regroup for regroup in self.regroups.values() if regroup["workers"]]
        return {
            "name": job.name, "epochs": job.epochs, "steps": self.last_step, "records": self.num_records,
            "global_batch": job.global_batch, "workers_started": sum(state.incarnations.values()),
            "generations": state.generation, "regroups": regroups,
            "certificates": [self.certificates[epoch] for epoch in sorted(self.certificates)],
            "checkpoint": state.checkpoint, "evaluations": self.list_evaluations(), "best": self.find_best(),
            "reading_s": self.reading_s, "steps_s": self.steps_s,
            "stopped_early": self.last_step < self.total_steps,
            "set_aside": state.list_set_aside(), "quarantined": state.list_quarantined(),
        }  # fmt: skip

    def describe(self, job: JobSettings, state: State, *, now: float, uptime_s: float) -> dict[str, Any]:
        """The job as one JSON object, for `trueline status` and for programs.

        `since`: seconds for which a member has been in its phase; `rate`: records a second that it computes.
        """
        generation, rates = self.rates
        known = rates if generation == state.generation and len(rates) == len(state.view) else ()
        members = [
            {
                "ref": member.ref, "rank": member.rank, "steps": member.steps,
                "phase": describe_transfer(member) or member.phase,
                "since": round(member.phase_s + now - member.seen_at, 3),
                "rate": round(known[member.rank] if known and member.rank >= 0 else member.rate, 1),
            }
            for member in state.members.values()
        ]  # fmt: skip
        evaluations = self.list_evaluations()
        epoch_steps = max(1, self.total_steps // max(1, job.epochs))
        return {
            "name": job.name, "phase": state.phase, "generation": state.generation, "workers": state.workers,
            "members": members, "pending": list(state.pending), "quarantined": state.list_quarantined(now),
            "set_aside": state.list_set_aside(), "careful": state.careful, "committed": state.committed,
            "total_steps": self.total_steps, "epoch": min(state.committed // epoch_steps, job.epochs - 1),
            "loss": self.loss, "records_per_s": round(self.records_per_s(now), 1),
            "checkpoint": state.checkpoint, "checkpoint_step": state.checkpoint_step,
            "evaluations": {"last": evaluations[-1] if evaluations else None, "best": self.find_best()},
            "uptime_s": round(uptime_s, 1),
        }  # fmt: skip

    def list_evaluations(self) -> list[dict[str, Any]]:
        """The evaluations in the order of their steps, metrics as numbers."""
        ordered = [self.evaluations[step] for step in sorted(self.evaluations)]
        return [{**body, "metrics": json.loads(body["metrics"] or "{}")} for body in ordered]

    def find_best(self) -> dict[str, Any] | None:
        best = [evaluation for evaluation in self.list_evaluations() if evaluation["best"]]
        return {name: best[-1][name] for name in ("step", "loss", "metrics")} if best else None


@dataclass(frozen=True, slots=True)
class PlannedRecords:
    """The records that an epoch, or its first steps, were to apply."""

    records: int
    digest: int
    whole: bool
    out: tuple[int, ...] = ()  # the records among them that a certificate names as left out


def plan_records(
    job: JobSettings, num_records: int, blocks: Sequence[int] = (), *, epoch: int, steps: int, named: Sequence[int] = ()
) -> PlannedRecords:
    count = min(steps * job.global_batch, num_records)
    if count == num_records:
        return PlannedRecords(num_records, ledger.digest_of_all(num_records), True, tuple(named))
    digest, out, way = 0, list[int](), order_of(num_records, blocks, seed=job.seed)
    for start in range(0, count, 1 << 20):
        positions = np.arange(start, min(start + (1 << 20), count))
        ids = way.at(positions, epoch=epoch)
        digest += ledger.digest(ids)
        out += ids[np.isin(ids, named)].tolist() if named else []
    return PlannedRecords(count, digest % (1 << ledger.DIGEST_BITS), False, tuple(sorted(out)))


def find_certificate_faults(
    certificate: dict[str, Any],
    *,
    steps: int,
    planned: PlannedRecords,
    set_aside: Collection[int] = (),
    drawn: bool = False,
) -> list[str]:
    """The faults of an epoch by its certificate; none, when each planned record was applied exactly once.

    Records may be left out if the certificate names them and the master has set them aside. A record that was applied
    before it was set aside is not named. Where the source has an order of its own (`drawn`), the certificate names
    positions, and beside them the records that would have stood there, as all members have computed them.
    """
    out, named, of = planned.out, certificate.get("set_aside", ()), certificate.get("set_aside_of", ())
    if of and (not drawn or len(of) != len(named)):
        return [f"{len(named)} records were left out and {len(of)} are named in their places"]
    origins = dict(zip(named, of or named, strict=True))
    digest = (planned.digest - ledger.digest(np.array(out, dtype=np.int64))) % (1 << ledger.DIGEST_BITS)
    unknown = sorted({origins[id] for id in out} - set(set_aside))
    faults = [f"record {record} was left out and is not set aside" for record in unknown]
    if certificate["records"] + len(out) != planned.records:
        aside = f" and {len(out)} set aside" if out else ""
        faults.append(f"{certificate['records']} records were applied{aside}, planned were {planned.records}")
    if certificate["steps"] != steps:
        faults.append(f"{certificate['steps']} steps were applied, the epoch has {steps}")
    if certificate["digest"] != digest:
        faults.append(f"the digest of the applied records is {certificate['digest']:06x}, not {digest:06x}")
    fewest, most = certificate["tally_min"], certificate["tally_max"]
    untallied = fewest == -1 and most <= 0  # too many records for a tally, or all left out
    once = most == 1 and (fewest in (-1, 1) or (fewest == 0 and (out or not planned.whole)))
    if not (untallied or once):
        faults.append(f"records were applied {max(fewest, 0)} to {most} times")
    return faults


def _describe_shards(records: int) -> str:
    return f"in shards of {records} records" if records else "whole"
