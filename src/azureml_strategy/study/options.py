"""What a scaling study is asked to run: a recipe on several sizes, each a job or an emulated one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.cluster.job import Price

# Enough to leave the warm-up of the shipped recipes behind (50 steps where it is longest) and to measure as many.
DEFAULT_STEPS = 100


class StudyError(ValueError):
    """The study cannot be made as asked; the message says what to type instead."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What to study, and where the results go.

    Attributes:
        recipe: name of a shipped recipe or path of a YAML file; None with `runs`.
        overrides: what to change in it, at every size, in Hydra's notation.
        nodes: sizes, in nodes.
        processes_per_node: None is one, emulated, and the number of GPUs in a submitted job.
        local: emulate the jobs here instead of submitting them.
        steps: optimizer steps of each run, without validation and checkpoints; 0 trains each as long as the recipe.
        runs: ids of MLflow runs to read instead of starting any; in Azure ML, names of jobs.
        store: where `runs` are: an MLflow tracking URI, or `azureml` for the configured workspace; None is
            MLFLOW_TRACKING_URI, else `mlflow.db` here.
        price_per_hour: of one node, for runs that have recorded no cost.
        currency: of `price_per_hour`.
        output: JSON file.
        plot: PNG file.

    Raises:
        StudyError: contradictory options, or a number that cannot be.
    """

    recipe: str | None = None
    overrides: Sequence[str] = ()
    nodes: Sequence[int] = ()
    processes_per_node: int | None = None
    local: bool = False
    steps: int = DEFAULT_STEPS
    runs: Sequence[str] = ()
    store: str | None = None
    price_per_hour: float | None = None
    currency: str = "USD"
    output: Path = Path("outputs/study.json")
    plot: Path = Path("outputs/study.png")

    def __post_init__(self) -> None:
        if self.runs:
            self._check_reading()
        else:
            self._check_starting()
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise StudyError(f"--price-per-hour {self.price_per_hour} is no price. Give that of one node and hour.")

    @property
    def price(self) -> Price | None:
        """The user's price of a node."""
        if self.price_per_hour is None:
            return None
        return Price(self.price_per_hour, self.currency, "--price-per-hour")

    def _check_reading(self) -> None:
        starting = {"a recipe": self.recipe, "--nodes": self.nodes, "--local": self.local, "overrides": self.overrides}
        given = [name for name, value in starting.items() if value]
        if given or self.processes_per_node is not None:
            raise StudyError(
                f"--runs reads runs that exist, and {given[0] if given else '--processes-per-node'} says what to start."
                " Give one or the other."
            )
        _refuse_repeated("--runs", self.runs)

    def _check_starting(self) -> None:
        if self.store is not None:
            raise StudyError("--store says where --runs are. Add --runs ID,ID, or leave it out.")
        if self.recipe is None:
            raise StudyError(
                "There is nothing to study. Give a recipe and sizes, `azureml-strategy study resnet50_ddp --nodes 1,2 "
                "--local`, or runs that exist: `azureml-strategy study --runs ID,ID`."
            )
        if not self.nodes:
            raise StudyError(f"Which sizes? Give them in nodes: azureml-strategy study {self.recipe} --nodes 1,2,4")
        _refuse_repeated("--nodes", self.nodes)
        for option, value in (("--nodes", min(self.nodes)), ("--processes-per-node", self.processes_per_node)):
            if value is not None and value < 1:
                raise StudyError(f"{option}: {value} is too few; give 1 or more.")
        if self.steps < 0:
            raise StudyError(f"--steps {self.steps} is negative. 0 trains each run as long as the recipe says.")


def parse_list(text: str | None) -> list[str]:
    """What stands between commas; nothing for None."""
    return [each.strip() for each in text.split(",") if each.strip()] if text else []


def parse_nodes(text: str | None) -> list[int]:
    """Sizes in nodes, ascending.

    Raises:
        StudyError: something that is no number.
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
    """The overrides of every run: the user's, and what makes a measurement of a training.

    A study needs a rate, not a model: so many steps, no validation, no checkpoint. What the user sets himself stays.
    """
    if options.steps == 0:
        return list(options.overrides)
    short = {
        "trainer.max_steps": str(options.steps),
        "trainer.max_epochs": "1000000",  # the steps decide
        "trainer.limit_val_batches": "0",
        "checkpoint": "none",
    }
    own = {each.lstrip("+~").partition("=")[0] for each in options.overrides}
    return [*(f"{key}={value}" for key, value in short.items() if key not in own), *options.overrides]


def headings(options: StudyOptions) -> Iterator[tuple[int, str]]:
    """Each size with its words, from small to large."""
    for nodes in sorted(options.nodes):
        processes = options.processes_per_node
        yield nodes, count(nodes, "node") + (f" x {count(processes, 'process')}" if processes else "")


def count(number: int, what: str) -> str:
    """A number of things in words."""
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"
