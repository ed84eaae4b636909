"""Pictures that show what was measured."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
from PIL import Image
from tests.benching.conftest import MakePairs

from azureml_strategy.benching.plot import plot
from azureml_strategy.benching.results import Results, Sweep


def pixels(results: Results) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(plot(results))).convert("RGB"))


def test_a_line_for_each_collective_and_the_expectation(sweep: Results) -> None:
    whole = pixels(sweep)
    assert whole.shape == (600, 960, 3)
    assert isinstance(sweep.measured, Sweep)
    alone = replace(sweep, measured=Sweep(sweep.measured.measurements[:2]))
    assert not np.array_equal(pixels(alone), whole)
    assert not np.array_equal(pixels(replace(sweep, verdict=None)), whole)


def test_nothing_that_could_be_measured(sweep: Results) -> None:
    assert pixels(replace(sweep, measured=Sweep([], {"all-reduce": "no"}), verdict=None)).shape == (600, 960, 3)


def test_pairs_are_squares(pairs: MakePairs) -> None:
    even = pixels(pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.0}))
    assert not np.array_equal(even, pixels(pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 0.5})))
