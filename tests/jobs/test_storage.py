from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.jobs.azure_service import AzureService

from azureml_strategy.cli import main
from azureml_strategy.jobs.client import as_yaml
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.storage import DataRequest, DataSurvey, render_registration, render_upload, survey_data


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a/1.JPG", "b/2.png", "labels.txt"], DataSurvey(3, 3, 3, "images in folders")),
        (["0000.tar", "0001.tar", "index.json"], DataSurvey(3, 3, 1, "shards")),
        (["1.jpg", "2.jpg"], DataSurvey(2, 2, 1, "files")),
        (["tokens.bin"], DataSurvey(1, 1, 1, "files")),
        (["notes.txt"], DataSurvey(1, 1, 1, "files")),
    ],
)
def test_a_folder(tmp_path: Path, files: list[str], expected: DataSurvey) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert survey_data(tmp_path) == expected


def test_a_file_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "1.jpg").write_text("four")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    assert survey_data(tmp_path / "data").files == 1
    assert survey_data(tmp_path / "real" / "1.jpg") == DataSurvey(1, 4, 1, "files")


def test_many_small_files_are_remarked_on() -> None:
    advice = DataSurvey(1_281_167, 140_000_000_000, 1000, "images in folders").advice
    assert advice is not None
    assert "1,281,167 files of 109 KB" in advice
    assert DataSurvey(1_281_167, 140_000_000_000, 1, "shards").advice is None
    assert DataSurvey(1000, 100_000, 10, "images in folders").advice is None


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="There is no "):
        survey_data(tmp_path / "none")
    with pytest.raises(JobError, match="There are no files"):
        survey_data(tmp_path)


_DATASTORE = """\
account_name: fastimages
container_name: training
credentials: {}
endpoint: core.windows.net
name: premium
protocol: https
tags: {}
type: azure_blob
"""
_REGISTERED = """\
description: all of it
name: imagenet
path: azureml://datastores/premium/paths/imagenet/
properties: {}
tags:
  year: '2012'
type: uri_folder
version: '3'
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two folders of images."""
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.jpg").write_bytes(b"an image of a " + name.encode())
    return tmp_path / "images"


def test_a_dry_run_prints_what_azure_takes(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from azure.ai.ml import load_data, load_datastore

    address = "azureml://datastores/premium/paths/imagenet/"
    describe = ["--version", "3", "--description", "all of it", "--tag", "year=2012"]
    assert main(["data", "register", address, "--name", "imagenet", *describe, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text == _REGISTERED
    assert as_yaml(load_data(io.StringIO(text))) == _REGISTERED
    assert main(["data", "attach", "premium", "--account", "fastimages", "--container", "training", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text == _DATASTORE
    assert as_yaml(load_datastore(io.StringIO(text))) == _DATASTORE
    assert main(["data", "upload", str(images), "--name", "pets", "--datastore", "premium", "--dry-run"]) == 0
    shown = capsys.readouterr()
    loaded = load_data(io.StringIO(shown.out))
    assert (str(loaded.path), loaded.datastore, loaded.type) == (str(images), "premium", "uri_folder")
    assert "2 file(s) in 2 folder(s), 0.00 GB, images in folders" in shown.err


def test_an_upload_is_sent_once(azure_service: AzureService, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / ".amlignore").write_text("dog\n")
    assert main(["data", "upload", str(images), "--name", "pets"]) == 0
    assert capsys.readouterr().out.startswith("azureml:pets:1  azureml://datastores/workspaceblobstore/paths/")
    sent = {key.rpartition("/images/")[2]: content for key, content in azure_service.blobs.content.items()}
    assert sent.pop("cat/1.jpg") == b"an image of a cat"
    assert set(sent) <= {".amlignore"}
    before = len(azure_service.asked("PUT", "blob.core"))
    assert main(["data", "upload", str(images), "--name", "pets"]) == 0
    assert capsys.readouterr().out.startswith("azureml:pets:2 ")
    assert len(azure_service.asked("PUT", "blob.core")) == before


def test_premium_storage_is_attached_without_a_key_and_filled_by_the_user_s_own_rights(
    azure_service: AzureService, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "attach", "premium", "--account", "fastimages", "--container", "training"]) == 0
    stored = azure_service.workspace.resources["datastores/premium"]["properties"]
    assert stored["credentials"] == {"credentialsType": "None"}
    assert main(["data", "upload", str(images), "--name", "pets", "--datastore", "premium"]) == 0
    assert not azure_service.asked("POST", "premium/listSecrets")
    assert any(key.startswith("fastimages/training/LocalUpload/") for key in azure_service.blobs.content)
    assert main(["data", "show"]) == 0
    shown = capsys.readouterr().out
    assert "pets" in shown
    assert "fastimages" in shown


def test_storage_that_keeps_the_user_out(
    azure_service: AzureService, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    azure_service.fail("HEAD", "blob.core", 403, "AuthorizationPermissionMismatch", "No.", times=9)
    assert main(["data", "upload", str(images), "--name", "pets"]) == 2
    assert "Storage Blob Data Contributor" in capsys.readouterr().err


def test_a_datastore_that_is_not_there(
    azure_service: AzureService, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "upload", str(images), "--name", "pets", "--datastore", "fast"]) == 2
    told = capsys.readouterr().err
    assert "Datastore fast not found" in told
    assert "`azureml-strategy data show` lists" in told


def test_what_is_registered_is_shown_by_version(
    azure_service: AzureService, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1", "2"):
        address = f"https://a.blob.core.windows.net/c/v{version}/"
        assert main(["data", "register", address, "--name", "pets", "--version", version]) == 0
    capsys.readouterr()
    assert main(["data", "show", "pets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        [version, "uri_folder", f"https://a.blob.core.windows.net/c/v{version}/"] for version in ("1", "2")
    ]
    assert main(["data", "show", "birds"]) == 2
    assert "There is no data asset birds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/data/imagenet", "azureml-strategy data upload"),
        ("https://a.blob.core.windows.net/c/?sv=1&sig=abc", "shared access signature"),
    ],
)
def test_an_address_that_is_none_or_has_a_secret_is_refused(address: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        render_registration(DataRequest(name="x"), address)
    assert "sig=abc" not in str(caught.value)


def test_an_account_is_given_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    account = "fast.blob.core.windows.net"
    assert main(["data", "attach", "x", "--account", account, "--container", "c", "--dry-run"]) == 2
    assert "without .blob.core.windows.net" in capsys.readouterr().err


def test_one_file_is_a_file(images: Path) -> None:
    assert render_upload(DataRequest(name="x"), images / "cat" / "1.jpg").type == "uri_file"
    assert render_registration(DataRequest(name="x"), "azureml://datastores/a/paths/b", file=True).type == "uri_file"
