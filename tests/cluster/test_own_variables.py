"""Variables of this package that do nothing are named, and those that do something are not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import azureml_strategy
from azureml_strategy.cluster.environ import (
    CHECKPOINT_SWITCH,
    GUARD_SWITCH,
    HANG_WATCH_SWITCH,
    KNOWN,
    SWITCHES,
    variables_without_effect,
)
from azureml_strategy.plugin import _warn_of_variables

GUARD, PRICE = "AZUREML_STRATEGY_GUARD", "AZUREML_STRATEGY_PRICE_PER_HOUR"
# They choose a word, and `off` is one of them; whoever reads them says so of a wrong one.
WORDS = {CHECKPOINT_SWITCH: "auto", HANG_WATCH_SWITCH: "kill"}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"AZUREML_STRATEGY_HANGWATCH": "off"}, "nothing reads it. Did you mean AZUREML_STRATEGY_HANG_WATCH?"),
        ({"azureml_strategy_guard": "off"}, "nothing reads it. Did you mean AZUREML_STRATEGY_GUARD?"),
        ({"AZUREML_STRATEGY_COLOUR": "red"}, "nothing reads it. Remove it"),
        ({GUARD: "0"}, "AZUREML_STRATEGY_GUARD='0' switches nothing off. Write AZUREML_STRATEGY_GUARD=off"),
        ({GUARD: "false"}, "switches nothing off"),
        ({PRICE: "3,5"}, "AZUREML_STRATEGY_PRICE_PER_HOUR='3,5' is no price"),
    ],
)
def test_what_does_nothing_is_named(environ: dict[str, str], words: str) -> None:
    (text,) = variables_without_effect({"PATH": "/bin", **environ})
    assert words in text


def test_of_what_does_something_nothing_is_said() -> None:
    switches = {name: WORDS.get(name, value) for value in ("off", "on", "") for name in SWITCHES}
    assert variables_without_effect({**dict.fromkeys(KNOWN, "off"), PRICE: "3.5"}) == []
    assert variables_without_effect(switches) == []


def test_every_variable_of_the_code_is_known() -> None:
    package = Path(azureml_strategy.__file__).parent
    source = "\n".join(path.read_text() for path in package.rglob("*.py"))
    written = set(re.findall(r'"(AZUREML_STRATEGY_[A-Z_]*[A-Z])"', source))
    assert written <= set(KNOWN)
    assert GUARD_SWITCH in written


def test_it_is_said_once_a_process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AZUREML_STRATEGY_GARD", "off")
    _warn_of_variables.cache_clear()
    with caplog.at_level(logging.WARNING):
        _warn_of_variables()
        _warn_of_variables()
    _warn_of_variables.cache_clear()
    assert [record.message for record in caplog.records if "AZUREML_STRATEGY_GARD is set" in record.message] == [
        "AZUREML_STRATEGY_GARD is set, and nothing reads it. Did you mean AZUREML_STRATEGY_GUARD?"
    ]
