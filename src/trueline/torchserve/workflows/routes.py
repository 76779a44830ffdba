"""The management paths of workflows.

Source: TorchServe 0.12's WorkflowMgmtRequestHandler, as the contract page has it.
"""

from collections.abc import Coroutine, Mapping
from typing import Any

from trueline.errors import MethodNotAllowed, NotFound
from trueline.serve.handlers.messages import reply
from trueline.serve.protocols.dispatch import NO_METHOD, NO_RESOURCE
from trueline.storage.object_store import redact_uri
from trueline.torchserve import responses
from trueline.torchserve.parameters import parameters_of, url_of
from trueline.torchserve.responses import pretty
from trueline.torchserve.workflows.executor import Workflow
from trueline.torchserve.workflows.registry import Workflows
from trueline.web.messages import Request, Response


def route(
    workflows: Workflows, method: str, parts: list[str], query: dict[str, str], request: Request
) -> Response | Coroutine[Any, Any, Response]:
    """The response of /workflows and the `parts` after it. Raises RequestError."""
    match method, parts:
        case "POST", []:
            return _register(workflows, query | parameters_of(request))
        case "GET", []:
            registered = workflows.desired_workflows()
            page, names = responses.page(sorted(registered), query)
            urls = {name: redact_uri(registered[name].source) for name in names}
            page["workflows"] = [{"workflowName": name, "workflowUrl": url} for name, url in urls.items()]
            return reply(200, pretty(page))
        case "GET", [name]:
            return reply(200, pretty([_describe(workflows.find(name))]))
        case "DELETE", [name]:
            return _unregister(workflows, name)
        case _, [] | [_]:
            raise MethodNotAllowed(NO_METHOD)
        case _:
            raise NotFound(NO_RESOURCE)


async def _register(workflows: Workflows, given: Mapping[str, str]) -> Response:
    workflow = await workflows.register(url_of(given), given.get("workflow_name", ""), given)
    return responses.status(f"Workflow {workflow.name} has been registered and scaled successfully.")


async def _unregister(workflows: Workflows, name: str) -> Response:
    await workflows.unregister(name)
    return responses.status(f'Workflow "{name}" unregistered')


def _describe(workflow: Workflow) -> dict[str, Any]:
    """The common settings of its models and its graph."""
    common = workflow.spec.common
    dag = ", ".join(f"{node}=[{', '.join(nexts)}]" for node, nexts in workflow.spec.dag.items())
    return {
        "workflowName": workflow.name, "workflowUrl": redact_uri(workflow.registered.source),
        "minWorkers": common.min_workers, "maxWorkers": common.max_workers, "batchSize": common.batch_size,
        "maxBatchDelay": common.max_batch_delay, "workflowDag": f"{{{dag}}}",
    }  # fmt: skip
