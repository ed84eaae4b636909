"""Values in plain form: what torch's weights-only unpickler reads, and equal when they are made again."""

from __future__ import annotations

import io
import math
import operator
import random
import re
import threading
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from azureml_strategy.checkpoint.allowed_types import Names
from azureml_strategy.checkpoint.encoding import NotEncodableError, decode, encode, is_plain


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3
    ALSO_HIGH = 3


class Access(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Settings:
    path: Path
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Key:
    name: str


@dataclass(frozen=True, slots=True)
class Slotted:
    name: str
    path: Path


class Bare:
    """Its fields only; whoever makes one in the usual way notices."""

    __slots__ = ("__dict__", "slot")
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.slot, self.other = Path("a"), 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bare) and (self.slot, self.other) == (other.slot, other.other)


class WithoutLock:
    """Says what of it can be written."""

    def __init__(self) -> None:
        self.lock, self.path = threading.Lock(), Path("a")

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithoutLock) and self.path == other.path


Pair = namedtuple("Pair", "one other")  # as older code has it
SHORT = timezone(timedelta(hours=2), "SUMMER")
VALUES: dict[str, Any] = {
    "path": Path("/data/run"),
    "pure path": (PurePosixPath("a/b"), PureWindowsPath("c:/d")),
    "numpy scalar": np.float64(0.1),
    "numpy scalars": [np.float32(0.1), np.int64(3), np.bool_(True), np.str_("a"), np.datetime64("2026-01-02")],
    "numpy dtype": np.dtype("float32"),
    "config": OmegaConf.create({"a": {"b": [1, {"c": "${a.d}"}], "d": 3, "e": None}, "f": "???"}),
    "list config": OmegaConf.create([1, {"a": 2}]),
    "partial": partial(torch.optim.AdamW, lr=0.1, betas=(0.9, Path("x"))),
    "datetime": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    "datetimes": [datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")), time(1, 2, tzinfo=SHORT)],
    "date": date(2026, 1, 2),
    "timedelta": timedelta(days=1, microseconds=3),
    "namespace": Namespace(a=1, path=Path("b")),
    "simple namespace": SimpleNamespace(a=1, path=Path("b")),
    "function": math.sqrt,
    "functions": [nn.functional.relu, torch.relu, np.log, operator.add, Settings, int, nn.Linear.forward, np.float32],
    "enum": Colour.RED,
    "enums": [Level.HIGH, Access.READ | Access.WRITE, Access(0), re.IGNORECASE | re.DOTALL],
    "dataclass": Settings(Path("a"), {"b": 1.0}),
    "dataclasses": [Slotted("a", Path("b")), {Key("c"): 1}, {Key("d")}],
    "set": {Path("a"), 1},
    "frozenset": frozenset({1, "a"}),
    "range": range(3, 9, 2),
    "slice": slice(1, None, 2),
    "long": -(1 << 3000),
    "containers": [deque([1, Path("a")], 3), Counter({Path("a"): 2}), OrderedDict(a=Path("b"))],
    "defaultdict": defaultdict(list, {"a": [Path("b")]}),
    "named tuple": Pair(1, Path("a")),
    "numbers": [Decimal("1.10"), Fraction(1, 3), uuid.UUID(int=3)],
    "pattern": re.compile("a+", re.IGNORECASE),
    "object": Bare(),
    "without lock": WithoutLock(),
    "keys": {Path("a"): 1, (1, Colour.RED): 2, np.int64(4): 3},
    "nested": {"a": [(Path("b"), {"c": frozenset({Colour.RED})})]},
}
PLAIN: dict[str, Any] = {
    "nothing": None,
    "numbers": [True, 1, 1.5, 1j, -(1 << 2038)],
    "text": ["a", b"b", bytearray(b"c")],
    "torch's": (torch.Size([1, 2]), torch.device("cpu"), torch.float32, torch.strided, torch.ones(2)),
    "parameter": nn.Parameter(torch.ones(2)),
    "containers": [{1, 2}, OrderedDict(a=1), Counter("aab"), {"a": ({"b": []},)}],
}


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(encode(value), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True), Names(trusted=True))


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_is_equal_when_it_is_made_again(kind: str) -> None:
    value, made = VALUES[kind], Bare.made
    assert not is_plain(value)
    again = through_a_file(value)
    assert repr(again) == repr(value) if kind == "partial" else again == value  # no two partials are equal
    assert type(again) is type(value)
    if type(value) is list:
        assert [type(each) for each in again] == [type(each) for each in value]
    assert Bare.made == made


@pytest.mark.parametrize("kind", PLAIN)
def test_what_torch_takes_stays_as_it_is(kind: str) -> None:
    value = PLAIN[kind]
    assert is_plain(value)
    assert encode(value)[1] is value
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([Path("a"), [1, 2], None], dtype=object).reshape(3, 1),
        np.empty((0, 3)),
        np.array(3, dtype=np.uint64),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays(array: np.ndarray[Any, Any]) -> None:
    again = through_a_file({"a": array})["a"]
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tolist() == array.tolist()
    assert again.flags.writeable


def test_generators_go_on() -> None:
    python, numpy, old, gpu = random.Random(1), np.random.default_rng(2), np.random.RandomState(3), torch.Generator()
    sources = [np.random.Generator(each(5)) for each in (np.random.MT19937, np.random.Philox, np.random.SFC64)]
    old.standard_normal()  # has one more in store
    draws = [python.random, numpy.random, old.standard_normal, *(each.random for each in sources)]
    again = through_a_file([python, numpy, old, *sources, gpu])
    redraws = [again[0].random, again[1].random, again[2].standard_normal, *(each.random for each in again[3:6])]
    assert [draw() for draw in redraws] == [draw() for draw in draws]
    assert torch.equal(torch.rand(3, generator=again[6]), torch.rand(3, generator=gpu))


def test_one_object_stays_one_object() -> None:
    settings, weights, paths = Settings(Path("a")), torch.ones(2), [Path("b")]
    value = {"one": [settings, weights, paths], "other": [settings, weights, paths]}
    again = through_a_file(value)
    for one, other in zip(again["one"], again["other"], strict=True):
        assert one is other or torch.equal(one, other)
    again["one"][1][0] = 5
    assert again["other"][1][0] == 5


def test_a_config_keeps_its_flags_and_what_surrounds_it() -> None:
    whole = OmegaConf.create({"rate": 3, "model": {"layers": [{"rate": "${rate}"}]}})
    OmegaConf.set_struct(whole, True)
    OmegaConf.set_readonly(whole.model, True)
    part: DictConfig = through_a_file({"a": whole.model.layers[0]})["a"]
    assert part.rate == 3
    assert OmegaConf.is_readonly(part)
    assert OmegaConf.is_struct(part)


def test_registered_types_stay_as_they_are() -> None:
    with torch.serialization.safe_globals([Settings, Bare]):
        assert not is_plain(Settings(Path("a"))), "what it holds counts, too"
        value = Settings("a")  # type: ignore[arg-type]
        assert is_plain(value)
        assert encode([value])[1][0] is value
    assert not is_plain(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 1, r"state → 'deep'.*<lambda>, which is not found"),
        (threading.Lock(), r"state → 'deep'.*_thread.lock.*cannot pickle"),
        (io.StringIO(), r"state → 'deep'.*StringIO"),
        (nn.Linear(1, 1), r"Linear, which says itself how it is pickled"),
        (Settings(threading.Lock()), r"'deep' → path.*lock"),  # type: ignore[arg-type]
        (type("Local", (), {})(), "Local, which is not found"),
        (Bare().__eq__, "method"),
        ((each for each in ()), "generator"),
        (type("Words", (list,), {})(), "Words, which is more than its fields"),
    ],
)
def test_what_has_no_plain_form_is_named(value: Any, message: str) -> None:
    with pytest.raises(NotEncodableError, match=message):
        encode({"'deep'": value}, ("state",))


def test_what_contains_itself() -> None:
    value: list[Any] = [Path("a")]
    value.append(value)
    with pytest.raises(NotEncodableError, match="a list that contains itself"):
        encode(value)
    value.pop(0)
    assert is_plain(value), "torch takes it as it is"
