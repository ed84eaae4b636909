"""How many random faults does a training survive? Target: all of them.

Our trainings of two and four processes, and scripts as others write them (`tests/faults/scripts`), are killed, told to
end, robbed of their disk, their network, their MLflow server and of what they have saved, start again, and must end
with the weights and the curve of the undisturbed training, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import RESULTS, save, show

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from tests.faults import disks, network  # noqa: E402
from tests.faults.scripts.catalogue import SCRIPTS  # noqa: E402
from tests.faults.trial import FAMILIES, Trial  # noqa: E402
from tests.preloaded import Forked  # noqa: E402
from tests.tracking.server import Server  # noqa: E402

# How often each comes: strategy and ranks, and family. Isolated nodes start interpreters, which takes seconds.
JOBS = {("ddp", 2): 6, ("ddp", 4): 1, ("zero", 2): 1, ("pipeline", 2): 1, ("model_parallel", 2): 1}
_STRATEGIES = sorted({name for name, _ in JOBS} | {name for script in SCRIPTS.values() for name, _ in script.jobs()})
SHARES = {"signals": 6, "events": 3, "disks": 3, "files": 4, "tracking": 3, "network": 1}
# The families that meet scripts of the catalogue as well, and how often: the others are about the job, not the script.
SCRIPTS_SHARE = {"signals": 0.6, "files": 0.6}
SHIPPED = "shipped"
# No trial takes so long; if one does, it is lost.
LONGEST_SECONDS = 1800.0


@dataclass(frozen=True)
class Done:
    """A trial that has ended; `lost` says why it is lost."""

    trial: Trial
    folder: Path
    lost: list[str]
    met: list[dict[str, str]]
    seconds: float


def main() -> int:
    options = _options()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    families, skipped = _possible(options.families)
    for family, reason in skipped.items():
        print(f"{family}: left out, {reason}", flush=True)
    started = time.monotonic()
    with _server(folder, "tracking" in families) as server:
        done = _soak(options, families, folder.absolute(), server)
    lost = [each for each in done if each.lost]
    for each in lost:
        print(f"\nLOST {each.folder}\n  " + "\n  ".join(each.lost))
        print(f"  again: python -m tests.faults.trial {shlex.join(each.trial.arguments(each.folder))}")
    figures = {**_figures(done), "skipped": skipped, "minutes": round((time.monotonic() - started) / 60, 1)}
    _show(figures)
    settings = {name: value for name, value in vars(options).items() if name not in ("results", "folder")}
    save("soak", settings, figures, options.results)
    return 1 if lost else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=300, help="how many, in all")
    parser.add_argument("--seed", type=int, default=0, help="of all moments and places")
    parser.add_argument("--faults-per-trial", type=int, default=5)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--strategies", nargs="+", default=_STRATEGIES)
    parser.add_argument("--scripts", nargs="*", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME", help="or none")
    parser.add_argument("--at-once", type=int, default=max(len(os.sched_getaffinity(0)), 1), help="trials at a time")
    parser.add_argument("--folder", type=Path, help="where trials are kept; a temporary one by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write soak.json into")
    return parser.parse_args()


def _possible(families: list[str]) -> tuple[list[str], dict[str, str]]:
    """The families that this machine can do, and why it cannot do the others."""
    reasons = {"disks": disks.why_not, "network": network.why_not}
    skipped = {name: reasons[name]() for name in families if name in reasons}
    skipped = {name: reason for name, reason in skipped.items() if reason}
    return [name for name in families if name not in skipped], skipped


@contextmanager
def _server(folder: Path, needed: bool) -> Iterator[str]:
    """The address of an MLflow server, which all trials share."""
    if not needed:
        yield ""
        return
    server = Server(folder, f"sqlite:///{folder / 'mlflow.db'}")
    server.start()
    try:
        yield server.uri
    finally:
        server.stop()


def _trials(options: argparse.Namespace, families: list[str], server: str) -> Iterator[Trial]:
    """Endlessly many; the same ones for the same seed."""
    moments = random.Random(options.seed)
    jobs = {job: share for job, share in JOBS.items() if job[0] in options.strategies}
    shares = {name: SHARES[name] for name in families}
    scripts = _script_jobs(options)
    for number in itertools.count():
        (family,) = moments.choices(list(shares), list(shares.values()))
        ((strategy, ranks),) = moments.choices(list(jobs), list(jobs.values()))
        name = SHIPPED
        if scripts and moments.random() < SCRIPTS_SHARE.get(family, 0.0):
            name = moments.choice(list(scripts))
            strategy, ranks = moments.choice(scripts[name])
        seed = 10_000 * options.seed + number
        address = server if family == "tracking" else ""
        job = "" if name == SHIPPED else name
        yield Trial(family, seed, options.faults_per_trial, strategy, ranks, address, job=job)


def _script_jobs(options: argparse.Namespace) -> dict[str, list[tuple[str, int]]]:
    """Strategies and ranks of each script that was asked for."""
    jobs = {name: [job for job in SCRIPTS[name].jobs() if job[0] in options.strategies] for name in options.scripts}
    return {name: possible for name, possible in jobs.items() if possible}


def _soak(options: argparse.Namespace, families: list[str], folder: Path, server: str) -> list[Done]:
    """Trial after trial, some at once, until enough faults were met."""
    done: list[Done] = []
    trials = _trials(options, families, server)
    running: set[Future[Done]] = set()
    with ThreadPoolExecutor(options.at_once) as pool:
        enough = False
        while not enough or running:
            # a trial that meets nothing would never end this
            enough = max(sum(len(each.met) for each in done), len(done)) >= options.faults
            while not enough and len(running) < options.at_once:
                running.add(pool.submit(_run, next(trials), folder))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for each in ended:
                done.append(each.result())
                _report(done[-1], sum(len(one.met) for one in done))
    return done


def _run(trial: Trial, folder: Path) -> Done:
    place = folder / f"{trial.family}-{trial.job or SHIPPED}-{trial.strategy}-{trial.ranks}-{trial.seed}"
    started = time.monotonic()
    command = trial.arguments(place)
    trial_process = Forked([str(ROOT / "tests" / "faults" / "trial.py"), *command], os.environ, text=True)
    try:
        output, _ = trial_process.communicate(LONGEST_SECONDS)
    except AssertionError as too_long:
        output = str(too_long)
    place.mkdir(exist_ok=True)
    (place / "output.log").write_text(output)
    return _read(trial, place, output, time.monotonic() - started)


def _read(trial: Trial, place: Path, output: str, seconds: float) -> Done:
    file = place / "verdict.json"
    if not file.exists():
        return Done(trial, place, ["the trial has no verdict", *output.splitlines()[-5:]], [], seconds)
    verdict: dict[str, Any] = json.loads(file.read_text())
    return Done(trial, place, verdict["lost"], verdict["met"], seconds)


def _report(done: Done, met: int) -> None:
    how = "LOST" if done.lost else "survived"
    print(f"{met:4} faults  {done.folder.name:48} {len(done.met)} faults, {done.seconds:5.1f} s: {how}", flush=True)


def _figures(done: list[Done]) -> dict[str, Any]:
    """A trial that is lost is lost with all its faults: nobody knows which one it was."""
    met, lost, places = Counter[str](), Counter[str](), Counter[str]()
    for each in done:
        for fault in each.met:
            met[fault["family"]] += 1
            lost[fault["family"]] += bool(each.lost)
            places[fault["place"] or "no place of its own"] += 1
    families = {name: {"injected": count, "lost": lost[name]} for name, count in sorted(met.items())}
    total = {"injected": met.total(), "lost": lost.total()}
    return {
        "trainings": {"all": len(done), "lost": sum(bool(each.lost) for each in done)},
        "faults": {**families, "all": total},
        "scripts": _by_script(done),
        "places": dict(places.most_common()),
    }


def _by_script(done: list[Done]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for each in done:
        count = found.setdefault(each.trial.job or SHIPPED, Counter(trainings=0, injected=0, lost=0))
        count.update(trainings=1, injected=len(each.met), lost=bool(each.lost))
    return {name: dict(found[name]) for name in sorted(found)}


def _show(figures: dict[str, Any]) -> None:
    rows = [
        [name, str(each["injected"]), str(each["injected"] - each["lost"]), str(each["lost"])]
        for name, each in figures["faults"].items()
    ]
    show("Random faults", ["family", "injected", "survived", "lost"], rows)
    by_script = [[name, *map(str, each.values())] for name, each in figures["scripts"].items()]
    show("By script", ["script", "trainings", "faults", "trainings lost"], by_script)
    print("At: " + ", ".join(f"{place} {count}" for place, count in figures["places"].items()))
    print(f"{figures['trainings']['lost']} of {figures['trainings']['all']} trainings lost")


if __name__ == "__main__":
    sys.exit(main())
