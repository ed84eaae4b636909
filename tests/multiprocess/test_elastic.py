"""A run that comes back with more or fewer ranks learns what the undisturbed run learns, step by step."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import Job, RunJob
from tests.multiprocess.scripts.noisy import curve

# Other ranks add up float32 in another order: of a loss relative to it, of the weights to the largest of them.
TOLERANCE = 1e-5
# DeepSpeed takes batches that do not fill a step over to the next epoch: here all of them do.
WHOLE_STEPS = {"limit_train_batches": 14, "val_check_interval": 14, "accumulate_grad_batches": 2}
# A batch of a pipeline is a step, of two micro-batches here.
PIPELINE = {"accumulate_grad_batches": 1, "batch_size": 4, "val_check_interval": 3}
TWO = {"accumulate_grad_batches": 2}
# Strategy, what the Trainer is given, and the attempts: how many ranks, and the step before which all of them die.
DEFAULT = [
    pytest.param("ddp", TWO, [(2, 3), (1, 11), (2, None)], id="ddp-2-1-2"),
    pytest.param("model_parallel", TWO, [(2, 11), (1, None)], id="model_parallel-2-1"),
]
EXHAUSTIVE = [
    pytest.param("pipeline", PIPELINE, [(4, 5), (2, None)], id="pipeline-4-2"),
    pytest.param("ddp", {"accumulate_grad_batches": 4}, [(1, 3), (2, None)], id="ddp-1-2"),
    pytest.param("ddp", {"val_check_interval": 3}, [(4, 4), (2, 10), (4, None)], id="ddp-4-2-4"),
    pytest.param("lightning_ddp", TWO, [(2, 11), (1, None)], id="lightning_ddp-2-1"),
    pytest.param("zero", WHOLE_STEPS, [(2, 11), (1, None)], id="zero-2-1"),
    pytest.param("zero", WHOLE_STEPS, [(2, 3), (4, 9), (2, None)], id="zero-2-4-2"),
    pytest.param("zero_config", WHOLE_STEPS, [(2, 11), (1, None)], id="zero_config-2-1"),
    pytest.param("model_parallel", WHOLE_STEPS, [(2, 3), (4, None)], id="model_parallel-2-4"),
    pytest.param("tensor_parallel", TWO, [(4, 3), (2, None)], id="tensor_parallel-4-2"),
    pytest.param("pipeline", {**PIPELINE, "batch_size": 8}, [(2, 3), (4, None)], id="pipeline-2-4"),
]


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks die at once here: none needs time to end well."""
    monkeypatch.setattr("azureml_strategy.emulator.processes._GRACE_SECONDS", 0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "options", "attempts"),
    [*DEFAULT, *(pytest.param(*each.values, id=each.id, marks=pytest.mark.exhaustive) for each in EXHAUSTIVE)],
)
def test_the_same_steps_on_other_ranks(
    run_job: RunJob, tmp_path: Path, strategy: str, options: dict[str, Any], attempts: list[tuple[int, int | None]]
) -> None:
    options = {"accumulate_grad_batches": 1, **options}
    whole = train(run_job, tmp_path / "whole", strategy, attempts[0][0], **options)
    for ranks, die_at in attempts:
        job = train(run_job, tmp_path / "elastic", strategy, ranks, die_at, **options)
        assert (job.exit_code == 0) == (die_at is None), job.output
    assert whole.exit_code == 0, whole.output
    assert "The global batch stays 8: it was batch size " in job.output
    ours, theirs = steps(tmp_path / "elastic"), steps(tmp_path / "whole")
    assert {step: samples for step, (_, samples) in ours.items()} == {
        step: samples for step, (_, samples) in theirs.items()
    }
    for step, (loss, _) in theirs.items():
        assert ours[step][0] == pytest.approx(loss, rel=TOLERANCE), f"step {step}"
    weights = whole.results[0]["weights"]
    assert job.results[0]["weights"] == pytest.approx(weights, rel=0, abs=TOLERANCE * max(map(abs, weights)))
    check_validations(tmp_path / "elastic", tmp_path / "whole")


def train(run_job: RunJob, output: Path, strategy: str, ranks: int, die_at: int | None = None, **options: Any) -> Job:
    """The next attempt in this folder."""
    attempt = len({path.name.split(".")[1] for path in output.glob("steps.*")})
    return run_job("elastic.py", strategy, output, die_at, attempt, json.dumps(options), nodes=ranks)


def steps(output: Path) -> dict[int, tuple[float, list[str]]]:
    """Mean loss and samples of each step, over its batches on all ranks; of a repeated step, what was done last."""
    batches: dict[int, dict[int, list[tuple[float, list[str]]]]] = defaultdict(lambda: defaultdict(list))
    for path in output.glob("steps.*.jsonl"):
        for line in path.read_text().splitlines():
            step, loss, rows = json.loads(line)
            batches[step][int(path.name.split(".")[1])].append((loss, rows))
    return {step: _joined(attempts[max(attempts)]) for step, attempts in batches.items()}


def _joined(parts: list[tuple[float, list[str]]]) -> tuple[float, list[str]]:
    samples = sorted(row for _, rows in parts for row in rows)
    return sum(loss * len(rows) for loss, rows in parts) / len(samples), samples


def check_validations(ours: Path, theirs: Path) -> None:
    """At the same steps, with the same losses; a repeated one may differ in its last digits."""
    found, expected = (
        {step: sorted(values) for (name, step), values in curve(each / "curve.jsonl").items() if name == "val/loss"}
        for each in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    for step, values in found.items():
        assert values == pytest.approx(expected[step] * len(values), rel=TOLERANCE)


@pytest.mark.slow
def test_too_many_ranks_are_refused_on_all_of_them(run_job: RunJob, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 1, "batch_size": 4}
    assert train(run_job, tmp_path / "elastic", "ddp", 1, 3, **options).exit_code != 0
    refused = train(run_job, tmp_path / "elastic", "ddp", 2, **options)
    assert refused.exit_code == 3, refused.output
    first, second = refused.each("refused")
    assert first == second
    assert (
        "was written with 4 samples to an optimizer step: batch size 4 x 1 data-parallel rank(s) x accumulation 1. "
        "Now there is batch size 4 x 2 data-parallel rank(s) x accumulation 1, and these ranks read 8 at once, and no "
        "whole number of that makes 4. Come back with 1 data-parallel rank(s), on 1 node(s) of 1 process(es), or with "
        "a batch size of 2 (data.batch_size=2 in a recipe)."
    ) in first


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_pipeline_whose_replicas_share_the_optimizer_needs_as_many(run_job: RunJob, tmp_path: Path) -> None:
    assert train(run_job, tmp_path / "elastic", "pipeline_zero", 4, 3, **PIPELINE).exit_code != 0
    refused = train(run_job, tmp_path / "elastic", "pipeline_zero", 2, **PIPELINE)
    assert refused.exit_code == 1
    assert "Resume with the same layout" in refused.output
