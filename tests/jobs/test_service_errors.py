"""Every failure of the service becomes one sentence with the code and the next thing to try."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.azure_service import SUBSCRIPTION, AzureService

from azureml_strategy.jobs.client import WorkspaceSettings, connect
from azureml_strategy.jobs.service_errors import ServiceError, service_errors, translate

_CASES = [
    # kind of request, status, code, message, what the user is told
    ("/computes/", 400, "ClusterCoreQuotaReached", "Operation exceeds quota.", "Ask for more of this VM family"),
    ("/computes/", 409, "AllocationFailed", "No capacity.", "The region has none free now"),
    ("/computes/", 400, "InvalidVMSize", "The size is not offered.", "az vm list-skus"),
    ("/computes/", 400, "UserError", "VM size STANDARD_X is not supported in region eu.", "az vm list-skus"),
    ("/computes/", 403, "RequestDisallowedByPolicy", "Policy 'no-ip' says no.", "A policy of the subscription forbids"),
    ("/computes/", 403, "AuthorizationFailed", "The client has no right.", "AzureML Compute Operator"),
    ("/computes/", 409, "Conflict", "Another operation runs.", "Wait until that is over"),
    ("/computes/", 400, "UserError", "A job with this name already exists.", "The name is taken"),
    ("/computes/", 401, "ExpiredAuthenticationToken", "The token is old.", "az login"),
    ("/computes/", 404, "SubscriptionNotFound", "No subscription.", "az account list"),
    ("/computes/", 404, "ResourceGroupNotFound", "No group.", "az group create"),
    ("/computes/", 404, "ResourceNotFound", "No compute.", "azureml-strategy cluster create"),
    ("/computes/", 400, "UserError", "Compute gpu was not found.", "azureml-strategy cluster create"),
    ("/computes/", 400, "InvalidRequest", "maxNodes is negative.", "Correct what it names"),
    ("/computes/", 418, "Teapot", "Short and stout.", "Activity log"),
]


@pytest.mark.parametrize(("kind", "status", "code", "message", "told"), _CASES)
def test_an_answer_of_the_service(
    azure_service: AzureService, kind: str, status: int, code: str, message: str, told: str
) -> None:
    azure_service.fail("GET", kind, status, code, message)
    with pytest.raises(ServiceError) as caught, service_errors():
        azure_service.client().compute.get("gpu")
    text = str(caught.value)
    assert text.startswith(f"{message.rstrip('.')} ({code}, HTTP {status}). ")
    assert told in text
    assert "\n" not in text
    assert (caught.value.code, caught.value.status) == (code, status)


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [(429, "TooManyRequests", "wait some minutes"), (503, "ServerBusy", "https://status.azure.com")],
)
def test_a_fault_that_stays_is_told_after_all_retries(
    azure_service: AzureService, status: int, code: str, told: str
) -> None:
    azure_service.fail("GET", "/computes/", status, code, "Not now.", times=99, retry_after_ms="1")
    with pytest.raises(ServiceError, match=told), service_errors():
        azure_service.client().compute.get("gpu")
    assert len(azure_service.asked("GET", "/computes/")) > 3


def test_a_fault_that_passes_is_not_told(azure_service: AzureService) -> None:
    azure_service.drop("GET", "/datastores")
    azure_service.fail("GET", "/datastores", 500, "InternalServerError", "Oh.", retry_after_ms="1")
    assert len(list(azure_service.client().datastores.list())) == 2
    assert len(azure_service.asked("GET", "/datastores")) == 3


def test_a_workspace_that_is_not_there(azure_service: AzureService) -> None:
    client = connect(WorkspaceSettings(name="elsewhere"))
    with pytest.raises(ServiceError, match=r"ResourceNotFound, HTTP 404.*workspace create"), service_errors():
        client.workspaces.get("elsewhere")


def test_a_cause_that_is_nested_is_found(azure_service: AzureService) -> None:
    inner = {"code": "StorageAccountAlreadyTaken", "message": "The storage account named x is already taken."}
    azure_service.fail("GET", "/computes/", 400, "DeploymentFailed", "See details.")
    azure_service._faults[0].reply.content["error"]["details"] = [inner]
    with pytest.raises(ServiceError, match=r"already taken \(StorageAccountAlreadyTaken, HTTP 400\)"), service_errors():
        azure_service.client().compute.get("gpu")


def test_a_code_that_is_nested_is_shown(azure_service: AzureService) -> None:
    azure_service.fail("GET", "/jobs/", 400, "UserError", "A job with this name already exists.")
    inner = {"code": "Immutable", "innererror": {"code": "JobPropertyImmutable"}}
    azure_service._faults[0].reply.content["error"]["innererror"] = inner
    with pytest.raises(ServiceError, match=r"already exists \(JobPropertyImmutable, HTTP 400\)"), service_errors():
        azure_service.client().jobs.get("job")


def test_nobody_is_signed_in(azure_service: AzureService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "wrong")
    with pytest.raises(ServiceError, match=r"ClientAuthenticationError.*az login") as caught, service_errors():
        connect().compute.get("gpu")
    assert "wrong" not in str(caught.value)


def test_no_way_out(azure_service: AzureService, monkeypatch: pytest.MonkeyPatch) -> None:
    client = azure_service.client(retry_total=0)
    list(client.datastores.list())  # signed in
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with (
        pytest.raises(ServiceError, match=r"\(ServiceRequestError\)\. No connection: check the network"),
        service_errors(),
    ):
        client.compute.get("gpu")


@pytest.mark.parametrize(
    ("tried", "told"),
    [
        (
            "EnvironmentCredential: Authentication failed: ('Unable to connect to proxy', NewConnectionError(...))",
            "Azure's sign-in cannot be reached (ServiceRequestError). No connection",
        ),
        ("AzureCliCredential: Azure CLI not found on path", "Nobody is signed in to Azure here (ClientAuthentication"),
        (
            "AzureCliCredential: AADSTS50173: The grant has expired.",
            "Signing in failed: AzureCliCredential: AADSTS50173",
        ),
    ],
)
def test_azure_identity_s_long_list_is_one_sentence(tried: str, told: str) -> None:
    from azure.core.exceptions import ClientAuthenticationError

    message = f"""\
DefaultAzureCredential failed to retrieve a token from the included credentials.
Attempted credentials:
\tManagedIdentityCredential: ManagedIdentityCredential authentication unavailable, no response from the IMDS endpoint.
\t{tried}
To mitigate this issue, please refer to the troubleshooting guidelines."""
    assert str(translate(ClientAuthenticationError(message))).startswith(told)


def test_what_azure_ai_ml_itself_refuses(azure_service: AzureService) -> None:
    with pytest.raises(ServiceError, match=r"\(UserErrorException\)\. Correct what it names"), service_errors():
        azure_service.client().jobs.get(5)


def test_the_colours_of_azure_ai_ml_s_own_errors_are_left_out(azure_service: AzureService) -> None:
    with pytest.raises(ServiceError) as caught, service_errors():
        azure_service.client().data.get("none", label="latest")
    assert str(caught.value).startswith("Resource was not found (MlException). ")


@given(st.text())
def test_any_words_are_one_short_line(words: str) -> None:
    from azure.core.exceptions import ServiceRequestError

    text = str(translate(ServiceRequestError(words)))
    assert len(text.splitlines()) == 1
    assert len(text) < 600


def test_a_user_sees_the_sentence_and_nothing_else(azure_service: AzureService) -> None:
    azure_service.fail("GET", "/jobs/", 403, "AuthorizationFailed", "You may not.")
    command = [sys.executable, "-m", "azureml_strategy.cli", "jobs", "show", "job"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith("azureml-strategy: You may not (AuthorizationFailed, HTTP 403). Ask an owner")
    assert done.stderr.count("\n") == 1


def test_secrets_and_subscriptions_are_not_repeated(azure_service: AzureService) -> None:
    message = f"/subscriptions/{SUBSCRIPTION}/x: https://a.blob.core.windows.net/c?sv=1&sig=abcdef failed"
    azure_service.fail("GET", "/computes/", 400, "Bad", message)
    with pytest.raises(ServiceError) as caught, service_errors():
        azure_service.client().compute.get("gpu")
    assert SUBSCRIPTION not in str(caught.value)
    assert "abcdef" not in str(caught.value)


def test_a_long_answer_is_cut(azure_service: AzureService) -> None:
    azure_service.fail("GET", "/computes/", 400, "Bad", "long " * 500)
    with pytest.raises(ServiceError) as caught, service_errors():
        azure_service.client().compute.get("gpu")
    assert len(str(caught.value)) < 600
