"""The slots of workers and servers: what to start, and when a death ends the job. Pure: `now` is an argument."""

from dataclasses import dataclass, field

from trueline.engine.contract import make_ref, parse_ref


@dataclass(slots=True)
class _Slot:
    incarnation: int = 0  # of the next process
    ref: str = ""  # of the process that runs; empty: none
    failures: int = 0  # deaths in a row without anything done
    until: float = 0.0  # when the next process may start


@dataclass(slots=True)
class Slots:
    """The slots of one role. `most_failures`: deaths of a slot in a row, before it did anything, that end the job."""

    role: str
    count: int
    most_failures: int = 5
    started: int = 0
    _slots: dict[int, _Slot] = field(default_factory=dict)

    @property
    def alive(self) -> list[str]:
        return [slot.ref for _, slot in sorted(self._slots.items()) if slot.ref]

    def adopt(self, ref: str) -> None:
        """A process that runs already, as the engine says."""
        _, number, incarnation = parse_ref(ref)
        slot = self._slots.setdefault(number, _Slot())
        slot.ref, slot.incarnation = ref, max(slot.incarnation, incarnation + 1)

    def note_started(self, ref: str) -> None:
        """A process that was started before, and runs no more (a row of the journal)."""
        _, number, incarnation = parse_ref(ref)
        slot = self._slots.setdefault(number, _Slot())
        slot.incarnation = max(slot.incarnation, incarnation + 1)
        self.started += 1

    def start_due(self, now: float) -> list[str]:
        """The refs of processes to start now."""
        due = []
        for number in range(self.count):
            slot = self._slots.setdefault(number, _Slot())
            if not slot.ref and slot.until <= now:
                slot.ref = make_ref(self.role, number, slot.incarnation)
                slot.incarnation += 1
                self.started += 1
                due.append(slot.ref)
        return due

    def note_death(self, ref: str, now: float) -> bool:
        """A process has ended; False: it was not of this roster any more. A slot that fails again waits longer."""
        slot = self._slots.get(parse_ref(ref)[1])
        if slot is None or slot.ref != ref:
            return False
        slot.ref = ""
        slot.failures += 1
        slot.until = now + (0.0 if slot.failures < 2 else min(10.0, 0.25 * 2.0 ** (slot.failures - 1)))
        return True

    def note_progress(self, ref: str) -> None:
        """It has done something: earlier deaths of its slot count no more."""
        slot = self._slots.get(parse_ref(ref)[1])
        if slot is not None:
            slot.failures, slot.until = 0, 0.0

    @property
    def hopeless(self) -> int:
        """The number of a slot whose processes die before they do anything; -1: none."""
        bad = (number for number, slot in self._slots.items() if slot.failures >= self.most_failures)
        return next((number for number in sorted(bad) if number < self.count), -1)

    @property
    def surplus(self) -> list[str]:
        """Processes of slots that the job no longer has."""
        return [slot.ref for number, slot in sorted(self._slots.items()) if slot.ref and number >= self.count]
