"""Which credential reads an account, in which order; and that none is shown."""

from __future__ import annotations

import asyncio
import os

import pytest

from azureml_strategy.data.storage.credentials import IdentityCredential, find_credential, find_identity, lent_variables

SECRET = "dGhlLXNlY3JldA=="
KEY, SAS = {"AZURE_STORAGE_ACCOUNT_KEY": SECRET}, {"AZURE_STORAGE_SAS_TOKEN": f"?sv=1&sig={SECRET}"}
CONNECTION = {
    "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={SECRET};"
}
SHARED = {"AZURE_STORAGE_CONNECTION_STRING": f"BlobEndpoint=https://x;SharedAccessSignature=sv=1&sig={SECRET}"}


@pytest.mark.parametrize(
    ("environ", "name", "given"),
    [
        (KEY | SAS | CONNECTION, "AZURE_STORAGE_ACCOUNT_KEY", {"access_key": SECRET, "expires_at": None}),
        (SAS | CONNECTION, "AZURE_STORAGE_SAS_TOKEN", {"sas_token": f"sv=1&sig={SECRET}", "expires_at": None}),
        (CONNECTION, "AZURE_STORAGE_CONNECTION_STRING", {"access_key": SECRET, "expires_at": None}),
        (SHARED, "AZURE_STORAGE_CONNECTION_STRING", {"sas_token": f"sv=1&sig={SECRET}", "expires_at": None}),
        (
            KEY | {"AZURE_STORAGE_ACCOUNT": "mine"},
            "AZURE_STORAGE_ACCOUNT_KEY",
            {"access_key": SECRET, "expires_at": None},
        ),
    ],
)
def test_what_the_environment_gives(environ: dict[str, str], name: str, given: dict[str, object]) -> None:
    credential = find_credential("mine", environ)
    assert credential.name == name
    assert asyncio.run(credential()) == given
    assert SECRET not in repr(credential)


@pytest.mark.parametrize("environ", [{}, KEY | {"AZURE_STORAGE_ACCOUNT_NAME": "another"}])
def test_an_identity_where_there_is_no_key_of_this_account(environ: dict[str, str]) -> None:
    assert isinstance(find_credential("mine", environ), IdentityCredential)
    assert isinstance(find_credential("other", CONNECTION), IdentityCredential)


def test_a_job_with_its_users_identity() -> None:
    environ = {"OBO_ENDPOINT": "http://127.0.0.1:1/token"}
    assert type(find_identity(environ)).__name__ == "AzureMLOnBehalfOfCredential"
    assert find_credential("mine", environ).name == "the user's identity"
    assert type(find_identity({})).__name__ == "DefaultAzureCredential"


def test_an_identity_is_found_by_the_variables_of_the_job_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "of the one that started the server")
    others = {"AZURE_CLIENT_ID": "other", "AZURE_TENANT_ID": "tenant", "PATH": "/other"}
    before = dict(os.environ)
    with lent_variables(others):
        assert os.environ.get("AZURE_CLIENT_SECRET") is None
        assert (os.environ["AZURE_CLIENT_ID"], os.environ["PATH"]) == ("other", before["PATH"])
    assert dict(os.environ) == before
