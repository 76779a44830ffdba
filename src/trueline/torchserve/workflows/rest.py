"""TorchServe's management API of workflows. Only translates.

Source: TorchServe 0.12's WorkflowMgmtRequestHandler and its messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from trueline.errors import NotFound, RequestError
from trueline.serve.handlers.messages import reply
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
    workflow = await workflows.register(url, given.get("workflow_name", ""), given)
    return responses.status(f"Workflow {workflow.name} has been registered and scaled successfully.")


def list_workflows(workflows: Workflows, query: Mapping[str, str]) -> Response:
    """`GET /workflows?limit=100&next_page_token=0`, by name."""
    listed = workflows.desired()
    page, names = responses.page(sorted(listed), query)
    page["workflows"] = [{"workflowName": name, "workflowUrl": listed[name].source} for name in names]
    return reply(200, responses.pretty(page))


def describe(workflows: Workflows, name: str) -> Response:
    """`GET /workflows/NAME`: its models' common settings and its graph. Raises UnknownWorkflow, NotReady."""
    found = workflows.find(name)
    common = found.spec.common
    dag = ", ".join(f"{node}=[{', '.join(nexts)}]" for node, nexts in found.spec.dag.items())
    description = {
        "workflowName": name,
        "workflowUrl": found.registered.source,
        "minWorkers": common.min_workers,
        "maxWorkers": common.max_workers,
        "batchSize": common.batch_size,
        "maxBatchDelay": common.max_batch_delay,
        "workflowDag": f"{{{dag}}}",
    }
    return reply(200, responses.pretty([description]))


async def unregister(workflows: Workflows, name: str) -> Response:
    """`DELETE /workflows/NAME`. Raises UnknownWorkflow."""
    await workflows.unregister(name)
    return responses.status(f'Workflow "{name}" unregistered')
