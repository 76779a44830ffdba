"""Opens the engine at an address. The local one is all there is; its address is its agent's socket."""

from trueline.engine.contract import Engine
from trueline.engine.local.client import LocalEngine


def open_engine(address: str) -> Engine:
    """Returns the engine that starts the processes of a job or pool. Nothing is connected before its first use."""
    return LocalEngine(address)
