"""One study, from the options to the table, the picture and the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from azureml_strategy.studying.figures import Figures
from azureml_strategy.studying.options import StudyOptions
from azureml_strategy.studying.plot import plot
from azureml_strategy.studying.scaling import Scaling, compare
from azureml_strategy.studying.table import print_study


def run_study(options: StudyOptions) -> int:
    """Start the runs or read them, then print, draw and write what they achieved.

    Returns:
        The exit code: 0, 1 if a run failed or measured nothing, 130 if the user ended it. What was measured by then
        is shown all the same.

    Raises:
        StudyError: it cannot be made as asked.
        JobError: Azure ML cannot do what is asked, or did not answer.
        TrackingError: the tracking store cannot be used.
    """
    figures: list[Figures] = []
    try:
        for each in _runs(options):
            figures.append(each.priced(options.price))
    except KeyboardInterrupt:
        if figures:
            _report(compare(figures), options)
        return 130
    scaling = compare(figures)
    _report(scaling, options)
    return 0 if scaling.complete else 1


def _report(scaling: Scaling, options: StudyOptions) -> None:
    _write(options.output, to_json(scaling).encode())
    _write(options.plot, plot(scaling, options.recipe or "scaling study"))
    print_study(scaling, options, [options.output, options.plot])


def to_json(scaling: Scaling) -> str:
    """Everything but the runs' configurations, for a file."""
    rows = [
        {
            **{name: value for name, value in asdict(row.figures).items() if name != "params"},
            "samples_per_second_per_device": row.figures.per_device,
            "speed_up": row.speed_up,
            "efficiency": row.efficiency,
        }
        for row in scaling.rows
    ]
    base = scaling.base.run_id if scaling.base else None
    return json.dumps({"base": base, "runs": rows, "differences": scaling.differences}, indent=2)


def _runs(options: StudyOptions) -> Iterator[Figures]:
    if options.runs:
        from azureml_strategy.studying.existing import read_runs as runs
    elif options.local:
        from azureml_strategy.studying.local import emulate_sizes as runs
    else:
        from azureml_strategy.studying.submitted import submit_sizes as runs
    return runs(options)


def _write(path: Path, content: bytes) -> None:
    """A file that is complete or not there; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    os.replace(part, path)
