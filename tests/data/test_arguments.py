"""Checks of arguments, and the share of the cores."""

from __future__ import annotations

import os

import pytest

from azureml_strategy.data.arguments import default_num_workers, require


def test_an_argument_out_of_range_is_named() -> None:
    require("batch_size", 1, True, "1 or more")
    with pytest.raises(ValueError, match="batch_size=0, but it must be 1 or more"):
        require("batch_size", 0, False, "1 or more")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_workers_share_the_cores_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert [default_num_workers(processes) for processes in (1, 8)] == [1, 1]
    finally:
        os.sched_setaffinity(0, allowed)
    assert default_num_workers(1) == min(len(allowed), 16)
