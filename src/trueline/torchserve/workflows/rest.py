"""What TorchServe's management API says of workflows. Only translates.

Source: TorchServe 0.12's WorkflowMgmtRequestHandler and its messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from trueline.errors import NotFound, RequestError
from trueline.serve.handlers.response import reply
from trueline.torchserve import responses
from trueline.torchserve.workflows.registry import Workflows
from trueline.web.messages import Response


async def register(workflows: Workflows, given: Mapping[str, str]) -> Response:
    """`POST /workflows?url=&workflow_name=&response_timeout=&startup_timeout=`. Raises RequestError."""
    url = given.get("url")
    if url is None:
        raise RequestError("Parameter url is required.")
    if not url:
        raise NotFound("empty url")
    made = await workflows.register(url, given.get("workflow_name", ""), given)
    return responses.status(f"Workflow {made.name} has been registered and scaled successfully.")


def listed(workflows: Workflows, query: Mapping[str, str]) -> Response:
    """`GET /workflows?limit=100&next_page_token=0`, by name."""
    told = workflows.wanted()
    page, names = responses.page(sorted(told), query)
    page["workflows"] = [{"workflowName": name, "workflowUrl": told[name].source} for name in names]
    return reply(200, responses.pretty(page))


def described(workflows: Workflows, name: str) -> Response:
    """`GET /workflows/NAME`: the settings of all its models, and its graph. Raises UnknownWorkflow, NotReady."""
    found = workflows.find(name)
    common = found.spec.common
    dag = ", ".join(f"{node}=[{', '.join(nexts)}]" for node, nexts in found.spec.dag.items())
    told = {
        "workflowName": name,
        "workflowUrl": found.told.source,
        "minWorkers": common.min_workers,
        "maxWorkers": common.max_workers,
        "batchSize": common.batch_size,
        "maxBatchDelay": common.max_batch_delay,
        "workflowDag": f"{{{dag}}}",
    }
    return reply(200, responses.pretty([told]))


async def unregister(workflows: Workflows, name: str) -> Response:
    """`DELETE /workflows/NAME`. Raises UnknownWorkflow."""
    await workflows.unregister(name)
    return responses.status(f'Workflow "{name}" unregistered')
