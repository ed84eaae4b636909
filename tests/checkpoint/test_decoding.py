"""What somebody else may have written in plain form: nothing of it runs."""

from __future__ import annotations

from typing import Any

import pytest

from azureml_strategy.checkpoint.allowed_types import Names
from azureml_strategy.checkpoint.encoding import decode

HERE = __name__
ran: list[str] = []


class Traps:
    """Notes each piece of its code that runs."""

    def __new__(cls) -> Traps:
        ran.append("__new__")
        return super().__new__(cls)

    def __init__(self) -> None:
        ran.append("__init__")

    def __setattr__(self, name: str, value: Any) -> None:
        ran.append("__setattr__")

    def __getattribute__(self, name: str) -> Any:
        ran.append("__getattribute__")
        return super().__getattribute__(name)

    def __hash__(self) -> int:
        ran.append("__hash__")
        return 1

    def __eq__(self, other: object) -> bool:
        ran.append("__eq__")
        return True

    def __iter__(self) -> Any:
        ran.append("__iter__")
        return iter(())

    def __index__(self) -> int:
        ran.append("__index__")
        return 1

    def __fspath__(self) -> str:
        ran.append("__fspath__")
        return "a"

    def keys(self) -> Any:
        ran.append("keys")
        return ()

    @property
    def field(self) -> int:
        ran.append("field")
        return 1

    @field.setter
    def field(self, value: Any) -> None:
        ran.append("field")


class Goes:
    def __del__(self) -> None:
        ran.append("__del__")


class SetsState:
    def __setstate__(self, state: Any) -> None:
        ran.append("__setstate__")


class Reduces:
    def __reduce__(self) -> Any:
        ran.append("__reduce__")
        return (Reduces, ())


def called(*arguments: Any) -> None:
    ran.append("called")


TRAP = ["object", [["reference", [HERE, "Traps"]], [["field", ["plain", 1]], ["other", ["plain", 2]]]]]
CALLED = ["reference", [HERE, "called"]]


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    ran.clear()
    yield
    assert ran == []


def test_fields_are_set_and_nothing_else_happens() -> None:
    value = decode(TRAP, Names(trusted=True))
    assert object.__getattribute__(value, "__dict__") == {"field": 1, "other": 2}
    assert decode(["partial", [CALLED, ["plain", (1,)], ["plain", {}]]], Names(trusted=True)).func is called


@pytest.mark.parametrize(
    "encoded",
    [
        ["dict", [[TRAP, ["plain", 1]]]],
        ["set", [TRAP]],
        ["frozenset", [["tuple", [TRAP]]]],
        ["path", TRAP],
        ["range", ["tuple", [TRAP]]],
        ["range", TRAP],
        ["date", ["tuple", [["plain", 1], ["list", [TRAP]]]]],
        ["deque", TRAP],
        ["deque", ["tuple", [TRAP, ["plain", None]]]],
        ["defaultdict", ["tuple", [CALLED, TRAP]]],
        ["namespace", TRAP],
        ["numpy scalar", TRAP],
        ["numpy objects", [[1], TRAP]],
        ["partial", [CALLED, TRAP, ["plain", {}]]],
        ["partial", [CALLED, ["plain", ()], TRAP]],
        ["partial", [TRAP, ["plain", ()], ["plain", {}]]],
        ["named tuple", [["reference", ["builtins", "tuple"]], TRAP]],
        ["named tuple", [["reference", [HERE, "Traps"]], ["plain", ()]]],
        ["enum", [["reference", [HERE, "Traps"]], ["RED"]]],
        ["object", [["reference", [HERE, "Goes"]], []]],
        ["object", [["reference", [HERE, "SetsState"]], []]],
        ["object", [["reference", [HERE, "Reduces"]], []]],
        ["object", [["reference", [HERE, "called"]], []]],
        ["reference", [HERE, "ran"]],
        ["reference", [HERE, "gone"]],
        ["reference", ["no.such.module", "gone"]],
        ["new", []],
        ["class", ["reference", [HERE, "Traps"]]],
        ["numpy array", ["|O", [1], None]],
    ],
    ids=str,
)
def test_what_would_run_code_is_refused(encoded: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        decode(encoded, Names(trusted=True))
