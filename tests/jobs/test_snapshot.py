from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.jobs.azure_service import AzureService

from azureml_strategy.jobs import snapshot
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.snapshot import list_snapshot, upload_snapshot

# A folder as it is after some weeks of work, and what of it is code.
NO_CODE = (
    *(".git/HEAD", "__pycache__/a.pyc", "src/__pycache__/b.pyc", ".pytest_cache/x", ".cache/x", "src/.mypy_cache/x"),
    *("outputs/2026/last.ckpt", "multirun/0/log", "mlruns/0/meta.yaml", "mlflow.db", "mlflow.db-wal", "old/mlruns/x"),
    *("lightning_logs/version_0/x", "env-of-mine/pyvenv.cfg", "env-of-mine/lib/python3.11/site-packages/a.py"),
    *(".venv/pyvenv.cfg", ".venv/lib/cacert.pem", ".ipynb_checkpoints/x.ipynb", "web/node_modules/a/x.js"),
)
SECRETS = (
    *(".env", ".env.production", "src/prod.env", "keys/server.pem", "server.key", "a.pfx", "a.p12", "id_rsa"),
    *("deploy/id_ed25519", ".netrc", ".npmrc", ".pypirc", "credentials", "gcp/credentials.json", "kubeconfig"),
    *(".kube/config", ".aws/config", ".ssh/known_hosts", "service_account_prod.json", "secrets.yaml", ".envrc"),
)
CODE = (
    *("train.py", "src/model.py", "src/outputs/head.py", "src/credentials/reader.py", ".env.example", "id_rsa.pub"),
    *("src/keys.py", "src/environment.py", "data/digits.npz", "README.md", "conf/secrets_of_training.yaml", "venv.md"),
)


def write(*names: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")


def uploaded(service: AzureService) -> set[str]:
    """What lies in the workspace's storage of the folder `code`."""
    return {name.partition("/code/")[2] for name in service.blobs.content if "/code/" in name}


def test_what_is_listed_is_what_azure_ai_ml_uploads_and_that_is_code_alone(azure_service: AzureService) -> None:
    Path("code").mkdir()
    os.chdir("code")
    write(*NO_CODE, *SECRETS, *CODE)
    os.chdir("..")
    Path("elsewhere/bin").mkdir(parents=True)
    write("elsewhere/pyvenv.cfg", "elsewhere/bin/python", "more/shared.py")
    Path("code/linked-env").symlink_to(Path("elsewhere").resolve())
    Path("code/more").symlink_to(Path("more").resolve())
    found = list_snapshot("code")
    assert set(found.files) == {*CODE, "more/shared.py"}
    assert set(found.secrets) == set(SECRETS)
    identity = upload_snapshot(azure_service.client(show_progress=False), "code")
    assert "/codes/" in identity
    assert uploaded(azure_service) == set(found.files)


def test_secrets_that_are_asked_for_go_along(azure_service: AzureService) -> None:
    write("code/train.py", "code/.env", "code/ca.pem", "code/server.key", "code/data/a.bin")
    Path("code/.amlignore").write_text("data/\n!ca.pem\n!/.env\n")
    found = list_snapshot("code")
    assert set(found.files) == {".amlignore", "train.py", ".env", "ca.pem"}
    assert found.secrets == ("server.key",)
    assert found.describe() == (
        "code: code, 4 files, less than 0.1 MB; kept here, as secrets by their names: server.key. To send one all the "
        "same, write !server.key into code/.amlignore"
    )
    upload_snapshot(azure_service.client(show_progress=False), "code")
    assert uploaded(azure_service) == set(found.files)


def test_gitignore_stays_in_force_until_there_is_an_amlignore() -> None:
    write("train.py", "data/a.bin", "logs/b.txt", "src/c.py", ".env")
    Path(".gitignore").write_text("*.py\n.env\n")
    found = list_snapshot(".")
    assert (set(found.files), found.secrets) == ({".gitignore", "data/a.bin", "logs/b.txt"}, ())
    write("ca.pem")
    described = list_snapshot(".").describe()
    assert described.endswith("write !ca.pem into ./.amlignore, below the lines of .gitignore, which it replaces")
    Path(".amlignore").write_text("data/\nlogs/*\n*.pyc\n*.pem\n")
    found = list_snapshot(".")
    assert set(found.files) == {".amlignore", ".gitignore", "train.py", "src/c.py"}
    assert found.size == sum(Path(name).stat().st_size for name in found.files)
    assert found.describe().startswith(
        "code: ., 4 files, less than 0.1 MB; kept here, as secrets by their names: .env. "
    )
    assert found.advice() is None


def test_what_hardly_belongs_there_is_named() -> None:
    write("train.py", "old/outputs/run/last.ckpt", "lib/site-packages/a.py")
    assert list_snapshot(".").unwanted() == ["site-packages", "outputs"]
    advice = list_snapshot(".").advice() or ""
    assert "site-packages, outputs among them. Name what it does not need in ./.amlignore." in advice


def test_a_large_one_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.py", "b.py")
    monkeypatch.setattr(snapshot, "MANY_FILES", 1)
    assert list_snapshot(".").advice() == "The job gets all of it. Name what it does not need in ./.amlignore."


def test_an_empty_one_is_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(JobError, match=r"job\.code is empty, which holds no file"):
        list_snapshot("empty")


def test_a_link_that_leads_nowhere_is_refused_unless_it_is_left_out() -> None:
    write("train.py")
    Path("data").symlink_to("/nowhere/images")
    with pytest.raises(JobError, match=r"\./data is a link to /nowhere/images, which is not there, so that no job was"):
        list_snapshot(".")
    Path(".amlignore").write_text("data\n")
    assert set(list_snapshot(".").files) == {".amlignore", "train.py"}
    Path("circle").symlink_to("circle")
    with pytest.raises(JobError, match=r"circle"):
        list_snapshot(".")
