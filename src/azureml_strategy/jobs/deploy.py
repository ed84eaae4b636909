"""Makes endpoints and deployments of a registered model in the workspace, and says how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.endpoints import SIZES, DeployRequest, online_environment
from azureml_strategy.jobs.service_errors import JobError, ServiceError, service_errors
from azureml_strategy.serving import MAX_SAMPLES

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
        JobError: its class lies in a module of the user's, which nothing in the request brings.
        ServiceError: there is no such model.
    """
    with service_errors():
        label = None if request.version else "latest"
        model: Model = client.models.get(request.model, version=request.version, label=label)
    module_class = (model.tags or {}).get(CLASS_TAG)
    name = module_class.split(".")[0] if module_class is not None else None
    brought = (request.code, request.requirements, request.environment) != (None, None, None)
    if name is not None and name not in _IN_THE_IMAGE and not brought:
        raise JobError(
            f"The model's class is {module_class}, which is not in azureml-strategy. Type --code FOLDER with the "
            f"folder that holds {name}.py, --requirements FILE if {name} is a package of pip, or --environment with an "
            "image that has it."
        )
    return model


def create_online(
    client: MLClient,
    request: DeployRequest,
    endpoint: ManagedOnlineEndpoint,
    deployment: ManagedOnlineDeployment,
    traffic: int | None,
) -> ManagedOnlineEndpoint:
    """Make an online endpoint unless it is there, make or change a deployment, and lead requests to it.

    This waits for the deployment: minutes, and longer while its image is built.

    Args:
        client: client of the workspace.
        request: where it gives no size, a deployment of this name keeps its own.
        endpoint: the endpoint; one of this name stays as it is.
        deployment: the deployment; it is given the sizes that are kept.
        traffic: per cent of the requests that the deployment gets; the others share the rest as before. None gives it
            all of them, unless another deployment has some: then nothing changes.

    Returns:
        The endpoint as it is now.

    Raises:
        JobError: the traffic leaves requests without a deployment.
        ServiceError: there is no quota or permission, or the deployment does not start.
    """
    name = str(deployment.name)
    found = _existing(lambda: client.online_endpoints.get(endpoint.name))
    _new_traffic((found.traffic if found else None) or {}, name, traffic)  # refuses before anything is made
    _deploy("online", client, request, endpoint, deployment, found)
    with service_errors():
        made: ManagedOnlineEndpoint = client.online_endpoints.get(endpoint.name)
        shares = _new_traffic(made.traffic or {}, name, traffic)  # another one may have changed it in these minutes
        if shares is not None:
            made.traffic = shares
            made = client.online_endpoints.begin_create_or_update(made).result()
    return made


def create_batch(
    client: MLClient, request: DeployRequest, endpoint: BatchEndpoint, deployment: ModelBatchDeployment
) -> BatchEndpoint:
    """Make a batch endpoint unless it is there, and make or change a deployment: the default if there is none.

    For arguments, but `traffic`, and result see `create_online`.

    Raises:
        ServiceError: there is no permission, or no such cluster.
    """
    found = _existing(lambda: client.batch_endpoints.get(endpoint.name))
    _deploy("batch", client, request, endpoint, deployment, found)
    with service_errors():
        made: BatchEndpoint = client.batch_endpoints.get(endpoint.name)
        if default_of(made) is None:
            made.defaults = {"deployment_name": str(deployment.name)}
            made = client.batch_endpoints.begin_create_or_update(made).result()
    return made


def _deploy(kind: str, client: MLClient, request: DeployRequest, endpoint: Any, deployment: Any, found: Any) -> None:
    """Make an endpoint unless it was found, and make or change its deployment.

    Raises:
        ServiceError: the message says what a deployment that fails leaves, and which commands tell more and remove it.
    """
    endpoints, deployments = getattr(client, f"{kind}_endpoints"), getattr(client, f"{kind}_deployments")
    if found is None:
        with service_errors():
            endpoints.begin_create_or_update(endpoint).result()
    before = _existing(lambda: deployments.get(str(deployment.name), endpoint.name)) if found else None
    _keep_sizes(request, before, deployment)
    if kind == "online":
        deployment.environment = online_environment(request, str(deployment.instance_type))
    try:
        with service_errors():
            deployments.begin_create_or_update(deployment).result()
    except ServiceError as error:
        which = f"--endpoint-name {request.endpoint} --name {request.deployment}"
        look = f"get-logs {which}` tells why it failed" if kind == "online" else f"show {which}` tells its state"
        left = f"The endpoint {request.endpoint} and what there is of the deployment {request.deployment} are left"
        if found is None:
            remove = f", `az ml {kind}-endpoint delete --name {request.endpoint}` removes both"
        elif before is None:
            remove = f", `az ml {kind}-deployment delete {which}` removes the latter"
        else:  # it may still answer: nobody is told to delete it
            left, remove = f"The deployment {request.deployment} was there before, and is not removed", ""
        leftovers = f"{left}: `az ml {kind}-deployment {look}{remove}."
        raise ServiceError(f"{error} {leftovers}", code=error.code, status=error.status) from error


def default_of(endpoint: BatchEndpoint) -> str | None:
    """The deployment that gets the calls of a batch endpoint which name none."""
    return getattr(endpoint.defaults, "deployment_name", None)


def calls_of_online(endpoint: str, deployment: str) -> list[str]:
    """The commands that call an online endpoint."""
    return [
        f"KEY=$(az ml online-endpoint get-credentials --name {endpoint} --query primaryKey --output tsv)",
        f"URI=$(az ml online-endpoint show --name {endpoint} --query scoring_uri --output tsv)",
        'curl "$URI" -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" -d \'{"data": [SAMPLE]}\'',
        f"az ml online-deployment get-logs --endpoint-name {endpoint} --name {deployment}",
    ]


def calls_of_batch(endpoint: str, deployment: str) -> list[str]:
    """The commands that call a deployment of a batch endpoint, the default or not, and fetch what it has predicted."""
    return [
        f"JOB=$(az ml batch-endpoint invoke --name {endpoint} --deployment-name {deployment} --input azureml:DATA:1 "
        "--query name --output tsv)",
        "azureml-strategy jobs logs $JOB --follow",
        "az ml job download --name $JOB --output-name score",
    ]


def make_default(endpoint: str, deployment: str) -> str:
    """The command that makes a deployment the default of its batch endpoint."""
    return f"az ml batch-endpoint update --name {endpoint} --set defaults.deployment_name={deployment}"


def _keep_sizes(request: DeployRequest, before: Any, deployment: Any) -> None:
    """Where the request gives no size, keep that of the deployment that is there; `before` is None if there is none."""
    for name in SIZES:
        kept = getattr(before, name, None)
        if getattr(request, name) is None and kept is not None:
            setattr(deployment, name, kept)
    most = (getattr(before, "environment_variables", None) or {}).get(MAX_SAMPLES)
    if request.max_samples is None and most is not None:
        deployment.environment_variables = {MAX_SAMPLES: most}


def _existing(get: Callable[[], Any]) -> Any:
    """What the service has of a name; None if it has nothing."""
    try:
        with service_errors():
            return get()
    except ServiceError as error:
        if error.status != 404:
            raise
        return None


def _new_traffic(before: dict[str, int], name: str, wanted: int | None) -> dict[str, int] | None:
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
