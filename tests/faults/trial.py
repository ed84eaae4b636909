"""One training, disturbed again and again until it ends, and judged against the undisturbed one.

    python -m tests.faults.trial --family signals --seed 7 --folder /tmp/trial

runs the trial of that seed again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.emulated import loopback_addresses
from tests.faults import disks, events, files, network, oracle, signals, tracking
from tests.faults.fault import WELL, Attempt, Fault
from tests.faults.job import ROOT, Ended, forked_ranks, run_attempt
from tests.faults.scripts.catalogue import SCRIPTS
from tests.multiprocess.scripts.noisy import DURATIONS, curve

from azureml_strategy.cluster.emulated import EmulatedRun
from azureml_strategy.emulator.nodes import IsolatedNodes

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRAINING = ROOT / "tests" / "faults" / "training.py"
SCRIPT = ROOT / "tests" / "faults" / "scripts" / "fit.py"
# The run of a job that logs to no MLflow.
NO_RUN = EmulatedRun("none", "faults", "1", "sqlite:///none.db")
FAMILIES = ("signals", "events", "disks", "files", "tracking", "network")
# MLflow's own, which is there in every store.
_EXPERIMENT = "0"
# How often another fault is met by an attempt that the first one leaves alive.
_KILLED_BESIDES = 0.7
# An attempt whose place never comes meets no fault, and does not count.
_MOST_ATTEMPTS = 2


@dataclass(frozen=True)
class Trial:
    """What to run.

    Attributes:
        family: of the faults.
        seed: which ones, where and when.
        faults: how many, at most: a run that has come to its end meets no more.
        strategy: a name of `training.STRATEGIES`; with a job, one of `scripts.fit.STRATEGIES`.
        ranks: how many.
        server: the address of a real MLflow server, for faults of tracking.
        script: the training.
        job: a name of `scripts.catalogue.SCRIPTS`, to be trained instead; empty for none.
    """

    family: str
    seed: int
    faults: int = 4
    strategy: str = "ddp"
    ranks: int = 2
    server: str = ""
    script: Path = TRAINING
    job: str = ""

    def arguments(self, folder: Path, references: Path | None = None) -> list[str]:
        """What the trial's own process gets: see `main`."""
        given = {
            "family": self.family,
            "seed": self.seed,
            "faults": self.faults,
            "strategy": self.strategy,
            "ranks": self.ranks,
            "server": self.server,
            "script": self.script,
            "job": self.job,
            "folder": folder,
            "references": references or folder.parent,
        }
        return [part for name, value in given.items() if value != "" for part in (f"--{name}", str(value))]

    def command(self, output: Path, disturbed: bool = True) -> list[str]:
        """The training's; undisturbed, it is never one of those that are broken."""
        if self.job:
            return [sys.executable, str(SCRIPT), self.strategy, str(output), self.job]
        return [sys.executable, str(self.script if disturbed else TRAINING), self.strategy, str(output)]


@dataclass
class Verdict:
    """What became of it.

    Attributes:
        lost: why it is lost; empty if it survived.
        met: `family`, `name` and `place` of each fault that it met.
        attempts: how each ended, in words.
    """

    lost: list[str] = field(default_factory=list)
    met: list[dict[str, str]] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)

    def add(self, ended: Ended, faults: Sequence[Fault]) -> None:
        """Judge an attempt by how it ended."""
        code = ended.outcome.exit_code
        self.met += [{"family": each.family, "name": each.name, "place": each.place} for each in ended.met]
        self.attempts.append(f"{'; '.join(fault.name for fault in faults) or 'no fault'}: exit code {code}")
        where = f"attempt {len(self.attempts) - 1} ({self.attempts[-1]})"
        if ended.hung:
            self.lost.append(f"{where} hung")
        if ended.trained and ended.went_on_from != ended.newest:
            self.lost.append(f"{where} went on from {ended.went_on_from}, not from {ended.newest}")
        if not ended.complete and code == 0:
            self.lost.append(f"{where} looks complete, and is not")
        if not _may_end_with(code, faults):
            self.lost.append(f"{where} should have gone on")


class _Stage:
    """What a trial's attempts share: the folder, and what of the machine its faults need for themselves.

    Attributes:
        attempt: as each begins.
        run: the job's MLflow run.
        draw: the family's next fault.
    """

    def __init__(self, trial: Trial, output: Path, around: ExitStack) -> None:
        self.attempt = Attempt(trial.ranks, output, loopback_addresses(trial.ranks))
        self.run = NO_RUN
        self.client: MlflowClient | None = None
        self._trial = trial
        checkpoints = self.attempt.checkpoints
        if trial.family == "disks":
            around.enter_context(disks.own_disk(checkpoints))
        if trial.family == "tracking":
            self._open_run()
        if trial.family == "network":
            nodes = around.enter_context(IsolatedNodes(trial.ranks, None))
            self.attempt.addresses = nodes.addresses
            self.attempt.nodes = nodes
            self.attempt.environ["FAULTS_TIMEOUT_S"] = "30"

    def draw(self, moments: random.Random) -> Fault:
        trial, output = self._trial, self.attempt.output
        checkpoints, nodes, sharded = self.attempt.checkpoints, self.attempt.nodes, trial.strategy != "ddp"
        makers: dict[str, list[Callable[[], Fault]]] = {
            "signals": [lambda: signals.kill(moments, trial.ranks)] * 2
            + [lambda: signals.terminate(moments, trial.ranks)],
            "events": [
                lambda: events.withdrawn(moments, trial.ranks, output),
                lambda: events.taken(moments, trial.ranks, output),
                lambda: events.broken(moments),
            ],
            "disks": [
                lambda: disks.full(moments, checkpoints, sharded),
                lambda: disks.read_only(moments, checkpoints),
            ],
            "files": [lambda: files.damaged(moments)],
            "tracking": [lambda: tracking.outage(moments), lambda: tracking.outage_and_end(moments)],
            "network": [
                lambda: network.cut(moments, nodes, trial.ranks),
                lambda: network.blip(moments, nodes, trial.ranks),
            ],
        }
        return moments.choice(makers[trial.family])()

    def next_attempt(self, number: int, faults: Sequence[Fault]) -> Ended:
        attempt = replace(self.attempt, environ=dict(self.attempt.environ), rank_environ={}, met=[])
        tracked = ["tracked"] if self.client else []
        return run_attempt(attempt, number, self.run, [*self._trial.command(attempt.output), *tracked], faults)

    def histories(self) -> dict[str, list[tuple[int, float]]]:
        """What is in MLflow: steps and values by name; no times, as in the curve."""
        assert self.client is not None
        metrics = self.client.get_run(self.run.run_id).data.metrics
        names = [name for name in metrics if not name.startswith(DURATIONS)]
        found = {name: self.client.get_metric_history(self.run.run_id, name) for name in names}
        return {name: [(each.step, each.value) for each in history] for name, history in found.items()}

    def _open_run(self) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(self._trial.server)
        run_id = self.client.create_run(_EXPERIMENT).info.run_id
        self.run = EmulatedRun(run_id, "Default", _EXPERIMENT, self._trial.server)
        self.attempt.environ |= {"MLFLOW_TRACKING_URI": self._trial.server, **tracking.CLIENT}


def undisturbed(trial: Trial, folder: Path) -> Path:
    """The folder of the same training without a fault; made where it is not there yet, once for all trials."""
    reference = folder / f"undisturbed-{trial.job or 'shipped'}-{trial.strategy}-{trial.ranks}"
    reference.mkdir(parents=True, exist_ok=True)
    with open(reference / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (reference / "complete").exists():
            attempt = Attempt(trial.ranks, reference, loopback_addresses(trial.ranks))
            ended = run_attempt(attempt, 0, NO_RUN, trial.command(reference, disturbed=False), [])
            if not ended.complete:
                raise RuntimeError(f"The undisturbed training failed: {ended.outcome}")
            (reference / "complete").touch()
    return reference


def run_trial(trial: Trial, folder: Path, references: Path) -> Verdict:
    """Run it.

    Args:
        trial: what.
        folder: its own, emptied before.
        references: where undisturbed trainings are, or are put.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "output").mkdir(parents=True)
    os.chdir(folder)  # where the watch of a job leaves its reports
    verdict = Verdict()
    with ExitStack() as around:
        around.enter_context(forked_ranks())
        reference = undisturbed(trial, references)
        stage = _Stage(trial, folder / "output", around)
        _disturb(trial, stage, verdict, reference)
        _judge_mlflow(stage, verdict, reference)
    (folder / "verdict.json").write_text(json.dumps(asdict(verdict), indent=1))
    return verdict


def _disturb(trial: Trial, stage: _Stage, verdict: Verdict, reference: Path) -> None:
    """Attempt after attempt until the training is complete, and one more, without a fault, which changes nothing."""
    moments = random.Random(f"{trial.family}/{trial.job}{trial.strategy}/{trial.ranks}/{trial.seed}")
    complete = False
    while not complete:
        enough = len(verdict.met) >= trial.faults or len(verdict.attempts) >= _MOST_ATTEMPTS * trial.faults
        faults = [] if enough else _drawn(moments, trial, stage)
        complete = _attempt(stage, verdict, faults)
        if enough:
            break
    differences = _differences(trial, stage.attempt.output, reference) if complete else []
    verdict.lost += differences
    if not _attempt(stage, verdict, []):
        verdict.lost.append("the last attempt, which nothing disturbed, is not complete")
    when = "started again after its end: " if complete else ""
    later = _differences(trial, stage.attempt.output, reference)
    verdict.lost += [f"{when}{each}" for each in later if each not in differences]


def _attempt(stage: _Stage, verdict: Verdict, faults: Sequence[Fault]) -> bool:
    number = len(verdict.attempts)
    print(f"--- attempt {number}: {'; '.join(fault.name for fault in faults) or 'no fault'}", flush=True)
    started = time.monotonic()
    ended = stage.next_attempt(number, faults)
    verdict.add(ended, faults)
    print(f"--- {verdict.attempts[-1]}, {time.monotonic() - started:.1f} s, from {ended.went_on_from}", flush=True)
    return ended.complete and ended.outcome.exit_code == 0 and not _refused_at_the_end(stage.attempt.output, ended)


def _refused_at_the_end(output: Path, ended: Ended) -> bool:
    """Whether a disk took no checkpoint of the last step, and the training said so: then the next attempt makes it.

    What a user keeps is the checkpoint. Without the fault, or without a word, one that is missing counts as lost.
    """
    if not any(fault.family == "disks" for fault in ended.met):
        return False
    result = _results(output)[0]
    return any(line.startswith(f"No checkpoint at step {result['step']}:") for line in result.get("announced", []))


def _drawn(moments: random.Random, trial: Trial, stage: _Stage) -> list[Fault]:
    if trial.family == "files" and oracle.newest_whole(stage.attempt.checkpoints) is None:
        return [signals.kill(moments, trial.ranks)]  # there is nothing to damage yet
    faults = [stage.draw(moments)]
    if faults[0].codes == WELL and moments.random() < _KILLED_BESIDES:
        faults.append(signals.kill(moments, trial.ranks))
    return faults


def _differences(trial: Trial, output: Path, reference: Path) -> list[str]:
    found, expected = _results(output), _results(reference)
    impossible = bool(trial.job and SCRIPTS[trial.job].impossible)
    said = oracle.warning_differences(expected[0].get("warned", []), impossible)
    return said if impossible else [*said, *oracle.training_differences(output, reference, found, expected)]


def _judge_mlflow(stage: _Stage, verdict: Verdict, reference: Path) -> None:
    if stage.client:
        expected, often = curve(reference / "curve.jsonl"), oracle.points_logged(reference / "curve.jsonl")
        differences = oracle.mlflow_differences(stage.histories(), expected, often)
        verdict.lost += [f"in MLflow: {each}" for each in differences]


def _results(output: Path) -> dict[int, Any]:
    return {int(file.stem): json.loads(file.read_text()) for file in sorted((output / "results").glob("*.json"))}


def _may_end_with(code: int, faults: Sequence[Fault]) -> bool:
    if any(fault.codes is None for fault in faults):
        return True
    return code in WELL.union(*(fault.codes or WELL for fault in faults))


def main() -> int:
    """The process of one trial; 1 if it is lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--server", default="", help="of MLflow; for --family tracking")
    parser.add_argument("--script", type=lambda text: Path(text).absolute(), default=TRAINING)
    parser.add_argument(
        "--job", default="", choices=["", *SCRIPTS], metavar="NAME", help="a script of scripts/catalogue.py, instead"
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the trial; emptied before")
    parser.add_argument("--references", type=Path, help="of the undisturbed trainings; else beside the trial")
    options = vars(parser.parse_args())
    folder, references = options.pop("folder").absolute(), options.pop("references")
    verdict = run_trial(Trial(**options), folder, (references or folder.parent).absolute())
    print("\n".join(["LOST", *verdict.lost] if verdict.lost else ["survived"]))
    return 1 if verdict.lost else 0


if __name__ == "__main__":
    sys.exit(main())
