"""Injected faults: a worker sends itself a signal at a named point of the protocol, at a logical step."""

import json
import os
import time
from pathlib import Path

import torch

from trueline.engine.contract import parse_ref
from trueline.train.job_dir import JobDir
from trueline.train.settings import Fault, Phase


class Faults:
    """The faults of one worker. Without any, a call only tests a list."""

    def __init__(self, faults: tuple[Fault, ...], ref: str) -> None:
        slot, incarnation = parse_ref(ref)[1:] if faults else (-1, -1)
        mine = [(number, fault) for number, fault in enumerate(faults) if fault.slot == slot]
        self._ref = ref
        self._due = [(number, fault) for number, fault in mine if fault.incarnation in (incarnation, -1)]

    def at(self, phase: Phase, step: int) -> None:
        """Strikes if a fault is due in `phase` after `step` applied steps."""
        if not self._due:
            return
        for number, fault in self._pop_due(phase, step):
            self._strike(number, fault, step)

    def arm_backward(self, step: int, model: torch.nn.Module) -> None:
        """Strikes in the middle of backward: when the last gradient is ready, the others are on their way."""
        if not self._due or not (due := self._pop_due("backward", step)):
            return

        def strike_once(_: torch.Tensor) -> None:
            while due:
                self._strike(*due.pop(0), step)

        first = next(one for one in model.parameters() if one.requires_grad)
        first.register_post_accumulate_grad_hook(strike_once)  # type: ignore[no-untyped-call]

    def _pop_due(self, phase: Phase, step: int) -> list[tuple[int, Fault]]:
        popped = [due for due in self._due if due[1].phase == phase and step >= due[1].step]
        self._due = [due for due in self._due if due not in popped]
        return popped

    def _strike(self, number: int, fault: Fault, step: int) -> None:
        if fault.incarnation >= 0 or self._claim(number, fault, step):
            os.kill(os.getpid(), fault.signal)

    def _claim(self, number: int, fault: Fault, step: int) -> bool:
        """Claims a fault for this worker; False when an earlier worker of this slot has carried it out."""
        folder = JobDir(Path(os.environ["TRUELINE_JOB"])).faults
        folder.mkdir(exist_ok=True)
        record = {"phase": fault.phase, "step": step, "worker": self._ref, "signal": fault.signal,
                "at_ns": time.monotonic_ns()}  # fmt: skip
        try:
            with (folder / str(number)).open("x") as file:
                json.dump(record, file)
        except FileExistsError:
            return False
        return True
