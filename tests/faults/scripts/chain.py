"""One script, ended and taken up again from place to place in one process, and judged against the undisturbed run.

    python -m tests.faults.scripts.chain --folder /tmp/chains ema_module gan

It finds less than random kills do, no torn files and no ranks that differ; but what a resume changes, within seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.faults import oracle
from tests.faults.scripts.catalogue import SCRIPTS, Script
from tests.faults.scripts.fit import fit
from tests.multiprocess.scripts.noisy import Killed

# More than any needs: an attempt that always comes to less than the one before would go on for ever.
_MOST_ATTEMPTS = 40


class EndAfter(Callback):
    """Ends the process, or this fit, in the step after a place: when all hooks of the place are over.

    Args:
        place: `batches`, `validation`, which is `epoch` where nothing is validated, or `epoch`.
        times: how many of them are passed.
    """

    def __init__(self, place: str, times: int) -> None:
        self.place = place
        self._left = times
        self._from = "the beginning"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._from = Path(trainer.ckpt_path).stem if trainer.ckpt_path else self._from

    def on_train_batch_start(self, *arguments: Any) -> None:
        if self.place == "batches":
            self._left -= 1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.place == "validation" and not trainer.sanity_checking:
            self._left -= 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.place == "epoch" or (self.place == "validation" and not trainer.enable_validation):
            self._left -= 1

    def on_before_backward(self, *arguments: Any) -> None:
        if self._left < (0 if self.place == "batches" else 1):
            raise Killed

    def __str__(self) -> str:
        return f"{self.place} from {self._from}"


def places(script: Script) -> Iterator[EndAfter]:
    """Where the attempts end: in the middle of epochs, right after a validation, and after an epoch's end."""
    few = script.batches
    for place, times in itertools.cycle(
        [
            ("batches", few),
            ("batches", few + 1),
            ("validation", 1),
            ("batches", few),
            ("epoch", 1),
            ("batches", few + 3),
        ]
    ):
        yield EndAfter(place, times)


def run_chain(name: str, folder: Path) -> dict[str, Any]:
    """Run it.

    Returns:
        `lost`: how it is not the undisturbed run, by what is judged; `attempts`: how each ended; `warned`: what the
        undisturbed run was warned of before its first batch.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference, output = folder / "undisturbed", folder / "disturbed"
    expected = fit(name, reference)
    found, attempts = _until_the_end(name, output)
    if SCRIPTS[name].impossible:
        lost = []
    elif found is None:
        lost = [f"no end after {_MOST_ATTEMPTS} attempts"]
    else:
        lost = _judge(name, folder, found, expected)
    lost += oracle.warning_differences(expected["warned"], bool(SCRIPTS[name].impossible))
    return {"lost": lost, "attempts": attempts, "warned": expected["warned"]}


def _judge(name: str, folder: Path, found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """At the end, and when it has been started once more."""
    output, reference = folder / "disturbed", folder / "undisturbed"
    lost = oracle.training_differences(output, reference, {0: found}, {0: expected})
    later = oracle.training_differences(output, reference, {0: fit(name, output)}, {0: expected})
    return lost + [f"started again after its end: {each}" for each in later if each not in lost]


def _until_the_end(name: str, output: Path) -> tuple[dict[str, Any] | None, list[str]]:
    attempts: list[str] = []
    for end in itertools.islice(places(SCRIPTS[name]), _MOST_ATTEMPTS):
        try:
            return fit(name, output, end), [*attempts, f"the end, not {end}"]
        except Killed:
            attempts.append(str(end))
    return None, attempts


def run_further(name: str, folder: Path) -> list[str]:
    """How a training that has ended, and is then given another epoch, is not the one that had it from the beginning."""
    epochs = SCRIPTS[name].make().arguments["max_epochs"]
    reference, output = folder / "longer", folder / "lengthened"
    expected = fit(name, reference, max_epochs=epochs + 1)
    fit(name, output)
    return oracle.training_differences(output, reference, {0: fit(name, output, max_epochs=epochs + 1)}, {0: expected})


def _run(name: str, folder: Path) -> None:
    """In a process of its own: trainings leave behind what the next one would meet."""
    log = os.open(folder.with_name(f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    verdict = run_chain(name, folder)
    if SCRIPTS[name].may_go_on:
        verdict["lost"] += [f"with another epoch: {each}" for each in run_further(name, folder)]
    part = folder / "verdict.part"
    part.write_text(json.dumps(verdict, indent=1))
    part.rename(folder / "verdict.json")


def _report(name: str, folder: Path) -> bool:
    """Whether it survived."""
    file = folder / name / "verdict.json"
    verdict = (
        json.loads(file.read_text()) if file.exists() else {"lost": [f"no verdict, see {name}.log"], "attempts": []}
    )
    print(
        f"{name}: {'LOST' if verdict['lost'] else 'survived'}, ended after {', '.join(verdict['attempts'])}", flush=True
    )
    for each in verdict["lost"]:
        print(f"  {each}", flush=True)
    return not verdict["lost"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=SCRIPTS, metavar="NAME")
    parser.add_argument("--folder", type=Path, required=True, help="a folder in it for each is emptied before")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    survived = []
    for name in options.names:
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(name, options.folder.absolute() / name)
        )
        process.start()
        process.join()
        survived.append(_report(name, options.folder))
    return 0 if all(survived) else 1


if __name__ == "__main__":
    sys.exit(main())
