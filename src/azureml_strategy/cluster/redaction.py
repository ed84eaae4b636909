"""Removes secrets from everything that is printed, recorded or sent. Only this module defines what a secret is.

It recognizes a secret by the name of its variable or key (`HF_TOKEN`, `accountKey`), by its form (tokens of known
services, signatures, passwords in addresses, private keys), or because a variable of this process with a secret name
holds it. The forms are those that the services document, and that `detect-secrets` and GitHub's secret scanning look
for. A random-looking value alone is not redacted: commit hashes, run ids and encoded images look random too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import quote, unquote

from azureml_strategy.cluster.environ import copied

REDACTED = "<redacted>"

# One of these words makes a name secret.
_SECRET_WORD = re.compile(
    "secret|password|passwd|passphrase|passcode|pwd|pgpass|cred|credential|sas|sig|signature|authorization|bearer|jwt"
    # Words written together, as in PGPASSWORD.
    r"|cookie|apikey|connstr|webhook|\w+(?:password|passwd|apikey|secret|authtoken|accesstoken)"
)
_TOKEN_WORD = re.compile("token|pat")
# With one of these words, a token is a language model's, or the name is about a number of tokens.
_OF_LANGUAGE = re.compile(
    "pad|eos|bos|unk|sep|cls|mask|stop|start|end|special|extra|image|vision|audio|text|prompt|next|last|first|new|max"
    "|min|num|n|per|seen|total|count|global|context|vocab|batch|level|mixing|embedding|embed|weight|loss|budget"
)
# Pairs of words that make a name secret. `key` alone may be the key of a dictionary.
_SECRET_PAIR = re.compile(
    "(?:api|account|access|shared|private|storage|master|instrumentation|subscription|client|secret|encryption|signing"
    "|ssh|license|host|function|admin|wandb|hf|openai|anthropic|azure|aws|comet|neptune) key"
    "|(?:db|smtp|mail|user|ftp|proxy|admin|root|run|login) pass|connection string|conn str|identity header"
    "|(?:basic|http) auth|auth header"
)
# In capitals, as in environment variables, the last word is enough: `WANDB_KEY` is secret, `data.sort_key` is not.
_LAST_OF_CAPITALS = ("key", "pass", "auth")
# A name that ends in one of these words describes a secret, but its value is not the secret.
_ABOUT = re.compile("path|file|dir|folder|home|cache|sock|name|type|expiry|expires|length|size|count|limit|ids")
# Not secret, but private: the subscription, and the endpoint of the job's managed identity.
_PRIVATE_WORDS = ("subscription", "msi", "instrumentation")

# Values that no secret has: YAML words, brackets (empty ones, or around names and values that are checked separately),
# references to variables, placeholders, and the special tokens of a tokenizer.
_HARMLESS = re.compile(r"|true|false|null|none|[\[({]+[\])}]*|\$\{.*\}|\$\w+|<.*>|\[[A-Z]+\]|\*+", re.I | re.S)
_NUMBER = re.compile(r"[-+.\de_]+", re.I)
_ADDRESS = re.compile(r"~?/[a-z]{2,16}(?:/.*)?|\./.*|[A-Za-z]:\\.*")  # of a file; base64 may start with a slash too
# Python code in a traceback, where the value is an expression and not a secret.
_CODE = re.compile(r"(?:os|self|cls|cfg|config|args|options|settings)\.\w.*|[\w.]*[(\[].*|str|int|bytes|bool|float|Any")

# Shorter values are flags or words, which also occur in unrelated texts.
_SHORTEST_VALUE, _SHORTEST_MIXED = 8, 6
_PLAIN_WORD = re.compile(r"[a-z]+|[A-Z]?[a-z]+|[A-Z]+")

_IN_URL = r"(?<!abfs://)(?<!abfss://)(?<!wasb://)(?<!wasbs://)(?<=://)(?!git@)"  # these have a container before `@`
# Each form: lower-case strings that a text must contain for the pattern to be tried (most texts need no regex then),
# the pattern, and the replacement.
_FORMS = (
    # A private key up to its end mark, or to the end of the text.
    (
        ("private key",),
        re.compile(r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----)(?:.*?(?=-----END )|.*)", re.S),
        rf"\1{REDACTED}",
    ),
    # The user and password in an address. A database's password may contain slashes.
    (("://", "@"), re.compile(_IN_URL + r"[^/\s]+(?=@)"), REDACTED),
    (
        ("://", "@"),
        re.compile(
            r"(?i)(\b(?:my|mariadb|postgres|ms|oracle|redis|mongodb|amqp)\w{0,9}(?:\+\w+)?://)[^\s/@:]*:[^\s@]{1,200}(?=@)"
        ),
        rf"\1{REDACTED}",
    ),
    # Webhook addresses of Slack, Teams and Discord: knowing one is enough to post there.
    (
        (".com",),
        re.compile(
            r"(?i)(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/|\b[\w-]{1,63}\.webhook\.office\.com/"
            r"|outlook\.office(?:365)?\.com/webhook/|(?:discord|discordapp)\.com/api/(?:v\d+/)?webhooks/"
            r"|\.logic\.azure\.com(?::443)?/workflows/|\.api\.powerplatform\.com(?::443)?/)[^\s\"'<>]+"
        ),
        rf"\1{REDACTED}",
    ),
    (
        ("authorization",),
        re.compile(r"(?i)((?<!\w)authorization[\"'\\]*\s*[:=]\s*[\"'\\]*)(?:\w+ +)?[^\s\"'\\,;}]+"),
        rf"\1{REDACTED}",
    ),
    (("bearer ",), re.compile(r"(?i)(?<=\bbearer )[\w.~+/=-]{6,}"), REDACTED),
    # Parameters of a query, which often have short names.
    (("=",), re.compile(r"(?i)([?&](?:key|code|sig|token|auth|pwd|pass)=)[^&\s\"'<>]+"), rf"\1{REDACTED}"),
    (("eyj", "."), re.compile(r"(?<![A-Za-z0-9])eyJ[\w-]{2,4000}\.[\w-]+\.[\w-]*"), REDACTED),  # a JSON web token
    # A 64-byte key of a storage account, Batch or Cosmos DB. A checksum has a prefix, such as `sha512-`.
    (("==",), re.compile(r"(?<![A-Za-z0-9+/-])[A-Za-z0-9+/]{86}==(?![A-Za-z0-9+/=])"), REDACTED),
)
_LONG_WORD = re.compile(r"[\w-]{16}")  # every token below contains one
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"
    r"|gl(?:pat|dt|ft|soat|rt|cbt|ptt|imt|agent|oas)-[\w-]{20,}"  # GitLab
    r"|sk-(?:proj|ant|svcacct|admin|or|live|test|lf)-[\w-]{12,}|sk-[A-Za-z0-9]{16,}"  # OpenAI, Anthropic, ...
    r"|(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Z0-9])"  # AWS
    r"|xox[abposre](?:\.xox[bp])?-[\w-]{10,}|xapp-\d-[\w-]{10,}"  # Slack
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"  # Google
    r"|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|dckr_pat_[\w-]{20,}|dapi[0-9a-f]{32}|nvapi-[\w-]{20,}|wandb_v1_\w{20,}"
    r"|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\d{8,10}:[A-Za-z0-9_-]{35}(?![\w-])"  # Telegram
    r"|[\w~.-]{3}\dQ~[\w~.-]{31,34}"  # client secret of an Entra ID application
    r"|[A-Za-z0-9]{76}AZDO[A-Za-z0-9]{4}"  # Azure DevOps
    # Other Azure keys, which contain a mark of their service (Microsoft, "Identifiable secrets").
    r"|[A-Za-z0-9+/]{32,80}(?:\+A(?:St|MC|Ba|Rm)|AIoT|Az(?:Fu|Se|Ca)|ACDb)\w{4,8}={0,2}"
    r")"
)
# A name and the separator before its value: `=` or `:`, or a space after a command-line option.
_NAMED = re.compile(
    r"""(?<![\w.])(?P<name>[A-Za-z_][\w.-]{0,100})(?P<between>["'\\\]]*[ \t]*[=:]+[ \t]*)"""
    r"""|(?<!\S)(?P<option>--?[A-Za-z][\w-]{0,60})[ \t]+(?!-)"""
)
_VALUE = re.compile(r"""\\?"[^"\n]*"|\\?'[^'\n]*'|[^\s&;,"'}]+""")
_remembered: dict[str, None] = {}
_SUBSCRIPTION = re.compile(r"(?i)(?<=/subscriptions/)[^/\s]+")


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a text, such as a traceback or an answer of a service, without secrets and without subscription ids.

    The values of variables with secret names, by default of this process, are redacted wherever they occur.
    """
    return _SUBSCRIPTION.sub(REDACTED, _redacted(text, environ, private=True))


def without_secrets(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Like `redact_text`, but keeps private values, such as the subscription in the address of a data asset."""
    return _redacted(text, environ, private=False)


def _redacted(text: str, environ: Mapping[str, str] | None, *, private: bool) -> str:
    values = _pattern_of_values(os.environ if environ is None else environ, private=private)
    text = values.sub(REDACTED, text) if values else text
    lower = text.lower()
    for needles, pattern, replacement in _FORMS:
        if all(needle in lower for needle in needles):
            text = pattern.sub(replacement, text)
    if _LONG_WORD.search(text):
        text = _TOKENS.sub(REDACTED, text)
    return "".join(_redacted_by_name(text))


def redact(name: str, value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Return the value of a name, such as a configuration key, without secrets. Lists and dictionaries are copied.

    Under a secret or private name, the whole text or number is redacted. The values of a dictionary go by their own
    keys. Otherwise only texts change, as by `redact_text`.
    """
    if isinstance(value, Mapping):
        return {key: redact(str(key), each, environ) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        shown = [redact(name, each, environ) for each in value]
        return shown if isinstance(value, list) else tuple(shown)
    if value is None or isinstance(value, bool):
        return value
    if is_private_name(name) and not _is_harmless(name, str(value)):
        return REDACTED
    return redact_text(value, environ) if isinstance(value, str) else value


def remember_secrets(name: str, value: Any) -> None:
    """From now on, redact the texts under a secret name of a configuration, at any depth, wherever they occur."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            remember_secrets(str(key), each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            remember_secrets(name, each)
    elif isinstance(value, str) and is_secret_name(name) and not _is_harmless(name, value):
        _remembered[value] = None


def is_secret(name: str, value: str) -> bool:
    """Whether a value is secret by its name, or contains a secret by its form or from this process's variables."""
    text = value.strip().strip("'\"")
    return (is_secret_name(name) and not _is_harmless(name, text)) or without_secrets(text) != text


@lru_cache(4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, key or option of this name holds a secret.

    Whole words count: `HF_TOKEN` and `storage.account_key` are secret, `data.tokenizer` and `MONKEY` are not.
    """
    words = _words(name)
    if not words or (_ABOUT.fullmatch(words[-1]) and "webhook" not in words) or name.endswith("Credential"):
        return False  # `AzureCliCredential` is a class of azure-identity
    singular = [word if word.endswith("ss") or word == "sas" else word.removesuffix("s") for word in words]
    if any(map(_SECRET_WORD.fullmatch, singular)):
        return True
    if any(map(_TOKEN_WORD.fullmatch, singular)) and not any(map(_OF_LANGUAGE.fullmatch, words)):
        return True
    if any(_SECRET_PAIR.fullmatch(f"{first} {second}") for first, second in pairwise(singular)):
        return True
    last = re.split(r"[.\s/-]", name)[-1]
    return last.isupper() and words[-1] in _LAST_OF_CAPITALS


@lru_cache(4096)
def is_private_name(name: str) -> bool:
    """Whether a value of this name is secret, or private as that of AZUREML_ARM_SUBSCRIPTION."""
    return is_secret_name(name) or any(word in _PRIVATE_WORDS for word in _words(name))


def _words(name: str) -> list[str]:
    """Split a name into lower-case words: `accountKey` into `account` and `key`."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in re.split(r"[^a-z0-9]+", parted.lower()) if word]


def _is_harmless(name: str, value: str) -> bool:
    """Whether no secret of this name could have this value. A password may be a number, a token may not."""
    if _HARMLESS.fullmatch(value):
        return True
    words = "".join(_words(name))
    return _NUMBER.fullmatch(value) is not None and not re.search("pass(?!es)|pwd|secret|cred", words)


def _redacted_by_name(text: str) -> Iterator[str]:
    """Yield the text in parts, with the values after secret names redacted."""
    done = 0
    for found in _NAMED.finditer(text):
        name = found["name"] or found["option"]
        if found.end() < done or not is_secret_name(name):
            continue
        value = _VALUE.match(text, found.end())
        plain = value[0].strip("\\'\"") if value else ""
        if not value or _is_harmless(name, plain) or _CODE.fullmatch(plain) or plain.startswith(REDACTED):
            continue
        yield text[done : found.end()] + value[0].replace(plain, REDACTED)
        done = value.end()
    yield text[done:]


def _pattern_of_values(environ: Mapping[str, str], *, private: bool) -> re.Pattern[str] | None:
    """A pattern of the values of the secret variables, the passwords in addresses, and the remembered secrets."""
    known = is_private_name if private else is_secret_name
    items = copied(environ).items()
    values = tuple(value for name, value in items if known(name) and not _is_harmless(name, value))
    addresses = tuple(value for _, value in items if "://" in value and "@" in value)
    return _pattern((*values, *_remembered), addresses)


@lru_cache(8)
def _pattern(values: tuple[str, ...], addresses: tuple[str, ...]) -> re.Pattern[str] | None:
    found = {part for value in values if not _ADDRESS.fullmatch(value) for part in (value, *value.splitlines())}
    passwords = [each for address in addresses for each in re.findall(r"://[^/\s@:]*:([^\s]+)@", address)]
    found |= {*passwords, *map(unquote, passwords)}
    spelt = {spelling for value in found if _is_long(value) for spelling in _spellings(value.strip())}
    return re.compile("|".join(map(_as_pattern, sorted(spelt, key=len, reverse=True)))) if spelt else None


def _is_long(value: str) -> bool:
    value = value.strip()
    mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    return len(value) >= (_SHORTEST_MIXED if mixed else _SHORTEST_VALUE)


def _spellings(value: str) -> set[str]:
    """The value as it is, percent-encoded as in an address, and as in a Python or JSON string."""
    return {value, quote(value, safe=""), repr(value)[1:-1], json.dumps(value)[1:-1]}


def _as_pattern(value: str) -> str:
    """A plain word is matched as a whole word only: the password `postgres` must not match in `postgresql`."""
    exact = re.escape(value)
    return rf"(?<![A-Za-z0-9]){exact}(?![A-Za-z0-9])" if _PLAIN_WORD.fullmatch(value) else exact
