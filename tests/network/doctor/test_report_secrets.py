"""No secret of the environment reaches a report, in text or as a document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor import explain_log, render
from azureml_strategy.network.doctor.report import printable

SUBSCRIPTION = "5f08e1b6-7c1e-4b5a-8a54-0d9b6a1c2d3e"
HIDDEN = {
    "AZUREML_RUN_TOKEN": "eyJhbGciOiJSUzI1NiJ9.cGF5bG9hZA.c2lnbmF0dXJl",
    "AZUREML_RUN_TOKEN_PASS": "0b6d6a9c-run-token-pass",
    "MSI_SECRET": "msi-secret-4711",
    "AZUREML_INSTRUMENTATION_KEY": "11111111-2222-3333-4444-instrumentation",
    "AZURE_STORAGE_KEY": "c3RvcmFnZS1rZXktc3RvcmFnZS1rZXk=",
    "AZURE_CLIENT_SECRET": "client~secret.Q8",
    "WANDB_API_KEY": "wandb-0123456789abcdef",
    "AZUREML_ARM_SUBSCRIPTION": SUBSCRIPTION,
    "MLFLOW_TRACKING_PASSWORD": "tracking-password",
}
IN_URLS = {
    "MLFLOW_TRACKING_URI": "https://someone:url-password@mlflow.example.com/",
    "DATA_URL": "https://account.blob.core.windows.net/c?sv=2024&sig=sas-signature%3D",
    "AZUREML_WORKSPACE_SCOPE": f"/subscriptions/{SUBSCRIPTION}/resourceGroups/rg/workspaces/ws",
}
VALUES = [*HIDDEN.values(), "url-password", "sas-signature"]


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_every_secret_of_a_job_stays_hidden(form: list[str], job: Callable[..., dict[str, str]]) -> None:
    # Even where a secret has strayed into a variable that is shown.
    leaks = {"NCCL_TOPO_FILE": f"/data/{HIDDEN['MSI_SECRET']}.xml", "NCCL_CONF_FILE": "/nonexistent"}
    leaks["NCCL_NET_PLUGIN"] = f"/subscriptions/{SUBSCRIPTION}/lib.so"
    leaks["AZUREML_ARM_PROJECT_NAME"] = IN_URLS["DATA_URL"]
    leaks["MLFLOW_RUN_ID"] = HIDDEN["AZUREML_RUN_TOKEN"]
    environ = {**os.environ, **job("Standard_ND96isr_H100_v5"), **HIDDEN, **IN_URLS, **leaks}
    command = [sys.executable, "-m", "azureml_strategy.cli", "doctor", *form]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "<redacted>" in done.stdout
    assert "quirky_plum" in done.stdout
    assert not [value for value in VALUES if value in done.stdout + done.stderr]


def test_a_log_is_cleaned_too(tmp_path: Any) -> None:
    log = tmp_path / "std_log.txt"
    log.write_text(f"host:1:2 [0] NCCL WARN cannot fetch {HIDDEN['MSI_SECRET']} and {IN_URLS['DATA_URL']}\n")
    report = explain_log(str(log), tmp_path, HIDDEN)
    for text in (render(report, 100), report.to_json()):
        assert "cannot fetch <redacted>" in text
        assert not [value for value in VALUES if value in text]


def test_a_terminal_gets_no_escape_sequences_and_no_broken_text() -> None:
    hidden = printable({"texts": ("a\x1b[2Jb\nc\x9b", "gr\u00fc\udcff"), "number": 8, "none": None}, {})
    assert hidden == {"texts": ["a [2Jb c ", "gr\u00fc?"], "number": 8, "none": None}
    assert json.dumps(hidden)
