from __future__ import annotations

import pytest

from azureml_strategy.command_line import is_override


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        *((each, True) for each in ("a=1", "+a.b=1", "++a=1", "~a", "~a=1", "data=synthetic", "a@b=c", "a='x -y'")),
        *((each, False) for each in ("train", "-m", "--multirun", "--cfg", "job", "--config-dir=conf", "my.yaml", "")),
    ],
)
def test_overrides_are_told_from_flags(argument: str, expected: bool) -> None:
    assert is_override(argument) is expected
