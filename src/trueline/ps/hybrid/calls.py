"""What a worker of a hybrid job asks the process that keeps its servers, which is the master's."""

from msgspec import Struct

from trueline.full_disk import repeat_until_room
from trueline.ps.messages import ModelSpec, Routing
from trueline.ps.tasks import TasksLink

SERVICE = "trueline.ps.v1.Hybrid"


class OpenTables(Struct, frozen=True, array_like=True):
    ref: str
    spec: ModelSpec


class AlignTables(Struct, frozen=True, array_like=True):
    """The group begins after `step` applied steps."""

    ref: str
    step: int


class SaveTables(Struct, frozen=True, array_like=True):
    """`folder`: what `Save` returned for this step."""

    ref: str
    step: int
    folder: str = ""


class HybridAnswer(Struct, frozen=True, array_like=True):
    routing: Routing | None = None
    folder: str = ""


class HybridLink(TasksLink):
    """Calls wait for a master that is away, and `open` and `align` for room on a full disk; `save` and `wait_saved`
    raise DiskFull. All raise TrainError with what the master refuses."""

    service = SERVICE

    def open(self, spec: ModelSpec) -> Routing:
        """Returns when all servers hold the tables of `spec`."""
        routing = self._call_patiently("Open", OpenTables(self.ref, spec)).routing
        assert routing is not None
        return routing

    def align(self, step: int) -> None:
        """Returns when every server has applied `step` steps, or one more, which the group will repeat."""
        self._call_patiently("Align", AlignTables(self.ref, step))

    def _call_patiently(self, name: str, request: object) -> HybridAnswer:
        return repeat_until_room(lambda: self._call(name, request, HybridAnswer))

    def save(self, step: int) -> str:
        """Has the servers, which have applied `step` steps, begin to write what they hold; returns at once."""
        return self._call("Save", SaveTables(self.ref, step), HybridAnswer).folder

    def wait_saved(self, step: int, folder: str) -> str:
        """Returns the folder of the files once they are on the disk."""
        return self._call("Saved", SaveTables(self.ref, step, folder), HybridAnswer).folder
