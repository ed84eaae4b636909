"""Scripts, ended and taken up again from place to place in one process, and judged against the undisturbed run.

    python -m tests.faults.scripts.chain --folder /tmp/chains ema_module gan

It finds less than random kills do, no torn files and no ranks that differ; but what a resume changes, within seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.faults import oracle
from tests.faults.scripts.catalogue import SCRIPTS, Script
from tests.faults.scripts.fit import ONE_PROCESS, STRATEGIES, fit
from tests.multiprocess.scripts.noisy import Killed

# More than any needs: an attempt that always comes to less than the one before would go on for ever.
_MOST_ATTEMPTS = 40
_FIRST = os.environ.get("RANK", "0") == "0"


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


@dataclass(frozen=True)
class Chain:
    """One script's trainings; on all ranks where there are several.

    Attributes:
        name: of the script.
        folder: empty, for all its trainings.
        strategy: a name of `fit.STRATEGIES`.
    """

    name: str
    folder: Path
    strategy: str = ONE_PROCESS

    def run(self) -> dict[str, Any]:
        """Run them.

        Returns:
            `lost`: how it is not the undisturbed run, by what is judged; `attempts`: how each ended; `warned`: what the
            undisturbed run was warned of before its first batch.
        """
        script, expected = SCRIPTS[self.name], self._fit("undisturbed")
        found, attempts = self._until_the_end()
        lost = oracle.warning_differences(expected[0]["warned"], bool(script.impossible))
        if found is None:
            lost.append(f"no end after {_MOST_ATTEMPTS} attempts")
        elif not script.impossible:
            lost += self._judge(found, expected)
            lost += self._with_another_epoch() if script.may_go_on else []
        return {"lost": lost, "attempts": attempts, "warned": expected[0]["warned"]}

    def _until_the_end(self) -> tuple[dict[int, Any] | None, list[str]]:
        attempts: list[str] = []
        for end in itertools.islice(places(SCRIPTS[self.name]), _MOST_ATTEMPTS):
            try:
                return self._fit("disturbed", end), [*attempts, f"the end, not {end}"]
            except Killed:
                attempts.append(str(end))
        return None, attempts

    def _judge(self, found: dict[int, Any], expected: dict[int, Any]) -> list[str]:
        """At the end, and when it has been started once more."""
        lost = self._differences("disturbed", "undisturbed", found, expected)
        later = self._differences("disturbed", "undisturbed", self._fit("disturbed"), expected)
        return lost + [f"started again after its end: {each}" for each in later if each not in lost]

    def _with_another_epoch(self) -> list[str]:
        """Given one after its end, it must be as if it had had it from the beginning."""
        epochs = SCRIPTS[self.name].make().arguments["max_epochs"] + 1
        expected = self._fit("longer", max_epochs=epochs)
        self._fit("lengthened")
        found = self._fit("lengthened", max_epochs=epochs)
        differences = self._differences("lengthened", "longer", found, expected)
        return [f"with another epoch: {each}" for each in differences]

    def _differences(self, output: str, reference: str, found: dict[int, Any], expected: dict[int, Any]) -> list[str]:
        return oracle.training_differences(self.folder / output, self.folder / reference, found, expected)

    def _fit(self, output: str, *callbacks: Callback, **arguments: Any) -> dict[int, Any]:
        """Of all ranks, by rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        result = fit(self.name, self.folder / output, *callbacks, strategy=self.strategy, **arguments)
        if not dist.is_initialized():
            return {0: result}
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        return dict(enumerate(results))


def _run(chain: Chain) -> None:
    try:
        verdict = chain.run()
    except Exception as error:
        traceback.print_exc()
        verdict = {"lost": [f"{type(error).__name__}: {error}"], "attempts": []}
    if _FIRST:
        part = chain.folder / "verdict.part"
        part.write_text(json.dumps(verdict, indent=1))
        part.rename(chain.folder / "verdict.json")


def _run_logged(chain: Chain) -> None:
    log = os.open(chain.folder.with_name(f"{chain.name}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    _run(chain)


def _run_alone(chain: Chain) -> None:
    """In a process of its own: trainings leave behind what the next one would meet."""
    process = multiprocessing.get_context("fork").Process(target=_run_logged, args=(chain,))
    process.start()
    process.join()


def _say(chain: Chain) -> None:
    verdict = json.loads((chain.folder / "verdict.json").read_text())
    how = "LOST" if verdict["lost"] else "survived"
    print("\n  ".join([f"VERDICT {chain.name} {chain.strategy}: {how}", *verdict["lost"]]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=SCRIPTS, metavar="NAME")
    parser.add_argument("--folder", type=Path, required=True, help="has a folder for each, to begin with none")
    parser.add_argument("--strategy", choices=STRATEGIES, default=ONE_PROCESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        chain = Chain(name, options.folder.absolute() / name, options.strategy)
        # ranks have met in their process, and meet in it again
        _run(chain) if options.strategy != ONE_PROCESS else _run_alone(chain)
        if _FIRST:
            _say(chain)


if __name__ == "__main__":
    main()
