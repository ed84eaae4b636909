"""Azure as one object: who answers for which host, what was asked, and what is to go wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.jobs.azure_service import history, login
from tests.jobs.azure_service.blobs import SUFFIX, Blobs
from tests.jobs.azure_service.exchange import Reply, Request, error
from tests.jobs.azure_service.faults import Fault
from tests.jobs.azure_service.jobs import Jobs
from tests.jobs.azure_service.operations import PATH, Operations
from tests.jobs.azure_service.workspace import Workspace

SUBSCRIPTION, GROUP, WORKSPACE = "00000000-0000-0000-0000-000000000000", "group", "workspace"
REGION = "westeurope"
_SCOPE = re.compile(
    r"/subscriptions/(?P<subscription>[^/]+)/resourcegroups/(?P<group>[^/]+)"
    r"(?:/providers/(?P<provider>[\w.]+))?(?P<rest>/.*)?",
    re.I,
)


class AzureService:
    """The service behind the `azure_service` fixture: one subscription with one resource group and one workspace.

    Attributes:
        workspaces: by name.
        blobs: what the storage accounts hold.
        operations: how long, and how, long-running operations end.
        requests: what was asked of anything but the sign-in, in order.
        environment: the variables that make a process use this service.
        hosts: answers for further hosts, such as `prices.azure.com`.
    """

    def __init__(self) -> None:
        self.operations, self.blobs = Operations(), Blobs()
        self.workspaces: dict[str, Workspace] = {}
        self.requests: list[Request] = []
        self.environment: dict[str, str] = {}
        self.hosts: dict[str, Callable[[Request], Reply]] = {}
        self._faults: list[Fault] = []
        self.add_workspace(WORKSPACE)

    @property
    def workspace(self) -> Workspace:
        """The one that is there from the beginning."""
        return self.workspaces[WORKSPACE]

    @property
    def jobs(self) -> Jobs:
        """The jobs in it."""
        return self.workspace.jobs

    def client(self, **options: Any) -> Any:
        """An `MLClient` for it, signed in as any user's would be; options such as `retry_total` go to azure-core."""
        from azure.ai.ml import MLClient
        from azure.identity import DefaultAzureCredential

        return MLClient(DefaultAzureCredential(), SUBSCRIPTION, GROUP, WORKSPACE, enable_telemetry=False, **options)

    def add_workspace(self, name: str, properties: dict[str, Any] | None = None, region: str = REGION) -> None:
        identity = (
            f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{name}"
        )
        self.workspaces[name] = Workspace(identity, properties or {}, region, self.operations)

    def write_log(self, job: str, text: str, name: str = "user_logs/std_log.txt") -> None:
        """Append to a job's log."""
        key = history.log_key(job, name)
        self.blobs.content[key] = self.blobs.content.get(key, b"") + text.encode()
        self.blobs.metadata.setdefault(key, {})

    def write_output(self, job: str, output: str, name: str, content: bytes) -> None:
        """Put a file into one of a job's outputs."""
        key = history.output_key(job, output, name)
        self.blobs.content[key], self.blobs.metadata[key] = content, {}

    def asked(self, method: str, pattern: str) -> list[Request]:
        """The requests of a kind so far; the pattern is searched in the URL without its query."""
        return [each for each in self.requests if each.method == method and re.search(pattern, each.url, re.I)]

    def fail(
        self, method: str, pattern: str, status: int, code: str = "", message: str = "", times: int = 1, **headers: str
    ) -> None:
        """Answer the next requests of a kind with an error; `retry_after="1"` becomes a header."""
        self._faults.append(Fault(method, pattern, times, error(status, code, message, **headers), handled=False))

    def drop(self, method: str, pattern: str, times: int = 1, handled: bool = False) -> None:
        """Hang up on the next requests of a kind, after doing what they ask if `handled`."""
        self._faults.append(Fault(method, pattern, times, None, handled))

    def answer(self, request: Request) -> Reply | None:
        """What the proxy sends back; None hangs up."""
        if request.host == login.HOST:
            return login.answer(request)
        self.requests.append(request)
        fault = next((fault for fault in self._faults if fault.strikes(request)), None)
        if fault is None:
            return self._route(request)
        if fault.handled:
            self._route(request)
        return fault.reply

    def _route(self, request: Request) -> Reply:
        if request.host in self.hosts:
            return self.hosts[request.host](request)
        if request.host.endswith(SUFFIX):
            return self.blobs.answer(request)
        named = re.search(r"/workspaces/([^/]+)", request.path)
        if request.host.endswith(".api.azureml.ms"):
            return history.answer(request, self.workspaces[named[1] if named else WORKSPACE], self.blobs)
        if request.host == "management.azure.com":
            return self.manage(request)
        return error(404, "NotFound", f"Nothing answers for {request.host}.")

    def manage(self, request: Request) -> Reply:
        """Azure Resource Manager's own answer, for a test that changes it."""
        if request.path.startswith(PATH):
            return self.operations.answer(request)
        scope = _SCOPE.fullmatch(request.path)
        if scope is None:
            return error(404, "InvalidResourceType", f"The path {request.path} is not known.")
        if scope["subscription"] != SUBSCRIPTION:
            name = scope["subscription"]
            return error(404, "SubscriptionNotFound", f"The subscription '{name}' could not be found.")
        if scope["group"].lower() != GROUP:
            return error(404, "ResourceGroupNotFound", f"Resource group '{scope['group']}' could not be found.")
        if scope["provider"] is None and scope["rest"]:
            return Reply({"value": []})  # the steps of a deployment, which a client may show
        if scope["provider"] is None:
            return Reply({"id": request.path, "name": GROUP, "location": REGION, "properties": {}})
        parts = (scope["rest"] or "").strip("/").split("/", 2)
        if scope["provider"].lower() == "microsoft.resources":
            return self._deploy(parts[1:], request)
        return self._workspace(parts[1:], request)

    def _workspace(self, parts: list[str], request: Request) -> Reply:
        if not parts:
            return Reply({"value": [workspace.resource() for workspace in self.workspaces.values()]})
        found = self.workspaces.get(parts[0])
        if found is None:
            kind = "Microsoft.MachineLearningServices/workspaces"
            message = f"The Resource '{kind}/{parts[0]}' under resource group '{GROUP}' was not found."
            return error(404, "ResourceNotFound", message)
        return Reply(found.resource()) if parts[1:] == [] else found.answer(parts[1], request)

    def _deploy(self, parts: list[str], request: Request) -> Reply:
        """A template deployment, which is how azure-ai-ml makes a workspace."""
        if request.method == "GET":
            return Reply(_deployment(parts[0], "Succeeded"))
        given = {name: each.get("value") for name, each in request.json["properties"]["parameters"].items()}

        def finish() -> None:
            self.add_workspace(given["workspaceName"], {"description": given.get("description")}, given["location"])

        return self.operations.accept(_deployment(parts[0], "Accepted"), 201, finish)


def _deployment(name: str, state: str) -> dict[str, Any]:
    identity = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Resources/deployments/{name}"
    return {"id": identity, "name": name, "properties": {"provisioningState": state, "duration": "PT1.5S"}}
