"""One workspace: what lies in it, answered as Azure Resource Manager does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.jobs.azure_service.blobs import ACCOUNT_KEY, SUFFIX
from tests.jobs.azure_service.exchange import Reply, Request, error
from tests.jobs.azure_service.jobs import Jobs
from tests.jobs.azure_service.operations import Operations

ACCOUNT = "workspacestorage"
_CREATED = {"createdAt": "2026-11-20T12:00:00Z", "lastModifiedAt": "2026-11-20T12:00:00Z", "createdBy": "someone"}


class Workspace:
    """Resources by their path in the workspace, such as `computes/gpu` or `models/net/versions/1`.

    Attributes:
        id: the resource id.
        properties: of the workspace itself.
        resources: all that lies in it.
        jobs: the jobs.
    """

    def __init__(self, identity: str, properties: dict[str, Any], region: str, operations: Operations) -> None:
        self.id, self.name, self.region = identity, identity.rpartition("/")[2], region
        self._operations = operations
        self.properties = {
            "discoveryUrl": f"https://{region}.api.azureml.ms/discovery",
            "mlFlowTrackingUri": f"azureml://{region}.api.azureml.ms/mlflow/v1.0{identity}",
            "workspaceId": "33333333-3333-3333-3333-333333333333",
            "storageAccount": f"{identity.partition('/providers')[0]}/providers/Microsoft.Storage/storageAccounts/x",
            **properties,
        }
        self.resources: dict[str, dict[str, Any]] = {}
        self.jobs = Jobs(self.id)
        for name, container in (("workspaceblobstore", "blobstore"), ("workspaceartifactstore", "azureml")):
            self._store(f"datastores/{name}", {"properties": _datastore(container)})
        self.resources["datastores/workspaceblobstore"]["properties"]["isDefault"] = True

    def resource(self) -> dict[str, Any]:
        kind = {"type": "Microsoft.MachineLearningServices/workspaces", "kind": "Default", "location": self.region}
        identity = {"type": "SystemAssigned", "principalId": "p", "tenantId": "t"}
        return {"id": self.id, "name": self.name, **kind, "properties": self.properties, "identity": identity}

    def answer(self, path: str, request: Request) -> Reply:
        """Answer a request for a path in the workspace, without a leading slash."""
        kind = path.partition("/")[0]
        if kind == "jobs":
            return self.jobs.answer(path.removeprefix("jobs").strip("/"), request, self._operations)
        method = getattr(self, f"_{request.method.lower()}", None)
        if method is None:
            return error(405, "MethodNotAllowed", f"{request}")
        answered: Callable[[str, Request], Reply] = method
        return answered(path, request)

    def _put(self, path: str, request: Request) -> Reply:
        existing = self.resources.get(path)
        stored = self._store(path, request.json)
        if not path.startswith(_LONG_RUNNING):
            return Reply(stored, 200 if existing else 201)
        stored["properties"]["provisioningState"] = "Creating"

        def finish() -> None:
            stored["properties"]["provisioningState"] = "Succeeded"

        return self._operations.accept(stored, 201, finish)

    def _get(self, path: str, request: Request) -> Reply:
        if path in self.resources:
            return Reply(self.resources[path])
        if path.endswith("/versions"):
            return Reply(
                {"value": self._of_content(request.query["hash"]) if "hash" in request.query else self._versions(path)}
            )
        if re.fullmatch(rf"{_VERSIONED}/[^/]+", path):
            return self._container(path)
        if re.fullmatch(_VERSIONED, path):
            names = {each.split("/")[1] for each in self.resources if each.startswith(path + "/")}
            return Reply({"value": [self._container(f"{path}/{name}").content for name in sorted(names)]})
        if re.fullmatch(r"\w+(Endpoints/[^/]+/deployments)?", path):
            return Reply({"value": self._within(path)})
        kind, _, name = path.partition("/")
        return error(404, _ABSENT.get(kind, "UserError"), f"{kind.rstrip('s').capitalize()} {name} not found.")

    def _delete(self, path: str, request: Request) -> Reply:
        if path not in self.resources:
            return Reply(status=204)
        return self._operations.accept(b"", 202, lambda: self.resources.pop(path, None) and None)

    def _post(self, path: str, request: Request) -> Reply:
        if path.endswith("/listSecrets"):
            return Reply({"secretsType": "AccountKey", "key": ACCOUNT_KEY})
        name, version = path.split("/")[1::2][:2]
        blob = f"https://{ACCOUNT}{SUFFIX}/{name}-{version}"
        credential = {"credentialType": "SAS", "sasUri": f"{blob}?sv=2022-11-02&sig=the-signature"}
        return Reply({"blobReferenceForConsumption": {"blobUri": blob, "credential": credential}})

    def _container(self, path: str) -> Reply:
        versions = [int(each["name"]) for each in self._versions(path + "/versions") if each["name"].isdigit()]
        if not versions:
            return error(404, "UserError", f"{path} not found.")
        latest = self.resources[f"{path}/versions/{max(versions)}"]["properties"]
        properties = {"latestVersion": str(max(versions)), "nextVersion": str(max(versions) + 1)}
        properties |= {key: latest[key] for key in ("dataType",) if key in latest}
        return Reply({"id": f"{self.id}/{path}", "name": path.rpartition("/")[2], "properties": properties})

    def _within(self, path: str) -> list[dict[str, Any]]:
        return [resource for each, resource in self.resources.items() if re.fullmatch(rf"{path}/[^/]+", each)]

    def _versions(self, path: str) -> list[dict[str, Any]]:
        return [resource for each, resource in self.resources.items() if each.startswith(path + "/")]

    def _of_content(self, sha256: str) -> list[dict[str, Any]]:
        """Code of the same content, under whatever name: which azure-ai-ml takes instead of sending it again."""
        codes = [resource for each, resource in self.resources.items() if each.startswith("codes/")]
        return [each for each in codes if (each["properties"].get("properties") or {}).get("hash_sha256") == sha256]

    def _store(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        named = {"id": f"{self.id}/{path}", "name": path.rpartition("/")[2], "systemData": _CREATED}
        # A model without flavours has an empty list of them, which azure-ai-ml counts on.
        empty: dict[str, Any] = {"flavors": {}} if path.startswith("models/") else {}
        if re.fullmatch(r"\w+Endpoints/[^/]+", path):
            empty = {"scoringUri": f"https://{named['name']}.{self.region}.inference.ml.azure.com/score"}
        elif "/deployments/" in path:
            empty = {"scaleSettings": {"scaleType": "Default"}}
        given = {name: value for name, value in body["properties"].items() if value is not None}
        self.resources[path] = {**body, **named, "properties": {**empty, **given}}
        return self.resources[path]


_VERSIONED = r"(?:models|data|environments|codes)"
_LONG_RUNNING = ("computes/", "onlineEndpoints/", "batchEndpoints/")
_ABSENT = {"computes": "ResourceNotFound"}


def _datastore(container: str) -> dict[str, Any]:
    return {
        "datastoreType": "AzureBlob",
        "accountName": ACCOUNT,
        "containerName": container,
        "endpoint": "core.windows.net",
        "protocol": "https",
        "credentials": {"credentialsType": "AccountKey"},
    }
