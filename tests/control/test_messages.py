from __future__ import annotations

from dataclasses import dataclass, make_dataclass

import pytest

from azureml_strategy.control import messages
from azureml_strategy.control.messages import from_json, register, to_json


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(messages, "_CLASSES", dict(messages._CLASSES))


@dataclass
class Told:
    step: int


@pytest.mark.usefixtures("classes")
def test_a_class_may_be_registered_again() -> None:
    register(Told)
    register(Told)
    assert from_json(to_json(Told(3))) == Told(3)


@pytest.mark.usefixtures("classes")
def test_another_class_of_the_same_name_is_refused() -> None:
    register(Told)
    with pytest.raises(ValueError, match=r"elsewhere\.Told cannot be registered .* Rename one of them"):
        register(make_dataclass("Told", ["epoch"], namespace={"__module__": "elsewhere"}))
    assert from_json(to_json(Told(3))) == Told(3), "the first one stays"
