from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.errors import LaunchError
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launch import detect_launch
from azureml_strategy.cluster.nodes import ADDRESS_VARIABLES, NODE_VARIABLES
from azureml_strategy.cluster.redaction import REDACTED, redact, redact_text

SECRET = "hunter2-Zm9vYmFy"
# Names seen in Azure ML jobs and in Azure's own libraries.
SECRET_NAMES = (
    *("AZUREML_RUN_TOKEN", "AZUREML_RUN_TOKEN_PASS", "MSI_SECRET", "MSI_ENDPOINT", "AZUREML_INSTRUMENTATION_KEY"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "IDENTITY_HEADER"),
    *("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "DB_PWD", "STORAGE_CONNSTR", "AZURE_DEVOPS_EXT_PAT"),
    *("HTTP_AUTHORIZATION", "AZUREML_ARM_SUBSCRIPTION", "APPLICATIONINSIGHTS_CONNECTION_STRING", "MY_JWT"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names(name: str) -> None:
    assert redact({name: SECRET, name.lower(): SECRET}) == {name: REDACTED, name.lower(): REDACTED}


@given(
    st.from_regex(r"[A-Z_]{0,12}", fullmatch=True),
    st.sampled_from(["TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "SAS", "SIGNATURE", "MSI_"]),
    st.from_regex(r"[A-Z_]{0,12}", fullmatch=True),
)
def test_a_secret_word_anywhere_in_a_name(before: str, word: str, after: str) -> None:
    assert SECRET not in str(redact({before + word + after: SECRET}))


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/path",
        f"https://user:p@{SECRET}@host/path",
        f"https://account.blob.core.windows.net/c?sv=2024&sig={SECRET}&se=2030",
        f"https://host/?access_token={SECRET}",
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET};EndpointSuffix=core.windows.net",
        f"Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey={SECRET}",
        json.dumps({"token": SECRET}),
        json.dumps({"client_secret": SECRET, "x": 1}),
        f"password: {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"azureml://westeurope.api/subscriptions/{SECRET}/resourceGroups/rg",
        f"azureml://westeurope.api/Subscriptions/{SECRET}/resourceGroups/rg",
    ],
)
def test_secret_parts_of_a_text(text: str) -> None:
    assert SECRET not in redact_text(text)
    assert REDACTED in redact_text(text)


def test_a_json_web_token_anywhere() -> None:
    token = f"eyJhbGciOiJSUzI1NiJ9.eyJ{SECRET}.{SECRET}"
    assert redact_text(f"refused {token}, sorry") == f"refused {REDACTED}, sorry"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.4:6000",
        "https://westeurope.api.azureml.ms/mlflow/v1.0",
        "KeyError: 'x'",
        "tokens=4096 lr=0.1 config=a",
        "user@host",
        "/mnt/azureml/cr/j/1/exe/wd",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "name", ["RANK", "MASTER_ADDR", "AZUREML_RUN_ID", "AZURE_AUTHORITY_HOST", "PATH", "NCCL_DEBUG"]
)
def test_other_names_stay_as_they_are(name: str) -> None:
    assert redact({name: "value"}) == {name: "value"}


@given(st.text(max_size=40))
def test_redacting_twice_is_redacting_once(text: str) -> None:
    assert redact_text(redact_text(text)) == redact_text(text)


BROKEN_JOBS = st.dictionaries(
    st.sampled_from(
        sorted({*NODE_VARIABLES, *ADDRESS_VARIABLES, "RANK", "WORLD_SIZE", "NODE_RANK", "TF_CONFIG", "PMI_RANK"})
    ),
    st.sampled_from(["", "0", "1", "2", "x", "localhost", "10.0.0.4", "{}"]),
)


@given(BROKEN_JOBS)
def test_no_secret_reaches_an_error_or_a_job(broken: dict[str, str]) -> None:
    environ = broken | dict.fromkeys(SECRET_NAMES, SECRET) | {"AZUREML_RUN_ID": "quirky_plum"}
    shown = repr(read_job(environ))
    try:
        shown += repr(detect_launch(environ))
    except LaunchError as error:
        shown += str(error)
    assert not re.search(SECRET, shown)
