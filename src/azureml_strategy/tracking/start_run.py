"""Lets a script's `mlflow.start_run()` join the job's run, whatever experiment the script has chosen before."""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)


def join_job_run(fluent: ModuleType) -> None:
    """Replace `start_run` of `mlflow.tracking.fluent`, which fails in a job after a script's `mlflow.set_experiment`.

    MLflow takes the run of MLFLOW_RUN_ID, and then refuses it, since it is of another experiment. On a laptop, where
    there is no such run, the same lines work.
    """
    start_run = fluent.start_run

    @functools.wraps(start_run)
    def start_or_join_run(*args: Any, **kwargs: Any) -> Any:
        chosen = fluent._active_experiment_id
        if chosen is None or args or kwargs.get("run_id") or not os.environ.get("MLFLOW_RUN_ID"):
            return start_run(*args, **kwargs)
        fluent._active_experiment_id = None  # type: ignore[attr-defined]
        try:
            run = start_run(*args, **kwargs)
        finally:
            fluent._active_experiment_id = chosen  # type: ignore[attr-defined]
        if run.info.experiment_id != chosen:
            log.warning(
                "mlflow.set_experiment() has chosen experiment %s, and the run of this job belongs to %s: "
                "mlflow.start_run() joins the job's run, and later runs of the script go to its own experiment. "
                "Name the experiment when you submit the job (job.experiment), and leave mlflow.set_experiment() out.",
                chosen,
                run.info.experiment_id,
            )
        return run

    fluent.start_run = start_or_join_run  # type: ignore[attr-defined]
    if getattr(sys.modules.get("mlflow"), "start_run", None) is start_run:  # imported before
        sys.modules["mlflow"].start_run = start_or_join_run  # type: ignore[attr-defined]
