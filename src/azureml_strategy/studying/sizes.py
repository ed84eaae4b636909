"""The runs of a study: what each size trains, and how."""

from __future__ import annotations

from collections.abc import Iterator

from azureml_strategy.studying.options import StudyOptions


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
