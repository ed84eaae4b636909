from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from azureml_strategy.command_line import as_typed, is_override, with_lists


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        *((each, True) for each in ("a=1", "+a.b=1", "++a=1", "~a", "~a=1", "data=synthetic", "a@b=c", "a='x -y'")),
        *((each, False) for each in ("train", "-m", "--multirun", "--cfg", "job", "--config-dir=conf", "my.yaml", "")),
    ],
)
def test_overrides_are_told_from_flags(argument: str, expected: bool) -> None:
    assert is_override(argument) is expected


def test_overrides_of_a_running_job_are_as_typed() -> None:
    """Ranks that this one starts, the command to go on and the run's tags have the reference, not what it refers to."""
    typed = ["a=[{b: '${classes}'}]", "key=${oc.env:NOT_THERE}", "c=1"]
    assert as_typed(OmegaConf.create({"classes": 2, "overrides": typed}).overrides) == typed


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("profile.ranks=0,8", "profile.ranks=[0,8]"),
        ("+profile.ranks=0-3, 8", "+profile.ranks=[0-3, 8]"),
        *((each, each) for each in ("profile.ranks=0", "profile.ranks=0-3", "profile.ranks=[0,8]", "seed=1,2", "-m")),
    ],
)
def test_ranks_with_commas_are_a_list_and_no_sweep(argument: str, written: str) -> None:
    assert with_lists([argument]) == [written]
