"""Refuses a secret before it gets into a job, where everybody with access to the workspace could read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.jobs.errors import JobError

# Whole words of a name: `HF_TOKEN` and `storage.account_key` are secret, `data.tokenizer` and `MONKEY` are not. In
# capitals, as variables are written, the last word is enough: `WANDB_KEY` is secret, `data.sort_key` is not.
_SECRET_WORD = re.compile(
    r"(?:^|[^a-z])(?:token|secret|password|passwd|passphrase|pwd|credentials?|sas|(?:api|account|access|shared|private"
    r"|storage|master|instrumentation|subscription|client|secret)_?key|conn(?:ection)?_?str(?:ing)?|pat)s?(?:$|[^a-z])"
    r"|(?-i:(?:^|[._])(?:[A-Z0-9]+_)?(?:KEY|PASS|AUTH|JWT|COOKIE)$)",
    re.I,
)
# Values that no secret has: numbers, words of YAML, and what is looked up elsewhere.
_HARMLESS = re.compile(r"|true|false|null|none|[-+.\de_]+|\$\{.*\}", re.I)
# The subscription in the address of a data asset or an environment has to stay, and is no secret; nor is the container
# before the account, where other addresses have a user and a password.
_ADDRESS = re.compile(r"(?i)subscriptions/[^/\s]+|(?<=(?:abfss|wasbs)://)[\w$-]+@")
_INSTEAD = (
    "A job's command and variables can be read by everybody with access to the workspace. Put it into the workspace's "
    "key vault and read it in the job, and reach storage through a datastore or the job's own identity "
    "(job.identity.type=managed)."
)


def refuse_secrets(texts: Mapping[str, str]) -> None:
    """Look through everything that a job will carry.

    Args:
        texts: each value by its name: a variable, a key of the recipe, or whatever tells the user where it stands.

    Raises:
        JobError: one of them is a secret by its name or by its form. The message does not repeat it.
    """
    for name, value in texts.items():
        if is_secret(name, value):
            raise JobError(f"{name} looks like a secret, by its name or its form, so that no job was made. {_INSTEAD}")


def is_secret(name: str, value: str) -> bool:
    """Whether a value is secret by its name, or holds a signature, a token, a key or a password by its form."""
    text = value.strip().strip("'\"")
    named = _SECRET_WORD.search(_words(name)) is not None and not _HARMLESS.fullmatch(text)
    plain = _ADDRESS.sub("", text)
    return named or redact_text(plain) != plain


def override_texts(overrides: Iterable[str]) -> dict[str, str]:
    """What each override of a command line sets, by its key."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def _words(name: str) -> str:
    """The name with a border between its words: `accountKey` as `account_Key`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
