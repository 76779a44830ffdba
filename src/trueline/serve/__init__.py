"""Answers requests with the programs of bundles, over HTTP. No torch in this room.

`trueline.serve(source)` runs a server until it is stopped; `trueline.serve.start(source)` runs one in another process.
"""

from trueline._verbs import make_callable
from trueline.serve.api import RunningServer, start

__all__ = ["RunningServer", "start"]

make_callable(__name__)
