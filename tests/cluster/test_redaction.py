from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
import uuid
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.environ import ADDRESS_VARIABLES, NODE_VARIABLES, LaunchError
from azureml_strategy.cluster.job import read_job
from azureml_strategy.cluster.launchers import detect_launch
from azureml_strategy.cluster.redaction import REDACTED, is_secret_name, redact, redact_text

SECRET = "hunter2-Zm9vYmFy"
# Names seen in Azure ML jobs and in Azure's own libraries.
SECRET_NAMES = (
    *("AZUREML_RUN_TOKEN", "AZUREML_RUN_TOKEN_PASS", "MSI_SECRET", "MSI_ENDPOINT", "AZUREML_INSTRUMENTATION_KEY"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN", "IDENTITY_HEADER"),
    *("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "DB_PWD", "STORAGE_CONNSTR", "AZURE_DEVOPS_EXT_PAT"),
    *("HTTP_AUTHORIZATION", "AZUREML_ARM_SUBSCRIPTION", "APPLICATIONINSIGHTS_CONNECTION_STRING", "MY_JWT"),
    *("PGPASSWORD", "SMTP_PASS", "SLACK_WEBHOOK_URL", "AWS_SECRET_ACCESS_KEY"),
)
# Other names as they are; none of them is a secret's.
PLAIN_NAMES = (
    *("RANK", "MASTER_ADDR", "AZUREML_RUN_ID", "AZURE_AUTHORITY_HOST", "PATH", "NCCL_DEBUG", "NCCL_IB_PKEY"),
    *("MONKEY", "SASKATOON", "data.tokenizer", "data.sort_key", "model.patience", "model.pad_token", "eos_token"),
    *("max_tokens", "num_tokens", "tokens_per_batch", "HF_TOKEN_PATH", "AZUREML_RUN_TOKEN_EXPIRY", "first_pass"),
    *("model.num_key_value_heads", "data.path", "TOKENIZERS_PARALLELISM", "job.identity.client_id", "compass"),
)
# Secrets by their form alone. None is anybody's: they are as long as the real ones, and made up.
FORMS = (
    *("hf_" + "aB3" * 11, "ghp_" + "x1Y" * 12, "github_pat_" + "1A" * 20, "glpat-" + "x_1A" * 5),
    *("sk-" + "a1B" * 16, "sk-proj-" + "a1_B" * 10, "sk-ant-api03-" + "a-1B" * 10, "AKIAIOSFODNN7EXAMPLE"),
    *("xoxb-123456789012-1234567890123-" + "a" * 24, "AIza" + "x" * 35, "npm_" + "a" * 36, "dapi" + "0f" * 16),
    *("sk_live_" + "a1" * 12, "SG." + "a" * 22 + "." + "b" * 43, "123456789:" + "A-b_1" * 7, "nvapi-" + "aB1" * 10),
    *("abc8Q~" + "x" * 34, base64.b64encode(bytes(range(64))).decode(), "eyJhbGciOi.eyJzdWIi.c2ln"),
    *("/services/T00000000/B00000000/" + "X" * 24,),
)
WEBHOOKS = (
    "https://hooks.slack.com/services/T00000000/B00000000/" + "X" * 24,
    "https://contoso.webhook.office.com/webhookb2/" + SECRET,
    "https://outlook.office.com/webhook/" + SECRET,
    "https://discord.com/api/webhooks/123456789/" + SECRET,
    "https://prod-1.westeurope.logic.azure.com:443/workflows/" + SECRET,
)
# What a run's texts hold, and nobody may strike out.
PLAIN_TEXTS = (
    *("", "10.0.0.4:6000", "https://westeurope.api.azureml.ms/mlflow/v1.0", "KeyError: 'x'", "user@host"),
    *("tokens=4096 lr=0.1 config=a", "/mnt/azureml/cr/j/1/exe/wd", "the monkey: banana", "sort_key: length"),
    *(hashlib.sha1(b"a commit").hexdigest(), hashlib.sha256(b"a file").hexdigest(), str(uuid.UUID(int=2**127 + 5))),
    *("quirky_plum_0abc1def2g", "resnet50_ddp_20260101_120000_ab12cd", "outputs/2026-01-01/12-00-00/last.ckpt"),
    "sha512-" + base64.b64encode(hashlib.sha512(b"a package").digest()).decode(),
    "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 3).decode(),
    *("tokenizer: tokenizer.json, pad_token: <pad>, max_tokens: 4096", "git@github.com:owner/repository.git"),
    *("ssh://git@github.com/owner/repository", "abfss://images@account.dfs.core.windows.net/train"),
    *("http://localhost:8080/path and someone@example.com", "sqlite:////tmp/mlflow.db", "task-force sk-learn"),
    *('token = os.environ["HF_TOKEN"]', "password=self.password, token: str | None = None", "token=get_token(path)"),
    *("azureml:imagenet@latest", "epoch 3, step 12345678: loss 0.25", "Process 3 terminated with exit code 1"),
    "forward has signature: (x: Tensor, token_budget=2b) -> Tensor",
    "credentials: {}, secrets: []",
    "libnccl.so.2(ncclCommInitRank+0x1f0)[0x7f0a0b0c0d0e]",
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names(name: str) -> None:
    environ = {name: SECRET}
    assert redact("", environ, {}) == {name: REDACTED}
    assert redact_text(f"it said {SECRET}!", environ) == f"it said {REDACTED}!", "wherever it stands"


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_names_stay_as_they_are(name: str) -> None:
    assert not is_secret_name(name)
    assert redact(name, "value") == "value"


@given(
    st.from_regex(r"([A-Z]{1,9}_)?", fullmatch=True),
    st.sampled_from(["SECRET", "PASSWORD", "CREDENTIAL", "SAS", "SIGNATURE", "JWT", "API_KEY", "CONNECTION_STRING"]),
)
def test_a_secret_word_in_a_name(before: str, word: str) -> None:
    for name in (before + word, (before + word).lower(), f"job.environment_variables.{before}{word}", f"{word}_2"):
        assert redact(name, SECRET, {}) == REDACTED


@pytest.mark.parametrize("secret", FORMS)
def test_secrets_by_their_form(secret: str) -> None:
    text = f"https://hooks.slack.com{secret}" if secret.startswith("/") else secret
    url = [] if secret.endswith("==") else ["https://host/{}/x"]  # before the end of base64 there may be a slash
    for form in (*url, "{}", "refused {}, sorry", "x='{}'", '{{"a": "{}"}}', "a={};b", "[{}]"):
        shown = redact_text(form.format(text), {})
        assert secret not in shown
        assert REDACTED in shown


@pytest.mark.parametrize("address", WEBHOOKS)
def test_addresses_that_are_secrets(address: str) -> None:
    shown = redact_text(f"cannot post to {address}: 404", {})
    assert address.rpartition("/")[2] not in shown
    assert shown.startswith(f"cannot post to {'/'.join(address.split('/')[:3])}")


def test_a_private_key_as_a_whole() -> None:
    lines = [base64.b64encode(bytes([number] * 48)).decode() for number in range(5)]
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "\n".join(lines) + "\n-----END OPENSSH PRIVATE KEY-----\n"
    for text in (f"a\n{key}b", key[:200]):
        assert not [line for line in lines if line in redact_text(text, {})]
    assert redact_text(f"a\n{key}b", {}).startswith("a\n-----BEGIN")
    assert lines[2] not in redact_text(f"line {lines[2]}", {"DEPLOY_SECRET": key}), "its lines by themselves"


def test_a_value_of_the_environment_in_other_spellings() -> None:
    environ = {"DB_PASSWORD": "p w'/\"\\é1", "TRACKING": "https://someone:url%2Fpass@host/", "PLAIN": "mlx5_ib0"}
    value = environ["DB_PASSWORD"]
    for text in (value, quote(value, safe=""), repr(["", value]), json.dumps({"x": value}), "url%2Fpass", "url/pass"):
        assert REDACTED in redact_text(text, environ)
        assert "pass" not in redact_text(text, environ)
        assert value not in redact_text(text, environ)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TOKENIZERS_PARALLELISM", "false", "false, mlx5_ib0 and more"),
        ("AUTH_MODE", "", "nothing"),
        ("DB_PASSWORD", "postgres", "postgresql://host"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/key.json", "cannot open /home/me/key.json"),
        ("HF_TOKEN_PATH", "/home/me/.cache/token", "cannot open /home/me/.cache/token"),
        ("MAX_TOKENS", "100000000", "100000000 samples"),
        ("API_KEY", "none", "none of them"),
    ],
)
def test_values_that_are_no_secrets_stay_in_texts(name: str, value: str, text: str) -> None:
    assert redact_text(text, {name: value}) == text


def test_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "opaque-4711")
    assert redact_text("it is opaque-4711") == f"it is {REDACTED}"
    monkeypatch.setenv("SOME_TOKEN", "opaque-0815")
    assert redact_text("it is opaque-0815, no longer opaque-4711") == f"it is {REDACTED}, no longer opaque-4711"


def test_a_configuration_through_and_through() -> None:
    given = {"a": {"db_password": 12345678, "rate": 0.1, "on": True}, "list": [{"token": "x", "path": "/data"}, None]}
    shown = {
        "a": {"db_password": REDACTED, "rate": 0.1, "on": True},
        "list": [{"token": REDACTED, "path": "/data"}, None],
    }
    assert redact("", given, {}) == shown
    assert redact("vars.token", "${oc.env:HF_TOKEN}", {}) == "${oc.env:HF_TOKEN}"


def test_a_long_text_takes_no_time() -> None:
    texts = [secrets.token_urlsafe(100_000), "a-" * 50_000, "eyJ" * 30_000, "x://" * 30_000, "my" * 50_000]
    started = time.process_time()
    for text in texts:
        redact_text(text, {})
    assert time.process_time() - started < 20


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
        f"Authorization: Basic {SECRET}",
        f"train --password {SECRET} --seed 1",
        f"https://host/?key={SECRET}&x=1",
        f"postgresql://user:slash/{SECRET}@host/db",
        f"os.environ['HF_TOKEN'] = '{SECRET}'",
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


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redact_text(text) == text


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
