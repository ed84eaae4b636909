"""Searches in a run that is about to take its first step, or reads the result of an earlier run."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from azureml_strategy.control.gather import GroupExchange
from azureml_strategy.control.store import StepError
from azureml_strategy.interfaces import KeepsFiles, RunLogger, paused
from azureml_strategy.lightning_internals import is_compiled
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.tuning.record import (
    FILE,
    Conditions,
    Tuning,
    read_tuning,
    refuse_other_conditions,
    samples_of,
    tuning_of,
    write_tuning,
)
from azureml_strategy.strategies.tuning.search import Request, Search
from azureml_strategy.strategies.tuning.trials import RefusalError, TrialBench

# A rank that computes for so many times as long as the median of the others holds them up, whatever the settings.
_STRAGGLER = 2.0
# Steps without communication; and how many more before a rank is called slow.
_ALONE_STEPS, _MORE_STEPS = 4, 16


@dataclass(frozen=True)
class TuningOrder:
    """The strategy's arguments about tuning.

    Attributes:
        tune: whether to measure.
        request: what to beat, and what may be picked.
        file: `tuned`: where settings are read from, or written to if `tune` is set; None for the run's folder.
    """

    tune: bool
    request: Request
    file: Path | None

    def earlier(self, trainer: Trainer, here: Conditions) -> Tuning | None:
        """Return the result of an earlier run under these conditions; a collective.

        A file that the user names must be there and fit: otherwise all ranks raise ConfigurationError. A file in the
        run's folder is read after a restart, so that the run goes on with the same settings.
        """
        if self.tune and self.file is not None:
            return None
        try:
            return GroupExchange(trainer.global_rank).on_rank_zero(lambda: self._read_file(_file_of_run(trainer), here))
        except StepError as error:
            raise ConfigurationError(str(error).removeprefix("ConfigurationError: ")) from error

    def fits_batch(self, tuning: Tuning, batch: str | None) -> bool:
        """Whether the result of an earlier run holds for the first batch of this one, and need not be measured anew.

        Args:
            tuning: returned by `earlier`.
            batch: rank 0's, from `describe_batch`.

        Raises:
            ConfigurationError: it does not hold, and nothing is to be measured.
        """
        here = replace(tuning.conditions, batch=batch)
        if self.file is not None and not self.tune:
            refuse_other_conditions(self.file, tuning, here)
        if self.file is None and samples_of(batch) == samples_of(tuning.conditions.batch):
            return True  # from an earlier attempt of this run: a restart should not measure anew
        return not tuning.conditions.differences(here)

    def _read_file(self, path: Path | None, here: Conditions) -> Tuning | None:
        if self.file is not None:
            found = read_tuning(self.file)
            refuse_other_conditions(self.file, found, here)
            if missing := [name for name, value in asdict(found.conditions).items() if value is None]:
                rank_zero_warn(
                    f"tuned={str(self.file)!r} does not say its {' and '.join(missing)}, as an older version wrote it. "
                    "It is taken as it is: measure anew if they have changed since."
                )
            return found
        if not self.tune or path is None or not path.is_file():
            return None
        found = read_tuning(path)
        if found.conditions.differences(here) or found.request != self.request:
            return None
        say(f"Takes the communication settings that {path} has from an earlier attempt; delete it to measure anew.")
        return found


def tune(order: TuningOrder, module: LightningModule, bench: TrialBench, here: Conditions) -> Tuning:
    """Search for the fastest settings for a module that is about to take its first step; a collective.

    Returns:
        The result. If nothing can be measured, its pick is the default and it has no rows.
    """
    say("Tuning the communication of DDP on the first batch, with a copy of the module. First without communication.")
    with paused(module.trainer):
        try:
            found = _search(order.request, module, bench, here)
        except RefusalError as refusal:
            rank_zero_warn(f"The communication settings are not tuned, and stay as they are: {refusal}.")
            return tuning_of(here, order.request, order.request.default, str(refusal), steps=bench.steps)
    say(found.report())
    _record(found, module.trainer, order.file or _file_of_run(module.trainer))
    return found


def _search(request: Request, module: LightningModule, bench: TrialBench, here: Conditions) -> Tuning:
    if not module.automatic_optimization:
        # The Trainer's optimizers and schedulers belong to the original.
        raise RefusalError("the module optimizes manually, so that each trial would step its optimizers")
    if is_compiled(module):
        raise RefusalError(
            "torch.compile has bound the module's methods to it, so that a copy would train the original"
        )
    with bench.opened():
        alone = bench.alone(_ALONE_STEPS)

        def look_again() -> float:
            alone[:] = map(min, alone, bench.alone(_MORE_STEPS))
            return max(alone)

        try:
            refuse_straggler(alone)
        except RefusalError:  # or the machine was busy
            look_again()
            refuse_straggler(alone)
        say(f"Without communication a step takes {1e3 * max(alone):,.1f} ms.")
        gradient_bytes = sum(each.nbytes for each in module.parameters() if each.requires_grad)
        search = Search(bench.measure, request, gradient_bytes, max(alone), look_again, say)
        pick = search.run()
    return tuning_of(here, request, pick, search.why, search.trials, alone, bench.steps)


def refuse_straggler(alone: list[float]) -> None:
    """Refuse to measure where one rank computes for far longer than the others.

    Args:
        alone: seconds of a step of each rank without communication.
    """
    slowest = max(range(len(alone)), key=alone.__getitem__)
    others = statistics.median([*alone[:slowest], *alone[slowest + 1 :]])
    if alone[slowest] > _STRAGGLER * others:
        raise RefusalError(
            f"rank {slowest} computes for {1e3 * alone[slowest]:,.0f} ms a step, and the others for "
            f"{1e3 * others:,.0f} ms, so that they wait for it and not for the network. "
            "Find out why it is slow, or tune with batches of equal size"
        )


@rank_zero_only
def say(text: str) -> None:
    """Print a text on rank 0. A recipe's console does not show the messages of Lightning's logger."""
    print(text, flush=True)


@rank_zero_only
def _record(found: Tuning, trainer: Trainer, path: Path | None) -> None:
    """Write the file, and log it and its metrics."""
    if path is not None:
        try:
            write_tuning(path, found)
            say(f"Written to {path.absolute()}. A run of the same size takes it by tuned={str(path)!r}.")
        except OSError as error:  # the training has its settings, and can go on
            rank_zero_warn(f"{path} cannot be written ({error.strerror}), so that a later run cannot take it.")
            path = None
    for logger in trainer.loggers:
        logger.log_metrics(found.metrics(), step=trainer.global_step)
        if isinstance(logger, RunLogger):
            logger.log_tags({"tune.pick": found.pick.words(), "tune.why": found.why})
        if isinstance(logger, KeepsFiles) and path is not None:
            logger.log_file(path, "tuning")


def _file_of_run(trainer: Trainer) -> Path | None:
    """Return the file in the run's folder, if that is on a disk."""
    return None if "://" in trainer.default_root_dir else Path(trainer.default_root_dir) / FILE
