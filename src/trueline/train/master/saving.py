"""The checkpoints that operators request, and when a halt has its own. Pure; torch-free.

Any checkpoint of a certain step or of a later one meets a request. That of a halt is more: its writer applies no step
after it, so its report bears a mark. A regular checkpoint that arrives meanwhile ends nothing: the others may have
applied further steps since it was begun.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class SaveRequests:
    save_from: int = 0
    """A checkpoint of this step or a later one is wanted; 0: none is."""
    halting: str = ""
    """Why the job ends once the checkpoint of its last step is recorded; empty: it continues."""

    def want(self, applied: int) -> int:
        """An operator wants a checkpoint of what is applied by now; returns the step that it has at least."""
        self.save_from = max(applied, 1)
        return self.save_from

    def halt(self, why: str, applied: int) -> bool:
        """The job is to end with a checkpoint; False: a request before said so."""
        if self.halting:
            return False
        self.halting = why
        self.want(applied)
        return True

    def note(self, step: int, *, last: bool, applied: int) -> bool:
        """Enters a checkpoint of `step`; True if the job ends with it.

        `last`: its writer applies no step after it. `applied`: steps that are known to be applied. If they are more
        than `step`, the group has continued without the writer, and the worker that leads it writes another checkpoint.

        >>> requests = SaveRequests(halting="trueline halt", save_from=3)
        >>> [requests.note(step, last=last, applied=5) for step, last in ((4, False), (4, True), (5, True))]
        [False, False, True]
        """
        if self.halting:
            return last and step >= applied
        if step >= self.save_from:
            self.save_from = 0
        return False
