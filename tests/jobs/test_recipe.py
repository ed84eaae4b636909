from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cluster.redaction import is_secret
from azureml_strategy.jobs.plan import override_texts, refuse_secrets
from azureml_strategy.jobs.service_errors import JobError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "hf_abcdefgh"),
        ("WANDB_API_KEY", "0a1b2c3d"),
        ("accountKey", "abc=="),
        ("callbacks.push.password", "hunter2"),
        ("AZURE_CLIENT_SECRET", "abc"),
        ("MSI_SECRET", "abc"),
        ("WANDB_KEY", "abc"),
        ("job.environment_variables.WANDB_KEY", "abc"),
        ("job.environment_variables.KEY", "abc"),
        ("SMTP_PASS", "abc"),
        ("STORAGE_SAS", "?sv=1"),
        ("DB_CONNECTION_STRING", "Server=x"),
        ("OCP_APIM_SUBSCRIPTION_KEY", "abc"),
        ("data.root", "https://account.blob.core.windows.net/data?sv=2024&sig=abc%3D"),
        ("data.root", "https://user:password@host/data"),
        ("anything", "AccountName=a;AccountKey=b"),
        ("anything", "eyJhbGciOi.eyJzdWIi.c2ln"),
        ("callbacks.x", "{_target_: a.B, token: abcdef}"),
        ("anything", "Authorization: Bearer abcdef"),
        ("vars.text", "hf_" + "aB3" * 11),
        ("vars.text", "ghp_" + "x1Y" * 12),
        ("vars.text", "sk-proj-" + "a1_B" * 10),
        ("vars.text", "AKIAIOSFODNN7EXAMPLE"),
        ("callbacks.tell.to", "https://hooks.slack.com/services/T00000000/B00000000/" + "X" * 24),
        ("callbacks.tell.to", "https://contoso.webhook.office.com/webhookb2/0-0/IncomingWebhook/0/0"),
        ("callbacks.tell.to", "https://discord.com/api/webhooks/123456789/abcdefg"),
    ],
)
def test_secrets_are_refused_and_not_repeated(name: str, value: str) -> None:
    with pytest.raises(JobError, match="key vault") as caught:
        refuse_secrets({"first": "1", name: value})
    assert str(caught.value).startswith(f"{name} looks like a secret")
    assert value not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("data.tokenizer", "tokenizer.json"),
        ("data.sort_key", "length"),
        ("NCCL_IB_PKEY", "0x8001"),
        ("job.inputs.x.path", "abfss://images@account.dfs.core.windows.net/train"),
        ("job.inputs.x.path", "wasbs://images@account.blob.core.windows.net/train"),
        ("data.end_of_text", "<|endoftext|>"),
        ("model.pad_token", "0"),
        ("HF_TOKEN", "${vars.none}"),
        ("NCCL_DEBUG", "INFO"),
        ("MONKEY", "banana"),
        ("SASKATOON", "x"),
        ("model.patience", "3"),
        ("job.identity.client_id", "1b2c-3d"),
        ("job.inputs.x.path", "azureml://subscriptions/1b2c/resourcegroups/g/workspaces/w/datastores/d/paths/p"),
        ("job.environment.name", "azureml:/subscriptions/1b2c/resourceGroups/g"),
    ],
)
def test_what_only_looks_a_little_like_one_is_let_through(name: str, value: str) -> None:
    refuse_secrets({name: value})


# Before `token` they make a name of a language model's: its special tokens, and numbers of tokens.
OF_LANGUAGE = (
    *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "special", "extra", "image", "vision"),
    *("audio", "text", "prompt", "next", "last", "first", "new", "max", "min", "num", "n", "per", "seen", "total"),
    *("count", "global", "context", "vocab", "batch", "level", "mixing", "embedding", "embed", "weight", "loss"),
    "budget",
)
SECRETS = ("secret", "password", "passphrase", "pwd", "credential", "sas", "signature", "apikey", "api_key", "webhook")
WORDS = st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=1)


@given(WORDS.filter(lambda word: word not in OF_LANGUAGE), WORDS, st.sampled_from(SECRETS), st.text(min_size=1))
def test_a_name_that_says_so_is_enough(whose: str, word: str, secret: str, value: str) -> None:
    text = value.strip().strip("'\"")
    assert is_secret(f"{whose}_token", f"s3cret-{text}")
    assert is_secret(f"{word}_{secret}", f"s3cret-{text}")


@given(st.sampled_from(OF_LANGUAGE), st.integers().map(str) | WORDS)
def test_tokens_of_a_language_model_are_no_secrets(word: str, value: str) -> None:
    assert not is_secret(f"{word}_token", value)


def test_what_a_secret_variable_here_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell puts it there: vars.text=$WANDB_API_KEY has the form of any commit's hash."""
    refuse_secrets({"vars.text": "0123456789abcdef" * 2})
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2)
    with pytest.raises(JobError, match=r"vars\.text looks like a secret"):
        refuse_secrets({"vars.text": "0123456789abcdef" * 2})
    monkeypatch.setenv("AZUREML_ARM_SUBSCRIPTION", "5f08e1b6-7c1e-4b5a-8a54-0d9b6a1c2d3e")
    refuse_secrets({"job.workspace.subscription": "5f08e1b6-7c1e-4b5a-8a54-0d9b6a1c2d3e"})


def test_the_keys_of_overrides() -> None:
    assert override_texts(["a.b=1=2", "+c=x", "++d=", "~e"]) == {"a.b": "1=2", "c": "x", "d": "", "e": ""}
