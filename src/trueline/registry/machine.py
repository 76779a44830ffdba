"""How busy this machine is, as MLflow names it (`system/…`), read from /proc."""

from __future__ import annotations

from pathlib import Path

_MIB = 2**20


class MachineLoad:
    """CPU and memory of the machine since the last reading. Source: proc_stat(5), proc_meminfo(5)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._busy, self._total = self._cpu()

    def read(self) -> dict[str, float]:
        """Percent of all cores and of the memory, and MiB of memory in use; empty where the system does not say."""
        before, (self._busy, self._total) = (self._busy, self._total), self._cpu()
        busy, total = self._busy - before[0], self._total - before[1]
        memory = self._memory()
        found = {"system/cpu_utilization_percentage": 100 * busy / total} if total else {}
        if memory.get("MemTotal"):
            used = memory["MemTotal"] - memory.get("MemAvailable", 0)
            found["system/system_memory_usage_megabytes"] = used * 1024 / _MIB
            found["system/system_memory_usage_percentage"] = 100 * used / memory["MemTotal"]
        return found

    def _cpu(self) -> tuple[int, int]:
        try:
            ticks = [int(value) for value in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        idle = sum(ticks[3:5])  # idle and waiting for a disk
        return sum(ticks) - idle, sum(ticks)

    def _memory(self) -> dict[str, int]:
        try:
            lines = (self._proc / "meminfo").read_text().splitlines()
        except OSError:
            return {}
        return {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
