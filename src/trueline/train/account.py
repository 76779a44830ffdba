"""The master's account of a job: which steps were reported, what regrouping cost, what the epochs' certificates say.

Pure bookkeeping over what workers report and what the journal holds. Reports may come twice and from several workers;
the first one of a step counts, and one with another digest is an alarm. Torch-free.
"""

from __future__ import annotations

from typing import Any

from trueline.train import ledger
from trueline.train.journal import Row
from trueline.train.members import State
from trueline.train.settings import JobSettings
from trueline.wire import train_pb2 as pb


class Account:
    """Built from the journal's rows, so that a restarted master goes on where the last one was."""

    def __init__(self, rows: list[Row]) -> None:
        self.num_records = 0
        self.total_steps = 0
        self.logged = 0
        """Steps in the log: the next step to be logged."""
        self.digests: dict[int, int] = {}
        self.certificates: dict[int, dict[str, int]] = {}
        self.regroups: dict[int, dict[str, Any]] = {}
        for kind, body in rows:
            self._replay(kind, body)

    def _replay(self, kind: str, body: dict[str, Any]) -> None:
        match kind:
            case "FACTS":
                self.num_records, self.total_steps = body["num_records"], body["total_steps"]
            case "COMMIT":
                self.logged = body["step"] + 1
                self.digests[body["step"]] = body["digest"]
                self._gap(body)
            case "TRUNCATE":
                self.truncate(body["steps"])
            case "EPOCH":
                self.certificates[body["epoch"]] = body
            case "VIEW":
                self.regrouping(body["generation"], body["reason"])

    def accept(self, num_records: int, total_steps: int) -> tuple[str, list[Row]]:
        """Checks a worker's view of the data against the others'; returns the fault in words (empty: none) and rows."""
        if not self.total_steps:
            self.num_records, self.total_steps = num_records, total_steps
            return "", [("FACTS", {"num_records": num_records, "total_steps": total_steps})]
        if (num_records, total_steps) == (self.num_records, self.total_steps):
            return "", []
        fault = (
            f"a worker sees {num_records} records ({total_steps} steps), "
            f"the others {self.num_records} ({self.total_steps} steps)"
        )
        return fault, []

    def regrouping(self, generation: int, reason: str) -> None:
        self.regroups[generation] = {"generation": generation, "reason": reason, "gap_ms": 0.0, "workers": 0}

    def truncate(self, steps: int) -> None:
        """The surviving state has applied `steps` steps: what the log has beyond them never happened."""
        self.logged = min(self.logged, steps)
        for step in [step for step in self.digests if step >= steps]:
            del self.digests[step]

    def reconstruct(self, steps: int) -> None:
        """The surviving state has applied `steps` steps, though nobody is left to report the last of them."""
        self.logged = max(self.logged, steps)

    def report(self, progress: pb.Progress) -> tuple[list[Row], str]:
        """Rows for the journal (steps and certificates not known yet) and the fault in words (empty: none)."""
        rows: list[Row] = []
        fault = ""
        for applied in progress.applied:
            body = {"step": applied.step, "generation": applied.generation, "records": applied.records,
                    "digest": applied.digest, "loss": applied.loss, "workers": applied.workers,
                    "gap_ms": applied.gap_ms, "at_ns": applied.at_ns}  # fmt: skip
            self._gap(body)
            if applied.step == self.logged:
                self.logged += 1
                self.digests[applied.step] = applied.digest
                rows.append(("COMMIT", body))
            elif self.digests.get(applied.step, applied.digest) != applied.digest:
                fault = f"two workers report different records for step {applied.step}"
        for signed in progress.certificates:
            certificate = {field: getattr(signed, field) for field in
                           ("epoch", "steps", "records", "digest", "tally_min", "tally_max")}  # fmt: skip
            if self.certificates.get(signed.epoch) != certificate:
                self.certificates[signed.epoch] = certificate
                rows.append(("EPOCH", certificate))
        return rows, fault

    def _gap(self, body: dict[str, Any]) -> None:
        regroup = self.regroups.get(body["generation"])
        if regroup is not None and body["gap_ms"] > regroup["gap_ms"]:
            regroup["gap_ms"] = body["gap_ms"]
        if regroup is not None:
            regroup["workers"] = body["workers"]

    def faults(self, epochs: int) -> list[str]:
        """What is wrong with the job's epochs: nothing, when every record was applied exactly once in each."""
        expected = ledger.digest_of_all(self.num_records)
        found = []
        for epoch in range(epochs):
            certificate = self.certificates.get(epoch)
            if certificate is None:
                found.append(f"epoch {epoch} has no certificate")
                continue
            steps = self.total_steps // epochs
            wrong = ledger.certificate_faults(
                certificate, num_records=self.num_records, steps=steps, expected_digest=expected
            )
            found += [f"epoch {epoch}: {fault}" for fault in wrong]
        return found

    def summary(self, job: JobSettings, state: State) -> dict[str, Any]:
        """The job in numbers, for people and for the bundle's lineage."""
        # A gap is what the workers lost to a regroup; views that led to no step of their own have none.
        regroups = [regroup for regroup in self.regroups.values() if regroup["workers"]]
        return {
            "name": job.name,
            "epochs": job.epochs,
            "steps": self.total_steps,
            "records": self.num_records,
            "global_batch": job.global_batch,
            "workers_started": sum(state.incarnations.values()),
            "generations": state.generation,
            "regroups": regroups,
            "certificates": [self.certificates[epoch] for epoch in sorted(self.certificates)],
            "checkpoint": state.checkpoint,
        }
