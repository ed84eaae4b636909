"""Makes endpoints and deployments of a registered model in the workspace, and says how they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.endpoints import DeployRequest
from azureml_strategy.jobs.service_errors import JobError, ServiceError, service_errors

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import (
        BatchEndpoint,
        ManagedOnlineDeployment,
        ManagedOnlineEndpoint,
        Model,
        ModelBatchDeployment,
    )

CLASS_TAG = "module_class"
"""The tag of a registered model with the class of its module."""
_IN_THE_IMAGE = ("azureml_strategy", "lightning", "torch")


def check_model(client: MLClient, request: DeployRequest) -> Model:
    """Look up the registered model, before anything is made.

    Returns:
        The model, whose version is the one that is deployed.

    Raises:
        JobError: its class lies in a module of the user's, and the request has no folder of code for it.
        ServiceError: there is no such model.
    """
    with service_errors():
        label = None if request.version else "latest"
        model: Model = client.models.get(request.model, version=request.version, label=label)
    module_class = (model.tags or {}).get(CLASS_TAG)
    own = module_class is not None and module_class.split(".")[0] not in _IN_THE_IMAGE
    if own and request.code is None and request.environment is None:
        assert module_class is not None
        raise JobError(
            f"The model's class is {module_class}, which is not in azureml-strategy. Type --code FOLDER with the "
            f"folder that holds {module_class.split('.')[0]}.py, or --environment with an image that has it."
        )
    return model


def create_online(
    client: MLClient, endpoint: ManagedOnlineEndpoint, deployment: ManagedOnlineDeployment, traffic: int | None
) -> ManagedOnlineEndpoint:
    """Make an online endpoint unless it is there, make or change a deployment, and lead requests to it.

    Args:
        client: client of the workspace.
        endpoint: the endpoint; one of this name stays as it is.
        deployment: the deployment, for which this call waits: minutes, and more while its image is built.
        traffic: per cent of the requests that the deployment gets; the others share the rest as before. None gives it
            all of them, unless another deployment has some: then nothing changes.

    Returns:
        The endpoint as it is now.

    Raises:
        JobError: the traffic leaves requests without a deployment.
        ServiceError: there is no quota or permission, or the deployment does not start.
    """
    found = _existing(lambda: client.online_endpoints.get(endpoint.name))
    shares = _shares((found.traffic if found else None) or {}, str(deployment.name), traffic)
    with service_errors():
        if found is None:
            client.online_endpoints.begin_create_or_update(endpoint).result()
        client.online_deployments.begin_create_or_update(deployment).result()
        made: ManagedOnlineEndpoint = client.online_endpoints.get(endpoint.name)
        if shares is not None:
            made.traffic = shares
            made = client.online_endpoints.begin_create_or_update(made).result()
    return made


def create_batch(client: MLClient, endpoint: BatchEndpoint, deployment: ModelBatchDeployment) -> BatchEndpoint:
    """Make a batch endpoint unless it is there, make or change a deployment, and make it the endpoint's default.

    Raises:
        ServiceError: there is no permission, or no such cluster.
    """
    found = _existing(lambda: client.batch_endpoints.get(endpoint.name))
    with service_errors():
        if found is None:
            client.batch_endpoints.begin_create_or_update(endpoint).result()
        client.batch_deployments.begin_create_or_update(deployment).result()
        made: BatchEndpoint = client.batch_endpoints.get(endpoint.name)
        made.defaults = {"deployment_name": deployment.name}
        changed: BatchEndpoint = client.batch_endpoints.begin_create_or_update(made).result()
    return changed


def calls_of_online(endpoint: str, deployment: str) -> list[str]:
    """The commands that call an online endpoint."""
    return [
        f"KEY=$(az ml online-endpoint get-credentials --name {endpoint} --query primaryKey --output tsv)",
        f"URI=$(az ml online-endpoint show --name {endpoint} --query scoring_uri --output tsv)",
        'curl "$URI" -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d \'{"data": [SAMPLE]}\'',
        f"az ml online-deployment get-logs --endpoint-name {endpoint} --name {deployment}",
    ]


def calls_of_batch(endpoint: str) -> list[str]:
    """The commands that call a batch endpoint, and fetch what it has predicted."""
    return [
        f"JOB=$(az ml batch-endpoint invoke --name {endpoint} --input azureml:DATA:1 --query name --output tsv)",
        "azureml-strategy jobs logs $JOB --follow",
        "az ml job download --name $JOB --output-name score",
    ]


def _existing(get: Any) -> Any:
    """What there is of a name; None if there is nothing."""
    try:
        with service_errors():
            return get()
    except ServiceError as error:
        if error.status != 404:
            raise
        return None


def _shares(before: dict[str, int], name: str, wanted: int | None) -> dict[str, int] | None:
    """The new traffic of each deployment; None leaves it as it is."""
    others = {each: share for each, share in before.items() if each != name and share}
    if wanted is None:
        return None if others else {name: 100}
    if not others and wanted not in (0, 100):
        raise JobError(
            f"--traffic {wanted} leaves {100 - wanted} % of the requests to other deployments, and there is none. Type "
            "--traffic 100."
        )
    total, rest = sum(others.values()), 100 - wanted
    shares = {each: share * rest // total for each, share in others.items()}
    for each in list(shares)[: rest - sum(shares.values()) if others else 0]:
        shares[each] += 1  # what rounding down has left
    return {**shares, name: wanted}
