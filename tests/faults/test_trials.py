"""Trainings that are disturbed at random places: whatever happens, they end as if nothing had.

A short set of what `make soak` does at length. A seed names one trial for good; see `trial.py` for how to repeat one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults import disks, network
from tests.faults.job import ROOT
from tests.faults.trial import Trial
from tests.preloaded import Forked
from tests.tracking.server import Server

FAULTS = ROOT / "tests" / "faults"
# Seeds whose faults are met one after another; what they are, a trial prints.
SIGNALS, FILES, TRACKING = 13, 6, 10
# Of trouble with MLflow, after points are there that a later attempt would log again.
REPEATED = 8
# A disk is read-only from before the last step to the end.
REFUSED = 130043


_STRATEGIES = [("pipeline", 9), ("zero", 12), ("model_parallel", 8)]
needs_disk = [pytest.mark.root, pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not())]
needs_nodes = [pytest.mark.root, pytest.mark.skipif(bool(network.why_not()), reason=network.why_not())]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    server = Server(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    server.start()
    yield server.uri
    server.stop()


def run(trial: Trial, tmp_path: Path, references: Path) -> dict[str, Any]:
    """A trial in a process of its own, as in a soak; its verdict."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    process = Forked([str(FAULTS / "trial.py"), *trial.arguments(tmp_path / "trial", references)], environ, text=True)
    output, _ = process.communicate(290)
    assert (tmp_path / "trial" / "verdict.json").exists(), output
    verdict = json.loads((tmp_path / "trial" / "verdict.json").read_text())
    assert (process.returncode == 0) == (not verdict["lost"])
    return {**verdict, "output": output}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed", "faults"),
    [
        ("signals", SIGNALS, 1),
        ("events", 6, 1),
        ("files", FILES, 2),  # the first one kills: there is nothing to damage yet
        pytest.param("disks", 6, 1, marks=needs_disk),
        pytest.param("network", 12, 1, marks=needs_nodes),
        pytest.param("signals", SIGNALS, 2, marks=pytest.mark.exhaustive),
        pytest.param("events", 6, 3, marks=pytest.mark.exhaustive),
        pytest.param("files", FILES, 3, marks=pytest.mark.exhaustive),
        pytest.param("disks", 6, 3, marks=[*needs_disk, pytest.mark.exhaustive]),
        pytest.param("disks", REFUSED, 5, marks=[*needs_disk, pytest.mark.exhaustive]),
        pytest.param("network", 12, 2, marks=[*needs_nodes, pytest.mark.exhaustive]),
    ],
)
def test_survives(tmp_path: Path, references: Path, family: str, seed: int, faults: int) -> None:
    verdict = run(Trial(family, seed, faults), tmp_path, references)
    assert not verdict["lost"], verdict["output"]
    assert family in [fault["family"] for fault in verdict["met"]]


@pytest.mark.slow
def test_survives_trouble_with_mlflow(tmp_path: Path, references: Path, server: str) -> None:
    verdict = run(Trial("tracking", 13, 1, server=server), tmp_path, references)
    assert not verdict["lost"], verdict["output"]
    assert "tracking" in [fault["family"] for fault in verdict["met"]]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "seed"), _STRATEGIES)
def test_survives_under_every_strategy(tmp_path: Path, references: Path, strategy: str, seed: int) -> None:
    verdict = run(Trial("signals", seed, 1, strategy), tmp_path, references)
    assert not verdict["lost"], verdict["output"]
    assert verdict["met"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["signals", "events", "files", pytest.param("disks", marks=needs_disk)])
@pytest.mark.parametrize("strategy", ["ddp", "zero", "pipeline", "model_parallel"])
def test_survives_more(tmp_path: Path, references: Path, family: str, strategy: str, ranks: int) -> None:
    verdict = run(Trial(family, 100 + ranks, 4, strategy, ranks), tmp_path, references)
    assert not verdict["lost"], verdict["output"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.root
@pytest.mark.parametrize("seed", [0, 6])
@pytest.mark.skipif(bool(network.why_not()), reason=network.why_not())
def test_survives_a_network_that_stays_away(tmp_path: Path, references: Path, seed: int) -> None:
    verdict = run(Trial("network", seed, 2), tmp_path, references)
    assert not verdict["lost"], verdict["output"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_survives_more_trouble_with_mlflow(tmp_path: Path, references: Path, server: str) -> None:
    verdict = run(Trial("tracking", TRACKING, 5, server=server), tmp_path, references)
    assert not verdict["lost"], verdict["output"]


class TestSomethingIsBroken:
    """The judge must be able to say no: these trainings do lose something."""

    pytestmark = pytest.mark.slow

    @pytest.mark.parametrize("faults", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
    def test_random_numbers(self, tmp_path: Path, references: Path, faults: int) -> None:
        script = FAULTS / "broken" / "forgets_random_numbers.py"
        verdict = run(Trial("signals", SIGNALS, faults, script=script), tmp_path, references)
        assert "weights of rank 0" in verdict["lost"], verdict["output"]
        assert any("other values, such as ('train/loss'" in each for each in verdict["lost"])

    @pytest.mark.exhaustive
    @pytest.mark.root
    @pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not())
    def test_a_disk_that_refuses_the_last_checkpoint_excuses_nothing_else(
        self, tmp_path: Path, references: Path
    ) -> None:
        script = FAULTS / "broken" / "forgets_random_numbers.py"
        verdict = run(Trial("disks", REFUSED, 5, script=script), tmp_path, references)
        assert "weights of rank 0" in verdict["lost"], verdict["output"]

    @pytest.mark.exhaustive
    def test_damaged_checkpoints(self, tmp_path: Path, references: Path) -> None:
        script = FAULTS / "broken" / "trusts_any_checkpoint.py"
        verdict = run(Trial("files", FILES, 3, script=script), tmp_path, references)
        assert any("should have gone on" in each or "went on from" in each for each in verdict["lost"]), verdict

    @pytest.mark.exhaustive
    def test_metrics(self, tmp_path: Path, references: Path, server: str) -> None:
        script = FAULTS / "broken" / "repeats_itself.py"
        verdict = run(Trial("tracking", REPEATED, 4, server=server, script=script), tmp_path, references)
        assert any(each.startswith("in MLflow: ") and "logged again" in each for each in verdict["lost"]), verdict
