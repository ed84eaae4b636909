"""The jobs of a workspace: created once, then running through their states as they are asked about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.jobs.azure_service.exchange import Reply, Request, error
from tests.jobs.azure_service.operations import Operations

COMPLETED = ("Queued", "Running", "Completed")
_CHANGEABLE = ("description", "tags", "displayName", "properties", "isArchived")


@dataclass
class Job:
    """One job.

    Attributes:
        body: what was submitted.
        states: what each question about its state answers, in turn; the last one stays.
        failure: code and message, shown once it has failed.
    """

    name: str
    body: dict[str, Any]
    states: list[str]
    failure: tuple[str, str] | None = None

    def next_state(self) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@dataclass
class Jobs:
    """The jobs by name.

    Attributes:
        states: those that jobs submitted from now on go through.
    """

    workspace: str
    states: tuple[str, ...] = COMPLETED
    failure: tuple[str, str] | None = None
    _jobs: dict[str, Job] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Job:
        return self._jobs[name]

    def __contains__(self, name: str) -> bool:
        return name in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Any:
        return iter(self._jobs)

    def answer(self, path: str, request: Request, operations: Operations) -> Reply:
        if not path:
            return Reply({"value": [self._resource(job, job.states[0]) for job in reversed(self._jobs.values())]})
        name, _, action = path.partition("/")
        if request.method == "PUT":
            return self._put(name, request.json)
        if name not in self._jobs:
            return error(404, "UserError", f"Job {name} not found.")
        job = self._jobs[name]
        if action == "cancel":
            return operations.accept(b"", 202, lambda: job.states.__setitem__(slice(None), ["Canceled"]))
        return Reply(self._resource(job, job.next_state()))

    def _put(self, name: str, body: dict[str, Any]) -> Reply:
        known = self._jobs.get(name)
        changed = known and [
            key
            for key in body["properties"]
            if key not in _CHANGEABLE and body["properties"][key] != known.body["properties"].get(key)
        ]
        if changed:
            return error(400, "UserError", _TAKEN.format(", ".join(changed)))
        job = self._jobs.setdefault(name, Job(name, body, list(self.states), self.failure))
        return Reply(self._resource(job, "Starting" if known is None else job.states[0]), 200 if known else 201)

    def _resource(self, job: Job, state: str) -> dict[str, Any]:
        studio = f"https://ml.azure.com/runs/{job.name}?wsid={self.workspace}"
        artifacts = f"azureml://datastores/workspaceartifactstore/ExperimentRun/dcid.{job.name}"
        outputs = job.body["properties"].get("outputs") or {}
        services = {"Studio": {"jobServiceType": "Studio", "endpoint": studio}}
        return {
            "id": f"{self.workspace}/jobs/{job.name}",
            "name": job.name,
            "type": "Microsoft.MachineLearningServices/workspaces/jobs",
            "systemData": {"createdAt": "2026-11-20T12:00:00Z", "createdBy": "someone"},
            "properties": {
                "properties": {},
                **job.body["properties"],
                "status": state,
                "services": services,
                "outputs": {**outputs, "default": {"jobOutputType": "uri_folder", "uri": artifacts}},
            },
        }


_TAKEN = (  # as in a public report: Azure/azure-sdk-for-python pull request 47389
    "A job with this name already exists. If you are trying to create a new job, use a different name. If you are "
    "trying to update an existing job, the existing job's {} cannot be changed. Only description, tags, displayName, "
    "properties, and isArchived can be updated."
)
