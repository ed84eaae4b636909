"""Which layouts read which checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from azureml_strategy.strategies.pipeline import PipelineError
from azureml_strategy.strategies.pipeline.checkpoint import PipelineLayout

SAVED = PipelineLayout([0, 2, 3], 2, 0, "32-true", ["network.first", None, "network.last"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SAVED.write(tmp_path)
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    assert PipelineLayout.read(folder) == SAVED


@pytest.mark.parametrize(
    ("layout", "training"),
    [
        (SAVED, True),
        (replace(SAVED, replicas=8), True),  # replicas have equal states
        (replace(SAVED, zero_stage=1), False),
        (replace(SAVED, bounds=[0, 3]), False),
        (replace(SAVED, precision="bf16-mixed"), False),
    ],
)
def test_layouts_that_can_read_it(folder: Path, layout: PipelineLayout, training: bool) -> None:
    layout.check(folder, training)


@pytest.mark.parametrize(
    ("layout", "training", "words"),
    [
        (replace(SAVED, bounds=[0, 1, 3]), True, r"cut at layers \[2\].*cut at layers \[1\].*consolidate"),
        (replace(SAVED, bounds=[0, 1, 2, 3]), False, "written by 2 stages.*others of 3.*num_stages=2 or less"),
        (replace(SAVED, zero_stage=1), True, "zero_stage=0.*zero_stage=1"),
        (replace(SAVED, places=["network.first", None]), False, "this module has network.first. Build"),
    ],
)
def test_layouts_that_cannot(folder: Path, layout: PipelineLayout, training: bool, words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        layout.check(folder, training)


def test_bfloat16_is_zero_stage_1_whatever_was_asked_for(tmp_path: Path) -> None:
    saved = replace(SAVED, precision="bf16-mixed")
    saved.write(tmp_path)
    replace(saved, zero_stage=1).check(tmp_path, training=True)


def test_states_that_zero_spread_over_the_replicas(tmp_path: Path) -> None:
    spread = replace(SAVED, zero_stage=1)
    spread.write(tmp_path)
    with pytest.raises(PipelineError, match=r"x 2 replicas.*x 4 replicas"):
        replace(spread, replicas=4).check(tmp_path, training=True)


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"no checkpoint of a pipeline: it has no pipeline\.json"):
        SAVED.check(tmp_path, training=True)
