"""TorchServe's interfaces, as an extension of `trueline.serve`."""

import asyncio
from pathlib import Path
from typing import Any, Literal

from trueline.errors import UsageError
from trueline.serve.assembly import Core
from trueline.serve.handlers.loader import name_in_store
from trueline.serve.models.sources import Store, in_thread
from trueline.serve.protocols.dispatch import Dispatch, RouteTable
from trueline.serve.protocols.router import Routes
from trueline.torchserve.management import Management
from trueline.torchserve.responses import TorchServeErrors
from trueline.torchserve.rest import TorchServeRoutes
from trueline.torchserve.workflows.registry import Workflows
from trueline.web.access_log import AccessLog
from trueline.web.auth import Keys


class TorchServe:
    """The REST and gRPC APIs, the management API, workflows and errors."""

    def __init__(
        self, management: Management | None = None, workflows: Workflows | None = None, keys: Keys | None = None, *,
        strict: bool = False,
    ) -> None:  # fmt: skip
        """`strict`: TorchServe's statuses also where the server's own are more precise."""
        self.errors = TorchServeErrors(strict=strict)
        self.companion, self.strict = workflows, strict
        self._management, self._keys = management, keys

    def routes(self, dispatch: Dispatch) -> RouteTable:
        return TorchServeRoutes(dispatch, self.companion, strict=self.strict)

    def management(self) -> Management:
        assert self._management is not None
        return self._management

    def grpc_services(
        self, kind: Literal["inference", "management"], routes: Routes, log: AccessLog | None
    ) -> list[Any]:
        from trueline.torchserve import grpc  # takes time and memory that only servers with such a port spend

        if kind == "inference":
            return [grpc.Inference(routes, self._keys, log, strict=self.strict).handler()]
        return [grpc.Managed(self.management(), self._keys, log, strict=self.strict).handler()]


def extend(core: Core) -> TorchServe:
    """TorchServe's interfaces for a server. Raises UsageError for a workflow store that is no folder."""
    settings, loop = core.settings, asyncio.get_running_loop()
    store = core.store
    if settings.workflow_store is not None:
        if not Path(settings.workflow_store).is_dir():
            raise UsageError(f"the workflow store {settings.workflow_store} is no folder")
        store = Store(Path(settings.workflow_store), name_in_store)
    workflows = Workflows(
        core.fleet, loop, lambda work: in_thread(loop, work), core.sources.find_allowed, store=store,
        state=core.state, handlers=core.handlers, download=core.sources.download,
    )  # fmt: skip
    strict = settings.torchserve_strict
    management = Management(
        core.fleet,
        core.store,
        core.sources.find_allowed,
        loop,
        core.keys,
        workflows,
        strict=strict,
        forget=core.sources.forget,
    )
    return TorchServe(management, workflows, core.keys, strict=strict)
