"""Ranks that train on the same samples: one warning, on rank 0; none where they do not, or where it is meant."""

from __future__ import annotations

from tests.multiprocess.conftest import RunJob


def test_who_is_warned(run_job: RunJob) -> None:
    job = run_job("iterable.py", nodes=2)
    assert job.exit_code == 0, job.output
    warned = {name for name, lines in job.results[0].items() if lines}
    same = {"same", "stock strategy", "nested, same", "map-style, nobody splits", "map-style, all of it twice"}
    assert warned == same, job.output
    assert all(len(lines) <= 1 for lines in job.results[0].values())
    assert not any(job.results[1].values())
    (line,) = job.results[0]["same"]
    assert line.startswith("Ranks 0, 1 train on the same samples: their first 2 batches of Rows are equal")
    assert "itertools.islice(samples, r, None, n)" in line
    assert "AZUREML_STRATEGY_DATA_CHECK=off" in line


def test_the_switch(run_job: RunJob) -> None:
    job = run_job("iterable.py", nodes=2, extra={"AZUREML_STRATEGY_DATA_CHECK": "off"})
    assert job.exit_code == 0, job.output
    assert not any(lines for lines in job.results[0].values())
