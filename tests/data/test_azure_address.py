"""Addresses of data in Azure: what each names, and why one is refused."""

from __future__ import annotations

import pytest

from azureml_strategy.data.storage import StorageError
from azureml_strategy.data.storage.addresses import BlobFolder, DataAsset, DatastoreFolder, parse_address

ENDPOINT = "https://account1.blob.core.windows.net"
ACCOUNT = {"AZURE_STORAGE_ACCOUNT_NAME": "account1"}
WORKSPACE = "azureml://subscriptions/00000000-0000-0000-0000-000000000000/resource{}/group/{}workspaces/mine/"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("az://images/train", BlobFolder("account1", "images", "train", ENDPOINT)),
        ("az://images", BlobFolder("account1", "images", "", ENDPOINT)),
        ("az://images/a/b/", BlobFolder("account1", "images", "a/b", ENDPOINT)),
        (f"{ENDPOINT}/images/a%20b/", BlobFolder("account1", "images", "a b", ENDPOINT)),
        (f"{ENDPOINT.replace('blob', 'dfs')}/images/a", BlobFolder("account1", "images", "a", ENDPOINT)),
        ("abfss://images@account1.dfs.core.windows.net/a", BlobFolder("account1", "images", "a", ENDPOINT)),
        ("wasbs://images@account1.blob.core.windows.net", BlobFolder("account1", "images", "", ENDPOINT)),
        (
            "https://other.blob.core.chinacloudapi.cn/images/a",
            BlobFolder("other", "images", "a", "https://other.blob.core.chinacloudapi.cn"),
        ),
        ("azureml://datastores/fast/paths/a/b/", DatastoreFolder("fast", "a/b", None)),
        ("azureml://datastores/fast/paths/", DatastoreFolder("fast", "", None)),
        (
            WORKSPACE.format("groups", "") + "datastores/fast/paths/a",
            DatastoreFolder("fast", "a", ("00000000-0000-0000-0000-000000000000", "group", "mine")),
        ),
        (
            WORKSPACE.format("Groups", "providers/Microsoft.MachineLearningServices/") + "datastores/fast/paths/a",
            DatastoreFolder("fast", "a", ("00000000-0000-0000-0000-000000000000", "group", "mine")),
        ),
        ("azureml:imagenet:3", DataAsset("imagenet", "3")),
        ("azureml:imagenet@latest", DataAsset("imagenet", None)),
        ("azureml:imagenet:3/train/", DataAsset("imagenet", "3", "train")),
    ],
)
def test_what_an_address_names(address: str, expected: object) -> None:
    assert parse_address(address, ACCOUNT) == expected


@pytest.mark.parametrize(
    ("address", "environ", "message"),
    [
        ("az://images/train", {}, r"Set the variable AZURE_STORAGE_ACCOUNT_NAME, or type https://ACCOUNT\.blob"),
        ("http://account1.blob.core.windows.net/images", {}, "no address of data in Azure. Write one of az://"),
        ("https://example.org/images", {}, "no address of data in Azure"),
        ("azureml:imagenet", {}, "azureml:NAME:VERSION"),
        ("azureml://registries/shared/data/imagenet/versions/1", {}, "no address of data in Azure"),
        (f"{ENDPOINT}/images/a?snapshot=1", {}, "with a query behind it"),
        ("az://images", {**ACCOUNT, "AZURE_STORAGE_ENDPOINT": "http://10.0.0.1/account1"}, "Without https, keys"),
        ("az://images", {**ACCOUNT, "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1.org/a"}, "AZURE_STORAGE_USE_EMULATOR"),
    ],
)
def test_what_is_refused(address: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        parse_address(address, environ)


def test_a_signature_is_refused_and_not_repeated() -> None:
    with pytest.raises(StorageError, match="set the rest as the variable AZURE_STORAGE_SAS_TOKEN") as raised:
        parse_address(f"{ENDPOINT}/images/train?sv=2024&sig=verysecret", {})
    assert "verysecret" not in str(raised.value)
    assert f"{ENDPOINT}/images/train" in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AZURE_STORAGE_USE_EMULATOR": "true"}, "http://127.0.0.1:10000/devstoreaccount1"),
        ({**ACCOUNT, "AZURE_STORAGE_ENDPOINT": "http://[::1]:10/a/"}, "http://[::1]:10/a"),
        ({**ACCOUNT, "AZURE_STORAGE_ENDPOINT": "http://localhost:10/a"}, "http://localhost:10/a"),
        ({**ACCOUNT, "AZURE_STORAGE_ENDPOINT": "https://private.example"}, "https://private.example"),
        (
            {"AZURE_STORAGE_USE_EMULATOR": "1", "AZURE_STORAGE_ENDPOINT": "http://azurite:10000/a"},
            "http://azurite:10000/a",
        ),
    ],
)
def test_emulators_and_other_endpoints(environ: dict[str, str], expected: str) -> None:
    place = parse_address("az://images", environ)
    assert isinstance(place, BlobFolder)
    assert place.endpoint == expected
