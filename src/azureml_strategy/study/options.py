"""The options of a scaling study: a recipe or command and several sizes, each of which runs as a job, or emulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.cluster.job import Price, count

# Enough to pass the warm-up of the shipped recipes (at most 50 steps) and to measure as many steps.
DEFAULT_STEPS = 100


class StudyError(ValueError):
    """The study cannot be made as requested; the message says what to type instead."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What to study, and where the results go.

    Attributes:
        recipe: name of a shipped recipe or path of a YAML file; None with `command` and `runs`.
        command: the words of a command, in place of a recipe, such as `python train.py --epochs 1`.
        overrides: changes to the recipe at every size, in Hydra's notation; with a command, settings of `cluster` and
            `job`.
        nodes: sizes, in nodes.
        processes_per_node: None means one in an emulated job, and the number of GPUs in a submitted job.
        local: emulate the jobs on this machine instead of submitting them.
        steps: optimizer steps of each run, without validation and checkpoints; 0 trains each as long as the recipe
            says. None is 100 for a recipe. A command runs as long as it does.
        runs: ids of MLflow runs to read instead of starting any; in Azure ML, names of jobs.
        store: the store of `runs`: an MLflow tracking URI, or `azureml` for the configured workspace; None is
            MLFLOW_TRACKING_URI, else `mlflow.db` in the current folder.
        price_per_hour: price of one node, for runs that have recorded no cost.
        currency: of `price_per_hour`.
        output: path of the JSON file.
        plot: path of the PNG file.

    Raises:
        StudyError: the options contradict each other, or a number is invalid.
    """

    recipe: str | None = None
    command: Sequence[str] = ()
    overrides: Sequence[str] = ()
    nodes: Sequence[int] = ()
    processes_per_node: int | None = None
    local: bool = False
    steps: int | None = None
    runs: Sequence[str] = ()
    store: str | None = None
    price_per_hour: float | None = None
    currency: str = "USD"
    output: Path = Path("outputs/study.json")
    plot: Path = Path("outputs/study.png")

    def __post_init__(self) -> None:
        if self.runs:
            self._check_runs_to_read()
        else:
            self._check_runs_to_start()
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise StudyError(f"--price-per-hour {self.price_per_hour} is no price. Give that of one node and hour.")

    @property
    def price(self) -> Price | None:
        """The price of a node that the user gave."""
        if self.price_per_hour is None:
            return None
        return Price(self.price_per_hour, self.currency, "--price-per-hour")

    def _check_runs_to_read(self) -> None:
        starting = {
            "a recipe": self.recipe,
            "a command": self.command,
            "--nodes": self.nodes,
            "--local": self.local,
            "overrides": self.overrides,
        }
        given = [name for name, value in starting.items() if value]
        if given or self.processes_per_node is not None:
            raise StudyError(
                f"--runs reads runs that exist, and {given[0] if given else '--processes-per-node'} says what to start."
                " Give one or the other."
            )
        _refuse_repeated("--runs", self.runs)

    def _check_runs_to_start(self) -> None:
        if self.store is not None:
            raise StudyError("--store says where --runs are. Add --runs ID,ID, or leave it out.")
        if self.recipe is None and not self.command:
            raise StudyError(
                "There is nothing to study. Give a recipe and sizes, `azureml-strategy study resnet50_ddp --nodes 1,2 "
                "--local`, a command, `azureml-strategy study --nodes 1,2 --local -- python train.py`, or runs that "
                "exist: `azureml-strategy study --runs ID,ID`."
            )
        if self.command:
            self._check_command()
        if not self.nodes:
            raise StudyError("Which sizes? Give them in nodes: azureml-strategy study ... --nodes 1,2,4")
        _refuse_repeated("--nodes", self.nodes)
        for option, value in (("--nodes", min(self.nodes)), ("--processes-per-node", self.processes_per_node)):
            if value is not None and value < 1:
                raise StudyError(f"{option}: {value} is too few; give 1 or more.")
        if self.steps is not None and self.steps < 0:
            raise StudyError(f"--steps {self.steps} is negative. 0 trains each run as long as the recipe says.")

    def _check_command(self) -> None:
        if self.recipe is not None:
            raise StudyError(f"{self.recipe} is a recipe, and a command stands after `--`. Give one of the two.")
        if self.steps is not None:
            raise StudyError("--steps is for recipes. Say with the command's own arguments how long it trains.")
        if self.local and self.overrides:
            raise StudyError(f"{self.overrides[0]} is a setting of submitted jobs, and --local submits none.")


def parse_list(text: str | None) -> list[str]:
    """The items of a comma-separated list, perhaps with a comma at its end; none for None.

    Raises:
        StudyError: an item is empty, as from a variable of the shell that is not set.
    """
    items = [each.strip() for each in text.split(",")] if text else []
    if items and not items[-1]:
        items.pop()
    if "" in items:
        raise StudyError(f"{text!r} is a list with an empty item, which would be left out. Fill it, or remove a comma.")
    return items


def parse_nodes(text: str | None) -> list[int]:
    """Sizes in nodes, ascending.

    Raises:
        StudyError: an item is not a number.
    """
    for each in parse_list(text):
        if not (each.isascii() and each.isdigit()):
            raise StudyError(f"--nodes: {each!r} is no number of nodes. Write them with commas: --nodes 1,2,4,8")
    return sorted(int(each) for each in parse_list(text))


def _refuse_repeated(option: str, values: Sequence[object]) -> None:
    repeated = next((each for position, each in enumerate(values) if each in values[:position]), None)
    if repeated is not None:
        raise StudyError(f"{option} names {repeated} twice. Name each once.")


def run_overrides(options: StudyOptions) -> list[str]:
    """The overrides of every run: the user's, and those that turn a training into a measurement.

    A study needs a rate and not a model, so a run has a limited number of steps, no validation and no checkpoint. The
    user's own overrides take precedence.
    """
    steps = DEFAULT_STEPS if options.steps is None else options.steps
    if steps == 0 or options.command:
        return list(options.overrides)
    short = {
        "trainer.max_steps": str(steps),
        "trainer.max_epochs": "1000000",  # so that `max_steps` ends the run
        "trainer.limit_val_batches": "0",
        "checkpoint": "none",
    }
    given = {each.lstrip("+~").partition("=")[0] for each in options.overrides}
    return [*(f"{key}={value}" for key, value in short.items() if key not in given), *options.overrides]


def headings(options: StudyOptions) -> Iterator[tuple[int, str]]:
    """Each size with its description, from small to large."""
    for nodes in sorted(options.nodes):
        processes = options.processes_per_node
        yield nodes, count(nodes, "node") + (f" x {count(processes, 'process')}" if processes else "")
