"""Scripts of many kinds, as strangers write them: ended and taken up again, each is the undisturbed training.

Each is ended from place to place in one process, see `scripts/chain.py`; and killed at random, see `trial.py`: a few
here, the others with `make test-all` and `make soak`.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.emulated import loopback_addresses
from tests.faults.fault import Attempt
from tests.faults.job import ROOT, forked_ranks, run_attempt
from tests.faults.scripts.catalogue import SCRIPTS
from tests.faults.test_trials import run
from tests.faults.trial import NO_RUN, Trial
from tests.preloaded import Forked

# The one that is killed at random in `make test`, too, on one rank.
KILLED = "plateau_epoch"
# Further variants of what another one shows.
VARIANTS = {
    *("reloaded", "augmentation", "iterable_stateful_sized", "iterable_plain_sized", "two_loaders_min_size", "swa"),
    *("two_plain_loaders", "ema_own_callback", "target_network", "lookahead", "max_steps_at_epoch_end"),
    *("clamp_zero_grad", "accumulation", "epoch_schedule", "early_stopping_inside", "fixed_limits", "epoch_means"),
    *("validation_across_epochs", *(name for name in SCRIPTS if name.endswith("+resumable"))),
}
_JOBS = [(name, *job) for name, script in SCRIPTS.items() for job in script.jobs()]
_CHAIN = ROOT / "tests" / "faults" / "scripts" / "chain.py"
_ENVIRON = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "PYTHONWARNINGS": "ignore"}


def _marked(name: str, exhaustive: bool, *values: Any) -> Any:
    marks = [pytest.mark.exhaustive] if exhaustive else []
    return pytest.param(name, *values, marks=marks, id="-".join(map(str, (name, *values))))


def _trials() -> list[Any]:
    """Every script under every strategy."""
    short = (KILLED, *SCRIPTS[KILLED].jobs()[0])
    return [_marked(name, (name, *job) != short, *job) for name, *job in _JOBS]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def chains(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has run all that are asked for, one after another: they share what it takes to start a process."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [item.callspec.params["name"] for item in items if item.originalname == test_is_taken_up_again.__name__]
    folder = tmp_path_factory.mktemp("chains")
    process = Forked([str(_CHAIN), "--folder", str(folder), *asked], {**os.environ, **_ENVIRON}, text=True)
    process.communicate(60 + 60 * len(asked))
    return folder


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(3600)  # the first one waits for all
@pytest.mark.parametrize("name", [_marked(name, name in VARIANTS) for name in SCRIPTS])
def test_is_taken_up_again(chains: Path, name: str) -> None:
    file = chains / name / "verdict.json"
    assert file.exists(), (chains / f"{name}.log").read_text()
    verdict = json.loads(file.read_text())
    assert not verdict["lost"], verdict
    assert len(verdict["attempts"]) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "ranks"), [_marked(job[0], True, *job[1:]) for job in _JOBS if job[2] > 1]
)
def test_ranks_are_taken_up_again(tmp_path: Path, name: str, strategy: str, ranks: int) -> None:
    command = [sys.executable, str(_CHAIN), "--folder", str(tmp_path / "chains"), "--strategy", strategy, name]
    with forked_ranks():
        ended = run_attempt(Attempt(ranks, tmp_path, loopback_addresses(ranks)), 0, NO_RUN, command, [])
    assert ended.outcome.exit_code == 0
    verdict = json.loads((tmp_path / "chains" / name / "verdict.json").read_text())
    assert not verdict["lost"], verdict


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "ranks"), _trials())
def test_is_killed(tmp_path: Path, references: Path, name: str, strategy: str, ranks: int) -> None:
    seed = zlib.crc32(name.encode()) % 1000
    verdict = run(Trial("signals", seed, 2, strategy, ranks, job=name), tmp_path, references)
    assert not verdict["lost"], verdict["output"]
