"""`azureml-strategy train`: Hydra's own application, on a shipped recipe or the user's."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from azureml_strategy.checkpoint import ResumeError
from azureml_strategy.cluster import Launch, LaunchError
from azureml_strategy.cluster.launch import PartialLaunch
from azureml_strategy.cluster.launchers import detect_ranks
from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.command_line import as_typed, is_override, with_lists
from azureml_strategy.tracking import TrackingError
from azureml_strategy.tracking.source import command_text
from azureml_strategy.tracking.tables import print_table
from azureml_strategy.training.checks import check_overrides
from azureml_strategy.training.recipes import RecipeError, find_recipe
from azureml_strategy.training.resolvers import register_resolvers
from azureml_strategy.training.run import keep_secrets
from azureml_strategy.training.targets import own_modules

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
LIGHTNINGS_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
# Shown as a run's result where nobody logs `checkpoint.monitor`.
_RESULTS = ("val/loss", "train/loss")
# Values that need no quotes in Hydra's notation.
_PLAIN = re.compile(r"[\w/.-]+")
# Hydra's flags that name further folders of configuration, which only Hydra itself reads.
_SEARCH_PATH_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")


class _RedactingStream:
    """Wraps stdout or stderr, and removes secrets from log lines, tracebacks, and the output of the user's code.

    Output that does not pass through Python, such as NCCL's, is not filtered.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact_text(text))
        return len(text)  # as a stream returns that has taken all of it

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _RedactingFormatter(logging.Formatter):
    """Wraps a formatter and removes secrets from its lines."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(self._formatter.format(record))


class _WithoutAdvertisements(logging.Filter):
    """Leaves out Lightning's own info lines. Others go through its loggers too, by `rank_zero_info`: ours, a user's.

    Args:
        lightning: the folders of its source.
    """

    def __init__(self, lightning: Sequence[Path]) -> None:
        super().__init__()
        self._lightning = lightning

    def filter(self, record: logging.LogRecord) -> bool:
        path = Path(record.pathname)  # of the caller
        if path.is_relative_to(_PACKAGE) and not record.name.startswith(f"{_PACKAGE.name}."):
            record.name = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
        return record.levelno >= logging.WARNING or not any(map(path.is_relative_to, self._lightning))


def tidy_console() -> None:
    """Leave only Hydra's handler and useful lines on the console. Call it after the import of Lightning.

    Lightning adds its own handler beside Hydra's, so that each of its lines appears twice, and its info lines contain
    advertisements. Its warnings stay. If Hydra also logs into a file, secrets are removed there too.
    """
    # `rank_zero_info` has the logger of that of its packages which was imported last.
    packages = [
        sys.modules[name] for name in ("lightning", "pytorch_lightning", "lightning_fabric") if name in sys.modules
    ]
    without = _WithoutAdvertisements([Path(str(package.__file__)).parent for package in packages])
    for handler in logging.getLogger().handlers:
        handler.addFilter(without)
        if isinstance(handler, logging.FileHandler):
            handler.setFormatter(_RedactingFormatter(handler.formatter or logging.Formatter()))
    for name in LIGHTNINGS_LOGGERS:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    # torch 2.13 deprecates a call that Lightning 2.6 makes; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")


class SweepRun(NamedTuple):
    """One run of a sweep: what it changed, the name of its result and the value, and how it ended."""

    overrides: str
    metric: str
    value: float | None
    state: str


def print_sweep(runs: list[SweepRun]) -> None:
    """Print a table of the runs, in the order in which they ran."""
    table = Table()
    names = list(dict.fromkeys(each.metric for each in runs if each.metric))
    table.add_column("run", justify="right")
    table.add_column("overrides", overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("state", overflow="fold")
    for number, each in enumerate(runs):
        values = ["" if each.metric != name else f"{each.value:.5g}" for name in names]
        table.add_row(str(number), each.overrides, *values, each.state)
    print()
    print_table(table, width=120)


class _Refusal(BaseException):
    """Carries an error through Hydra, which would otherwise print a traceback and start the next job of a sweep."""


def _command_to_go_on(recipe: str, arguments: Sequence[str], config: DictConfig) -> str:
    """Return the command line that resumes this run, or this job of a sweep, in the same folder."""
    folder = str(Path(config.output_dir).absolute())
    if not _PLAIN.fullmatch(folder):
        folder = f"'{folder}'"  # quotes for Hydra, inside those for the shell
    return shlex.join([*_words_to_repeat(recipe, arguments), f"output_dir={folder}"])


def _words_to_repeat(recipe: str, arguments: Sequence[str]) -> list[str]:
    """Return the words of the command line that repeats this run, or this job of a sweep, in a new folder."""
    options = [each for each in arguments if not is_override(each) and each not in ("-m", "--multirun")]
    kept = [
        each for each in as_typed(HydraConfig.get().overrides.task) if not each.startswith(("output_dir=", "resume="))
    ]
    return ["azureml-strategy", "train", recipe, *options, *kept]


def _content_errors() -> tuple[type[Exception], ...]:
    """Errors in the content of a recipe that only a run can find."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from azureml_strategy.data import CorpusError, DataFolderError, ShardIndexError, StorageError

    return (
        *(DataFolderError, CorpusError, ShardIndexError, StorageError),
        *(MisconfigurationException, OmegaConfBaseException),
    )


def _check_folder(config: DictConfig, arguments: Sequence[str]) -> None:
    """Refuse an output folder that cannot be created, for which Hydra would print a traceback."""
    flags = {each for each in arguments if each.startswith("-")}
    if flags - {"-m", "--multirun"}:  # `--cfg job` and similar flags create no folder
        return
    key = "hydra.sweep.dir" if flags else "hydra.run.dir"
    try:
        folder = Path(str(OmegaConf.select(config, key))).absolute()
    except OmegaConfBaseException:  # it depends on values that only the running application knows
        return
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "may not be written to" if existing.is_dir() else "is no folder"
        raise RecipeError(
            f"The run's output folder is {folder}, but {existing} {problem}. Go to another folder, or name one: "
            f"{key}=FOLDER."
        )


def _train(
    config: DictConfig, launch: Launch | PartialLaunch | None, recipe: str, arguments: Sequence[str]
) -> dict[str, float]:
    """Train one job of a sweep, or the only one, and return the metrics of the last epoch by name.

    An error that needs no traceback becomes a `_Refusal`.
    """
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from azureml_strategy.training.run import speaks_for_all, train

    try:
        keep_secrets(config)
        # The command line that a strategy gives other ranks then has this run's time in place of `${now:...}`.
        OmegaConf.copy_cache(config, cast(Any, HydraConfig.instance().cfg))
        return train(config, command_text(_words_to_repeat(recipe, arguments)))
    except SIGTERMException:
        if launch is None and speaks_for_all(launch):
            log.info("To go on from there: %s", _command_to_go_on(recipe, arguments, config))
        raise
    except (RecipeError, LaunchError, ResumeError, TrackingError) as error:
        raise _Refusal(error) from error
    except _content_errors() as error:
        if "HYDRA_FULL_ERROR" in os.environ or HydraConfig.get().mode is RunMode.MULTIRUN:
            raise  # the next job of a sweep may succeed
        text = str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else error
        raise _Refusal(f"{text} (HYDRA_FULL_ERROR=1 shows where.)") from error
    except Exception:
        if launch is not None and launch.world_size > 1 and HydraConfig.get().mode is RunMode.MULTIRUN:
            # Hydra would start the next job, while other ranks may still wait for this one in a collective.
            traceback.print_exc()
            sys.exit(1)
        raise


@contextmanager
def _noted(config: DictConfig, runs: list[SweepRun]) -> Iterator[dict[str, float]]:
    """Record how a run of a sweep ends. The context yields a dictionary, into which the block puts the metrics."""
    if HydraConfig.get().mode is not RunMode.MULTIRUN:
        yield {}
        return
    overrides = redact_text(" ".join(as_typed(HydraConfig.get().overrides.task)))
    metrics: dict[str, float] = {}
    try:
        yield metrics
    except BaseException as error:
        cause = (error.__cause__ or error) if isinstance(error, _Refusal) else error
        kind, text = type(cause).__name__, redact_text(str(cause)).strip().partition("\n")[0]
        runs.append(SweepRun(overrides, "", None, f"{kind}: {text}" if text else kind))
        raise
    monitor = OmegaConf.select(config, "checkpoint.monitor", throw_on_missing=False)
    name = next((each for each in (monitor, *_RESULTS) if each in metrics), "")
    runs.append(SweepRun(overrides, name, metrics.get(name), "done"))


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Put these arguments where Hydra reads them."""
    original = sys.argv
    sys.argv = [original[0], *arguments]
    try:
        yield
    finally:
        sys.argv = original


def run_recipe(recipe: str, arguments: Sequence[str]) -> None:
    """Run a recipe as Hydra runs any application: output folder, `--cfg job`, `--multirun` and the rest.

    Args:
        recipe: the name of a shipped recipe, or the path of a YAML file.
        arguments: overrides and Hydra's flags.

    Raises:
        RecipeError: the recipe or an override is misspelt, or the job's variables give no rank to trust.
    """
    register_resolvers()
    arguments = with_lists(arguments)
    found = find_recipe(recipe)
    if not any(each.startswith(_SEARCH_PATH_FLAGS) for each in arguments):
        _check_folder(check_overrides(found, [each for each in arguments if is_override(each)]), arguments)
    try:
        launch = detect_ranks()
    except LaunchError as error:
        raise RecipeError(str(error)) from error
    typed = sys.argv
    runs: list[SweepRun] = []

    @hydra.main(version_base="1.3", config_path=None, config_name=found.name)
    def application(config: DictConfig) -> None:
        sys.argv = typed  # a strategy repeats it to start further processes
        tidy_console()
        with _noted(config, runs) as metrics:
            metrics.update(_train(config, launch, recipe, arguments))

    folder = ["--config-dir", found.folder] if found.folder else []
    try:
        with (
            _command_line([*folder, *arguments]),
            own_modules(found.folder),
            redirect_stdout(cast(TextIO, _RedactingStream(sys.stdout))),
            redirect_stderr(cast(TextIO, _RedactingStream(sys.stderr))),
        ):
            try:
                application()
            finally:
                if runs:
                    from azureml_strategy.training.run import speaks_for_all

                    if speaks_for_all(launch):
                        print_sweep(runs)
    except _Refusal as refusal:
        raise RecipeError(str(refusal)) from refusal
