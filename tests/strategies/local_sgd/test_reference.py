"""The oracle of these tests gives the parameter histories that torchft publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import scripts_on_path
from tests.strategies.local_sgd.reference import Rules, train

PUBLISHED = json.loads((Path(__file__).parent / "fixtures" / "torchft_diloco.json").read_text())
LAYERS = ("layers.0.weight", "layers.1.weight")


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: f"delay {each['delay']}, mixing {each['mixing']}")
def test_torchft(published: dict[str, Any]) -> None:
    with scripts_on_path():
        from two_layers import TwoLayers
    rules = Rules(6, 0, 2.0, 0.0, 2, published["delay"], published["mixing"])
    steps = len(published[LAYERS[0]]) - 1
    histories = train([TwoLayers(), TwoLayers()], rules, [[None] * steps] * 2)
    expected = [list(each) for each in zip(*(published[name][1:] for name in LAYERS), strict=True)]
    assert histories == [expected, expected]
