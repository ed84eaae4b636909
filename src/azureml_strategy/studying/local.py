"""The runs of a study emulated here, one after another."""

from __future__ import annotations

import os
from collections.abc import Iterator

from azureml_strategy.emulator import EmulatedJob, EmulationError, emulate_run
from azureml_strategy.studying.errors import StudyError
from azureml_strategy.studying.figures import Figures, read_figures
from azureml_strategy.studying.options import StudyOptions
from azureml_strategy.studying.sizes import headings, run_overrides
from azureml_strategy.training.checks import check_overrides
from azureml_strategy.training.recipes import RecipeError, find_recipe
from azureml_strategy.training.resolvers import register_resolvers

# What a shell reports of a process that Ctrl-C or SIGTERM ended: 128 + the signal.
_INTERRUPTED = (130, 143)


def emulate_sizes(options: StudyOptions) -> Iterator[Figures]:
    """Emulate a job of each size, from small to large; a size that fails does not keep the next from its turn.

    Raises:
        StudyError: the recipe or an override is misspelt, or nothing can be emulated here.
        KeyboardInterrupt: the user, or SIGTERM, ended a job.
    """
    overrides = run_overrides(options)
    register_resolvers()
    try:
        check_overrides(find_recipe(str(options.recipe)), overrides)
    except RecipeError as error:
        raise StudyError(str(error)) from error
    command = ["env", f"OMP_NUM_THREADS={threads_per_process(options)}"]
    command += ["azureml-strategy", "train", str(options.recipe), *overrides]
    for nodes, heading in headings(options):
        print(f"\n{heading}", flush=True)
        yield _emulate(EmulatedJob(command, nodes, options.processes_per_node or 1))


def threads_per_process(options: StudyOptions) -> str:
    """The threads that a process computes with: as many at every size.

    Otherwise a small job would have more of this machine's cores for each process than a large one, and the study
    would show that instead of what the processes cost one another.
    """
    processes = max(options.nodes) * (options.processes_per_node or 1)
    return os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // processes, 1))


def _emulate(job: EmulatedJob) -> Figures:
    from mlflow.tracking import MlflowClient

    try:
        emulated = emulate_run(job)
    except EmulationError as error:
        raise StudyError(str(error)) from error
    if emulated.exit_code in _INTERRUPTED:
        raise KeyboardInterrupt
    return read_figures(MlflowClient(emulated.run.tracking_uri), emulated.run.run_id, job.nodes)
